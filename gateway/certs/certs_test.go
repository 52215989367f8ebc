package certs

import (
	"crypto/tls"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/certs/certtest"
)

var tomorrow = time.Now().Add(24 * time.Hour)

// shake runs a handshake and tells what each side thinks of the other.
func shake(t *testing.T, server, client *tls.Config) (state tls.ConnectionState, err error) {
	t.Helper()
	ln, err := tls.Listen("tcp", "127.0.0.1:0", server)
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if c, err := ln.Accept(); err == nil {
			_, _ = c.Write([]byte("x")) // also shakes hands
			_, _ = io.Copy(io.Discard, c)
			_ = c.Close()
		}
	}()
	raw, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	c := tls.Client(raw, client)
	_, err = io.ReadFull(c, make([]byte, 1)) // in TLS 1.3 a refused client certificate shows only here
	state = c.ConnectionState()
	_ = raw.Close()
	_ = ln.Close()
	<-done
	return state, err
}

func TestNewHandshakesGetTheNewCertificate(t *testing.T) {
	a := certtest.New(t)
	certFile, keyFile := a.Issue(t, "proxy", tomorrow)
	p, err := Load(certFile, keyFile)
	require.NoError(t, err)
	server, client := p.Server(), &tls.Config{RootCAs: a.Pool(), ServerName: "proxy", NextProtos: []string{"h2", "http/1.1"}}
	first, err := shake(t, server, client)
	require.NoError(t, err)
	require.Equal(t, "http/1.1", first.NegotiatedProtocol)

	changed, err := p.Reload()
	require.NoError(t, err)
	require.False(t, changed, "the same files")

	a.Issue(t, "proxy", tomorrow)
	changed, err = p.Reload()
	require.NoError(t, err)
	require.True(t, changed)
	second, err := shake(t, server, client)
	require.NoError(t, err)
	require.NotEqual(t, first.PeerCertificates[0].SerialNumber, second.PeerCertificates[0].SerialNumber)

	old := client.Clone()
	old.MaxVersion = tls.VersionTLS11
	_, err = shake(t, server, old)
	require.Error(t, err, "TLS 1.1")
}

func TestFilesThatCannotBeUsedLeaveTheOldCertificate(t *testing.T) {
	a := certtest.New(t)
	certFile, keyFile := a.Issue(t, "proxy", tomorrow)
	p, err := Load(certFile, keyFile)
	require.NoError(t, err)
	cert, err := os.ReadFile(certFile)
	require.NoError(t, err)

	without := func(files ...string) {
		for _, file := range files {
			require.NoError(t, os.Remove(file))
		}
	}
	for _, tt := range []struct {
		name  string
		spoil func()
		says  []string
	}{
		{"the certificate of another key", func() {
			a.Issue(t, "proxy", tomorrow)
			require.NoError(t, os.WriteFile(certFile, cert, 0o600))
		}, []string{certFile, keyFile}},
		{"no PEM", func() { require.NoError(t, os.WriteFile(certFile, []byte("soon"), 0o600)) }, []string{certFile}},
		{"an empty file", func() { require.NoError(t, os.WriteFile(certFile, nil, 0o600)) }, []string{certFile}},
		{"past its last day", func() { a.Issue(t, "proxy", time.Now().Add(-time.Hour)) }, []string{certFile}},
		{"a missing certificate", func() { without(certFile) }, []string{"certificate: open " + certFile}},
		{"a missing key", func() { without(keyFile) }, []string{"key of certificate " + certFile + ": open " + keyFile}},
		{"both are missing", func() { without(certFile, keyFile) }, []string{"certificate: open " + certFile, "its key: open " + keyFile}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a.Issue(t, "proxy", tomorrow)
			_, err := p.Reload()
			require.NoError(t, err)
			leaf := p.Leaf()
			tt.spoil()
			changed, err := p.Reload()
			require.Error(t, err)
			require.False(t, changed)
			for _, want := range tt.says {
				require.ErrorContains(t, err, want)
			}
			require.Same(t, leaf, p.Leaf(), "what was read before")
			_, again := p.Reload()
			require.NoError(t, again, "told once")
			_, atStart := Load(certFile, keyFile)
			require.EqualError(t, atStart, err.Error(), "at the start it is an error, too")
			_, toEngines := Client("x", "", certFile, keyFile)
			require.EqualError(t, toEngines, err.Error(), "as it is for calls to engines")
		})
	}
}

