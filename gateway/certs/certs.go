// Package certs makes TLS configurations from certificate files. It reads the files again when they
// change.
package certs

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Pair is a certificate with its key, from two PEM files. Each handshake uses the pair that was
// read last; open connections keep the pair of their handshake.
type Pair struct {
	mu                sync.Mutex // protects the three fields below, but current is read without it
	certFile, keyFile string
	triedLast         [2][]byte // contents of both files that were tried last
	current           atomic.Pointer[tls.Certificate]
}

// Load reads both files. An error means that they are no valid pair, or that the certificate has
// expired.
func Load(certFile, keyFile string) (*Pair, error) {
	p := &Pair{certFile: certFile, keyFile: keyFile}
	if _, err := p.Reload(); err != nil {
		return nil, err
	}
	return p, nil
}

// Reload reads the files again if their contents changed. It does not go by their times, because
// some tools keep a file's time when they replace it. While one of the files is written and the
// other is not yet, they do not match: the old pair then stays in force, and the error is returned
// only once for the same contents.
func (p *Pair) Reload() (changed bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	present, err := read(p.certFile, p.keyFile)
	if err != nil {
		return false, p.reportReadErrorOnce(err)
	}
	if p.wasTriedLast(present) { // nothing has changed; an error of these contents was returned before
		return false, nil
	}
	p.triedLast = present
	cert, err := parse(present[0], present[1])
	if err != nil {
		return false, fmt.Errorf("certificate %s with key %s: %w", p.certFile, p.keyFile, err)
	}
	p.current.Store(&cert)
	return true, nil
}

// wasTriedLast says whether the files have the contents that were tried last. It returns false
// before the first try.
func (p *Pair) wasTriedLast(now [2][]byte) bool {
	return p.triedLast[0] != nil && bytes.Equal(p.triedLast[0], now[0]) && bytes.Equal(p.triedLast[1], now[1])
}

// reportReadErrorOnce returns err the first time that a file cannot be read, and nil from then on
// until the files change. The caller holds p.mu.
func (p *Pair) reportReadErrorOnce(err error) error {
	unreadable := [2][]byte{{}, {}} // this value in triedLast stands for files that cannot be read
	if p.wasTriedLast(unreadable) {
		return nil
	}
	p.triedLast = unreadable
	return err
}

// ReplaceBy replaces the files and the certificate by those of another pair, which nothing uses
// yet. Open connections keep the old certificate.
func (p *Pair) ReplaceBy(next *Pair) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.certFile, p.keyFile, p.triedLast = next.certFile, next.keyFile, next.triedLast
	p.current.Store(next.current.Load())
}

// Leaf returns the certificate that handshakes present now.
func (p *Pair) Leaf() *x509.Certificate { return p.current.Load().Leaf }

// Server returns the configuration of a listener: TLS 1.2 or later, and HTTP/1.1 only, because the
// server behind it speaks nothing else.
func (p *Pair) Server() *tls.Config {
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		NextProtos:     []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return p.current.Load(), nil },
	}
}

// Listener puts TLS over a listener. A nil pair leaves it in clear text.
func (p *Pair) Listener(ln net.Listener) net.Listener {
	if p == nil {
		return ln
	}
	return tls.NewListener(ln, p.Server())
}

// Client returns the configuration of calls to an engine. caFile replaces the system's authorities.
// certFile and keyFile are presented to an engine that asks for a certificate. Each may be empty.
//
// The client's own certificate is read again for every handshake. Handshakes are few, because
// connections are kept.
func Client(serverName, caFile, certFile, keyFile string) (*tls.Config, error) {
	c := &tls.Config{ServerName: serverName, MinVersion: tls.VersionTLS12}
	if caFile != "" {
		pem, err := os.ReadFile(caFile)
		if err != nil {
			return nil, fmt.Errorf("ca_file: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("ca_file %s holds no certificate in PEM; write the authority that signed the engines' certificates", caFile)
		}
	}
	if certFile == "" { // the client presents no certificate
		return c, nil
	}
	pair, err := Load(certFile, keyFile)
	if err != nil {
		return nil, err
	}
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		_, _ = pair.Reload() // if the files are just being replaced, the old certificate is sent, and the engine accepts or refuses it
		return pair.current.Load(), nil
	}
	return c, nil
}

// read reads a certificate and its key. Its error names every file that cannot
// be read, the certificate first.
func read(certFile, keyFile string) (pair [2][]byte, err error) {
	cert, certErr := os.ReadFile(certFile)
	key, keyErr := os.ReadFile(keyFile)
	switch {
	case certErr != nil && keyErr != nil:
		err = fmt.Errorf("certificate: %w; its key: %w", certErr, keyErr)
	case certErr != nil:
		err = fmt.Errorf("certificate: %w", certErr)
	case keyErr != nil:
		err = fmt.Errorf("key of certificate %s: %w", certFile, keyErr)
	}
	return [2][]byte{cert, key}, err
}

// parse returns the pair of a certificate and its key, or an error if the certificate has expired.
func parse(certPEM, keyPEM []byte) (tls.Certificate, error) {
	cert, err := tls.X509KeyPair(certPEM, keyPEM)
	switch {
	case err != nil:
		return cert, fmt.Errorf("%w; both must be PEM, the key unencrypted and the certificate's own", err)
	case time.Now().After(cert.Leaf.NotAfter):
		return cert, fmt.Errorf("%w on %s; renew it", ErrExpired, cert.Leaf.NotAfter.Format(time.DateOnly))
	}
	return cert, nil
}

// ErrExpired is the error of Load and Reload for a certificate that has expired.
var ErrExpired = errors.New("the certificate expired")
