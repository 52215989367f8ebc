package owner

import (
	"context"
	"crypto/tls"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/gateway/certs/certtest"
	"evenkeel/geo"
)

// An etcd may get certificates of a new authority while the proxy runs.
func TestAChangedAuthorityOfEtcdIsTrusted(t *testing.T) {
	before, after := certtest.New(t), certtest.New(t)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	trust := func(a *certtest.Authority) {
		text, err := os.ReadFile(a.File)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(ca, text, 0o600))
	}
	trust(before)
	var certificate atomic.Pointer[tls.Certificate]
	certificate.Store(&before.Server(t, "etcd").Certificates[0])
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return certificate.Load(), nil }})
	require.NoError(t, err)
	believed := make(chan bool)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { // an etcd that closes each connection after the handshake
		defer close(ended)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			err = c.(*tls.Conn).Handshake()
			_ = c.Close()
			select {
			case believed <- err == nil:
			case <-ctx.Done():
			}
		}
	}()
	defer func() {
		stop()
		_ = ln.Close()
		<-ended
	}()
	l := newLeases(geo.OwnEtcd, 15*time.Second, "", geo.Etcd{Endpoints: []string{"https://" + ln.Addr().String()}, TLS: geo.TLS{CA: ca}},
		"us-1", nil, zap.NewNop())
	defer l.close()
	engine, err := l.open("", "", "us")
	require.NoError(t, err)
	go func() {
		for ctx.Err() == nil {
			_, _ = engine.Look(ctx)
		}
	}()
	until := func(want bool) { // a handshake may have begun before a change
		t.Helper()
		late := time.After(time.Minute)
		for {
			select {
			case got := <-believed:
				if got == want {
					return
				}
			case <-late:
				require.Fail(t, "no handshake ended so", "wanted success: %v", want)
			}
		}
	}
	until(true)
	certificate.Store(&after.Server(t, "etcd").Certificates[0])
	until(false)
	trust(after)
	until(true)
}

func TestTheHostsOfEndpoints(t *testing.T) {
	require.Equal(t, []string{"etcd-0", "10.0.0.1", "::1", "etcd-1", "etcd-2"},
		hostsOf([]string{"https://etcd-0:2379", "10.0.0.1:2379", "https://[::1]:2379", "etcd-1", "https://etcd-2"}))
}

// The authority must be there at the start.
func TestAnAuthorityOfEtcdThatIsNotThere(t *testing.T) {
	l := newLeases(geo.OwnEtcd, 15*time.Second, "", geo.Etcd{Endpoints: []string{net.JoinHostPort("127.0.0.1", "1")},
		TLS: geo.TLS{CA: filepath.Join(t.TempDir(), "ca.pem")}}, "us-1", nil, zap.NewNop())
	defer l.close()
	_, err := l.open("", "", "us")
	require.ErrorIs(t, err, os.ErrNotExist)
}