func TestEnginesAreTrustedAsTheProfileSays(t *testing.T) {
	ours, theirs := certtest.New(t), certtest.New(t)
	server := ours.Server(t, "engine")
	asking := server.Clone()
	asking.ClientAuth, asking.ClientCAs = tls.RequireAndVerifyClientCert, ours.Pool()
	cert, key := ours.Issue(t, "proxy", tomorrow)
	foreignCert, foreignKey := theirs.Issue(t, "proxy", tomorrow)
	for _, tt := range []struct {
		name              string
		server            *tls.Config
		serverName        string
		caFile, cert, key string
		wantErr           string
	}{
		{"its authority", server, "engine", ours.File, "", "", ""},
		{"its address", server, "127.0.0.1", ours.File, "", "", ""},
		{"the system's authorities do not know it", server, "engine", "", "", "", "unknown authority"},
		{"another authority", server, "engine", theirs.File, "", "", "unknown authority"},
		{"another name", server, "elsewhere", ours.File, "", "", "elsewhere"},
		{"an engine that asks who calls", asking, "engine", ours.File, cert, key, ""},
		{"an engine that asks, and no answer", asking, "engine", ours.File, "", "", "certificate required"},
		{"an engine that asks, and a stranger's", asking, "engine", ours.File, foreignCert, foreignKey, "remote error"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			client, err := Client(tt.serverName, tt.caFile, tt.cert, tt.key)
			require.NoError(t, err)
			_, err = shake(t, tt.server, client)
			if tt.wantErr == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, tt.wantErr)
			}
		})
	}
}

func TestOurCertificateForEnginesIsReadAgain(t *testing.T) {
	a := certtest.New(t)
	server := a.Server(t, "engine")
	serials := make(chan string, 1)
	server.ClientAuth, server.ClientCAs = tls.RequireAndVerifyClientCert, a.Pool()
	server.VerifyConnection = func(s tls.ConnectionState) error {
		serials <- s.PeerCertificates[0].SerialNumber.String()
		return nil
	}
	certFile, keyFile := a.Issue(t, "proxy", tomorrow)
	client, err := Client("engine", a.File, certFile, keyFile)
	require.NoError(t, err)
	serial := func() string {
		_, err := shake(t, server, client)
		require.NoError(t, err)
		return <-serials
	}
	first := serial()
	require.Equal(t, first, serial())
	a.Issue(t, "proxy", tomorrow)
	second := serial()
	require.NotEqual(t, first, second)
	require.NoError(t, os.Remove(keyFile))
	require.Equal(t, second, serial(), "in the middle of a replacement")
}

func TestFilesThatSayNothingAreErrors(t *testing.T) {
	a := certtest.New(t)
	certFile, keyFile := a.Issue(t, "proxy", tomorrow)
	_, err := Client("x", keyFile+".none", "", "")
	require.ErrorContains(t, err, "ca_file")
	_, err = Client("x", keyFile, "", "")
	require.ErrorContains(t, err, "no certificate in PEM")
	_, err = Client("x", "", certFile, certFile)
	require.ErrorContains(t, err, certFile)
	_, err = Client("x", "", certFile, keyFile+".none")
	require.ErrorContains(t, err, "key of certificate "+certFile)
	old, oldKey := a.Issue(t, "old", time.Now().Add(-time.Minute))
	_, err = Client("x", "", old, oldKey)
	require.ErrorIs(t, err, ErrExpired)
}
