package dns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/net/dns/dnsmessage"

	"evenkeel/engine/discover"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// answers is a resolver that says what a test says.
type answers struct {
	mu    sync.Mutex
	addrs []netip.Addr
	srvs  []*net.SRV
	err   error
}

func (a *answers) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.addrs, a.err
}

func (a *answers) LookupSRV(context.Context, string, string, string) (string, []*net.SRV, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return "", a.srvs, a.err
}

func (a *answers) fail(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.err = err
}

func (a *answers) say(addrs ...string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.addrs = nil
	for _, s := range addrs {
		a.addrs = append(a.addrs, netip.MustParseAddr(s))
	}
}

type heard struct {
	urls []string
	err  error
}

// listen runs a source and returns what it told last.
func listen(t *testing.T, cfg Config) (told func() heard) {
	t.Helper()
	var mu sync.Mutex
	var last heard
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		New(cfg).Run(ctx, func(list []discover.Engine, err error) {
			mu.Lock()
			defer mu.Unlock()
			last = heard{err: err}
			for _, e := range list {
				last.urls = append(last.urls, e.URL)
			}
		})
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return func() heard {
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		return last
	}
}

func TestAnEngineIsGoneAfterSeveralAnswersWithoutIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &answers{}
		r.say("10.0.0.2", "10.0.0.1", "fd00::1")
		const interval = 10 * time.Second
		told := listen(t, Config{Host: "decode", Type: TypeA, Role: "decode", Port: 8200, Interval: interval, Misses: 3, Resolver: r})
		next := func() {
			time.Sleep(interval * 11 / 10)
		}
		all := []string{"http://10.0.0.1:8200", "http://10.0.0.2:8200", "http://[fd00::1]:8200"}
		require.Equal(t, all, told().urls)

		r.say("10.0.0.1")
		next()
		require.Equal(t, all, told().urls, "an answer may be a part of the truth")
		r.say("10.0.0.1", "fd00::1")
		next()
		require.Equal(t, all, told().urls, "one is back, the other missed twice")
		for range 3 {
			next()
		}
		require.Equal(t, []string{"http://10.0.0.1:8200", "http://[fd00::1]:8200"}, told().urls)
	})
}

func TestFailedAndEmptyLookupsEmptyNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &answers{}
		r.say("10.0.0.1")
		told := listen(t, Config{Host: "decode", Type: TypeA, Role: "decode", Port: 8200, Interval: time.Second, Misses: 1, Resolver: r})
		r.say()
		time.Sleep(10 * time.Second)
		require.ErrorIs(t, told().err, errNothing)
		r.fail(&net.DNSError{Err: "server misbehaving", Name: "decode"})
		time.Sleep(10 * time.Second)
		var failed *net.DNSError
		require.ErrorAs(t, told().err, &failed)
		require.Empty(t, told().urls, "an error comes without engines: the last list stays")
		r.fail(nil)
		r.say("10.0.0.1")
		time.Sleep(2 * time.Second)
		require.Equal(t, heard{urls: []string{"http://10.0.0.1:8200"}}, told())
	})
}

func TestServicesBringHostsAndPorts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &answers{
			srvs: []*net.SRV{{Target: "Pod-1.decode.", Port: 8201}, {Target: "pod-0.decode.", Port: 8200}, {Target: ".", Port: 1}},
			err:  errors.New("some records were left out"),
		}
		told := listen(t,
			Config{Host: "_http._tcp.decode", Type: TypeSRV, Role: "decode", Scheme: "https", Interval: time.Second, Misses: 1, Resolver: r})
		require.Equal(t, heard{urls: []string{"https://pod-0.decode:8200", "https://pod-1.decode:8201"}}, told())
	})
}

// TestOverTheWire asks a name server on loopback through Go's own resolver.
func TestOverTheWire(t *testing.T) {
	server := serve(t)
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", server)
	}}
	ask := func(cfg Config) (list []string, err error) {
		cfg.Resolver = resolver
		return New(cfg).lookup(t.Context())
	}
	list, err := ask(Config{Host: "engines.test.", Type: TypeA, Port: 80})
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"10.0.0.1:80", "10.0.0.2:80"}, list)
	list, err = ask(Config{Host: "_vllm._tcp.engines.test.", Type: TypeSRV})
	require.NoError(t, err)
	require.Equal(t, []string{"pod-0.engines.test:8200"}, list)
	_, err = ask(Config{Host: "nobody.test.", Type: TypeA, Port: 80})
	require.Error(t, err)
}

// serve answers two names and knows no others.
func serve(t *testing.T) (address string) {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			if reply, err := answer(buf[:n]); err == nil {
				_, _ = conn.WriteTo(reply, from)
			}
		}
	}()
	t.Cleanup(func() {
		_ = conn.Close()
		<-done
	})
	return conn.LocalAddr().String()
}

func answer(question []byte) ([]byte, error) {
	var m dnsmessage.Message
	if err := m.Unpack(question); err != nil || len(m.Questions) != 1 {
		return nil, fmt.Errorf("no question: %w", err)
	}
	q := m.Questions[0]
	m.Response, m.Additionals = true, nil
	add := func(body dnsmessage.ResourceBody) {
		m.Answers = append(m.Answers, dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 5}, Body: body})
	}
	switch {
	case q.Name.String() == "engines.test." && q.Type == dnsmessage.TypeA:
		add(&dnsmessage.AResource{A: [4]byte{10, 0, 0, 1}})
		add(&dnsmessage.AResource{A: [4]byte{10, 0, 0, 2}})
	case q.Name.String() == "_vllm._tcp.engines.test.":
		add(&dnsmessage.SRVResource{Port: 8200, Target: dnsmessage.MustNewName("pod-0.engines.test.")})
	case q.Name.String() != "engines.test.":
		m.RCode = dnsmessage.RCodeNameError
	}
	return m.Pack()
}
