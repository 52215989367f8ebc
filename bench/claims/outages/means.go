package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"time"
)

// hosts is the file that tells the proxy where names lead. The proxy has a mount namespace of its
// own, in which this file is /etc/hosts.
func (s *stage) hosts() string { return s.name + ".hosts" }

// resolves says where a name leads from now on. The first call is to be made before the proxy
// starts, and has it see the file.
func (s *stage) resolves(name, address string) error {
	// in place: the mount is of this file
	err := os.WriteFile(s.world.File(s.hosts()), fmt.Appendf(nil, "127.0.0.1 localhost\n%s %s\n", address, name), 0o600)
	s.proxy.Command = func(binary string, args ...string) *exec.Cmd {
		return exec.Command("unshare", append([]string{"--map-root-user", "--mount", "sh", "-c", `mount --bind "$0" /etc/hosts && exec "$@"`, s.world.File(s.hosts()), binary}, args...)...)
	}
	return err
}

// certificate writes one of the proxy's listener, which ends in so long.
func (s *stage) certificate(left time.Duration) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "evenkeel"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter:    time.Now().Add(left),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	for name, block := range map[string]*pem.Block{".key": {Type: "PRIVATE KEY", Bytes: private}, ".crt": {Type: "CERTIFICATE", Bytes: cert}} {
		var text bytes.Buffer
		if err := pem.Encode(&text, block); err != nil {
			return err
		}
		if err := s.world.Write(s.name+name, text.String()); err != nil {
			return err
		}
	}
	return nil
}
