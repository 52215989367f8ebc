package certs

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"slices"
	"sync/atomic"
)

// Authority has the certificates that sign those of all proxies of a group, from a PEM file. Each
// handshake uses what was read last.
type Authority struct{ pool atomic.Pointer[x509.CertPool] }

// LoadAuthority makes an Authority from the certificates in a PEM file.
func LoadAuthority(file string) (*Authority, error) {
	a := &Authority{}
	return a, a.Load(file)
}

// Load reads a file and uses it in place of the last one. If the file cannot be used, the last one
// stays.
func (a *Authority) Load(file string) error {
	pem, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("authority: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return fmt.Errorf("authority: %s holds no certificate in PEM; write the one that signed those of all sides", file)
	}
	a.pool.Store(pool)
	return nil
}

// verify checks a certificate chain, the peer's own certificate first, for the given use: as a
// server or as a client. The caller checks the names.
func (a *Authority) verify(chain []*x509.Certificate, usage x509.ExtKeyUsage) error {
	if len(chain) == 0 {
		return fmt.Errorf("certificate: the caller showed none")
	}
	intermediates := x509.NewCertPool()
	for _, c := range chain[1:] {
		intermediates.AddCert(c)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{Roots: a.pool.Load(), Intermediates: intermediates, KeyUsages: []x509.ExtKeyUsage{usage}})
	return err
}

// MutualServer returns the configuration of a listener whose callers must present a certificate:
// TLS 1.3. The names in that certificate are not checked here; the server uses them to decide what
// a caller may do.
func (p *Pair) MutualServer(a *Authority) *tls.Config {
	c := p.Server()
	c.MinVersion, c.ClientAuth = tls.VersionTLS13, tls.RequireAnyClientCert
	c.VerifyConnection = func(s tls.ConnectionState) error { return a.verify(s.PeerCertificates, x509.ExtKeyUsageClientAuth) }
	return c
}

// MutualListener puts TLS over a listener whose callers must present a certificate.
func (p *Pair) MutualListener(ln net.Listener, a *Authority) net.Listener {
	return tls.NewListener(ln, p.MutualServer(a))
}

// MutualClient returns the configuration of calls to a proxy of the group: TLS 1.3. The proxy's
// certificate must have one of names, which are DNS names or URIs.
func (p *Pair) MutualClient(a *Authority, serverName string, names []string) *tls.Config {
	return &tls.Config{
		ServerName: serverName, MinVersion: tls.VersionTLS13,
		InsecureSkipVerify: true, // VerifyConnection checks in its place: a SPIFFE name is no host name, and the authority may change
		VerifyConnection: func(s tls.ConnectionState) error {
			if err := a.verify(s.PeerCertificates, x509.ExtKeyUsageServerAuth); err != nil {
				return err
			}
			found := Names(s.PeerCertificates[0])
			if !slices.ContainsFunc(found, func(name string) bool { return slices.Contains(names, name) }) { // no name is in both lists
				return fmt.Errorf("certificate: it belongs to %q, not to %q", found, names)
			}
			return nil
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return p.current.Load(), nil },
	}
}

// Names are the DNS and URI names of a certificate.
func Names(c *x509.Certificate) []string {
	names := slices.Clone(c.DNSNames)
	for _, u := range c.URIs {
		names = append(names, u.String())
	}
	return names
}
