package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/openai"
	"evenkeel/lease"
	"evenkeel/mooncake"
)

// free is a lease that whoever asks for it gets.
type free struct{}

func (free) Look(context.Context) (lease.Record, error) {
	return lease.Record{Epoch: 1, Stamp: "a"}, nil
}

func (free) Acquire(context.Context, int64) (lease.Record, error) {
	return lease.Record{Holder: "us-1_x", Epoch: 2, Stamp: "b"}, nil
}
func (free) Renew(context.Context, int64) error   { return nil }
func (free) Release(context.Context, int64) error { return nil }

// Every admission is looked at again against the clock before it is written, for
// nobody may have been awake to tell that the time is over (geo R33).
func TestARequestIsNotWrittenOnceItsOwnersTimeIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &decodeGroup{name: "main"}
		a.view.Store(&lease.View{})
		a.claim = lease.NewClaim(lease.Config{Self: "us-1_x", Home: true, Times: lease.DefaultTimes}, free{}, lease.Hooks{
			OnChange: func(v lease.View) { a.view.Store(&v) },
		}, zap.NewNop())
		_, ok := a.enter()
		require.False(t, ok, "it is not ours yet")

		ctx, freeze := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { a.claim.Run(ctx) })
		synctest.Wait()
		freeze()
		running.Wait()
		written, ok := a.enter()
		require.True(t, ok)
		require.NoError(t, a.ours())
		time.Sleep(10 * time.Second)
		require.True(t, a.view.Load().Admits, "nobody could tell")
		require.ErrorIs(t, a.ours(), errNotOwner, "a connection took that long")
		_, ok = a.enter()
		require.False(t, ok)

		flushed := make(chan time.Duration)
		begin := time.Now()
		go func() {
			a.flush(t.Context())
			flushed <- time.Since(begin)
		}()
		time.Sleep(sendPatience / 2)
		written()
		written()
		require.Less(t, <-flushed, sendPatience, "the last that was admitted is written")
		require.Zero(t, a.sending.Load())
	})
	var alone *decodeGroup
	_, ok := alone.enter()
	require.True(t, ok, "a proxy without others owns all")
	require.False(t, errors.Is(alone.ours(), errNotOwner))
}

// A request whose group goes while its connection is made is not written.
func TestARequestIsNotWrittenOnAConnectionThatCameTooLate(t *testing.T) {
	var asked atomic.Int32
	engineServer := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer engineServer.Close()
	a := &decodeGroup{name: "main"}
	a.view.Store(&lease.View{})
	ours := make(chan struct{}, 1)
	a.claim = lease.NewClaim(lease.Config{Self: "us-1_x", Home: true, Times: lease.DefaultTimes}, free{}, lease.Hooks{
		OnChange: func(v lease.View) {
			if a.view.Store(&v); v.Admits {
				ours <- struct{}{}
			}
		},
	}, zap.NewNop())
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { a.claim.Run(ctx) })
	<-ours
	stop()
	running.Wait()

	handshake := engineServer.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	handshake.VerifyConnection = func(tls.ConnectionState) error {
		a.view.Store(&lease.View{Phase: lease.Giving})
		return nil
	}
	at, err := url.Parse(engineServer.URL)
	require.NoError(t, err)
	g := &Gateway{log: zap.NewNop(), client: engine.NewClient(engine.Options{})}
	defer g.client.Close()
	g.current.Store(newSettings(config.Default()))
	body, err := mooncake.ScanBody([]byte(`{"model":"m","messages":[]}`), 10)
	require.NoError(t, err)
	j := &job{gw: g, req: &openai.Request{Endpoint: mooncake.Chat}, body: body, client: &child{gone: make(chan struct{})}, rec: &record{}}
	to := &rank{Target: &engine.Target{ID: "d", URL: at, TLS: handshake, Rank: -1}, Profile: &mooncake.Profile{}, area: a}
	fault := j.open(nil, &stream{job: j, source: source{rank: to, call: g.client.NewCall(to.Target), began: time.Now()}})
	require.ErrorIs(t, fault.err, errNotOwner)
	require.True(t, fault.moved, "it goes to who has the group now")
	require.False(t, fault.spent, "with its hand-off, if the group is ours again")
	require.Zero(t, asked.Load())
	require.Zero(t, a.sending.Load())
}
