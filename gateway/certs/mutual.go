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

// Authority is who signs the certificates of a group, as a PEM file holds it.
// Handshakes take whatever was read last.
type Authority struct{ pool atomic.Pointer[x509.CertPool] }

// LoadAuthority reads the file.
func LoadAuthority(file string) (*Authority, error) {
	a := &Authority{}
	return a, a.Load(file)
}

// Load reads a file in place of the one before; one that cannot be used changes
// nothing.
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

// verify checks a chain as both sides do; names are looked at by the caller.
func (a *Authority) verify(chain []*x509.Certificate, usage x509.ExtKeyUsage) error {
	if len(chain) == 0 {
		return fmt.Errorf("certificate: the caller showed none")
	}
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{Roots: a.pool.Load(), Intermediates: between, KeyUsages: []x509.ExtKeyUsage{usage}})
	return err
}

// MutualServer is the configuration of a listener whose callers show
// certificates: TLS 1.3. Which of them may do what is for who reads the names.
func (p *Pair) MutualServer(a *Authority) *tls.Config {
	c := p.Server()
	c.MinVersion, c.ClientAuth = tls.VersionTLS13, tls.RequireAnyClientCert
	c.VerifyConnection = func(s tls.ConnectionState) error { return a.verify(s.PeerCertificates, x509.ExtKeyUsageClientAuth) }
	return c
}

// MutualListener puts TLS over a listener whose callers show certificates.
func (p *Pair) MutualListener(ln net.Listener, a *Authority) net.Listener {
	return tls.NewListener(ln, p.MutualServer(a))
}

// MutualClient is the configuration of calls to a member of the group, whose
// certificate has one of the names, DNS or URI: TLS 1.3.
func (p *Pair) MutualClient(a *Authority, serverName string, names []string) *tls.Config {
	return &tls.Config{
		ServerName: serverName, MinVersion: tls.VersionTLS13,
		InsecureSkipVerify: true, // VerifyConnection does it: a SPIFFE name is no host, and the authority may change
		VerifyConnection: func(s tls.ConnectionState) error {
			if err := a.verify(s.PeerCertificates, x509.ExtKeyUsageServerAuth); err != nil {
				return err
			}
			if found := Names(s.PeerCertificates[0]); !slices.ContainsFunc(found, func(n string) bool { return slices.Contains(names, n) }) {
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
