package certs

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"slices"
)

// Follow makes the configuration of a client read the authority of servers again for every
// handshake. While the file cannot be used, the authority before stays. hosts are the names and
// addresses of the servers, as in their URLs.
func Follow(c *tls.Config, caFile string, hosts ...string) error {
	a, err := LoadAuthority(caFile)
	if err != nil {
		return err
	}
	c.InsecureSkipVerify = true // VerifyConnection checks in its place, because the authority may change
	c.VerifyConnection = func(s tls.ConnectionState) error {
		_ = a.Load(caFile) // after an error, the authority before stays
		if err := a.verify(s.PeerCertificates, x509.ExtKeyUsageServerAuth); err != nil {
			return err
		}
		return checkServer(s, hosts)
	}
	return nil
}

// checkServer returns an error if a certificate does not belong to the server. If the server's URL
// has an address instead of a name, the handshake has no server name. The certificate must then
// have one of the addresses among hosts.
func checkServer(s tls.ConnectionState, hosts []string) error {
	cert := s.PeerCertificates[0]
	if s.ServerName != "" {
		return cert.VerifyHostname(s.ServerName)
	}
	isForAddress := func(host string) bool { return net.ParseIP(host) != nil && cert.VerifyHostname(host) == nil }
	if slices.ContainsFunc(hosts, isForAddress) {
		return nil
	}
	return fmt.Errorf("certificate: it belongs to none of %q", hosts)
}
