package request

import (
	"context"
	"crypto/tls"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/life"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/owner"
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

// owned is an area of ours with epoch 2, and its claim, which does not run any more.
func owned(t *testing.T) (*owner.Area, *lease.Claim) {
	a := owner.NewArea("main")
	claim := a.Claim(lease.Config{Self: "us-1_x", Home: true, Times: lease.DefaultTimes}, free{}, lease.Hooks{}, zap.NewNop())
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { claim.Run(ctx) })
	require.Eventually(t, a.Admits, time.Minute, time.Millisecond)
	stop()
	running.Wait()
	return a, claim
}

func at(t *testing.T, s *httptest.Server) *url.URL {
	u, err := url.Parse(s.URL)
	require.NoError(t, err)
	return u
}

// opened is what comes of a decode request without a hand-off to a rank.
func opened(t *testing.T, to *fleet.Rank) *failure.Fault {
	to.Target.ID, to.Target.Rank = "d", -1
	set := fleet.NewSettings(config.Default())
	srv := &Server{Env: Env{Log: zap.NewNop(), Client: engine.NewClient(engine.Options{}), Monitor: &monitor{}, Fleet: &engines{frees: true}, Settings: func() *fleet.Settings { return set }}}
	defer srv.Client.Close()
	body, err := mooncake.ScanBody([]byte(`{"model":"m","messages":[]}`), 10)
	require.NoError(t, err)
	j := &job{srv: srv, req: &openai.Request{Endpoint: mooncake.Chat}, body: body, client: reader{edge.NewDeparture(zap.NewNop())}, in: &Incoming{}, told: new(journal.Journal).Request(journal.Facts{})}
	return j.open(nil, &stream{job: j, source: source{rank: to, slot: new(dispatcher.Slot), call: srv.Client.NewCall(to.Target), began: time.Now()}})
}

// A request whose group goes while its connection is made is not written.
func TestARequestIsNotWrittenOnAConnectionThatCameTooLate(t *testing.T) {
	var asked atomic.Int32
	engineServer := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer engineServer.Close()
	a, claim := owned(t)
	handshake := engineServer.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	handshake.VerifyConnection = func(tls.ConnectionState) error {
		return claim.GiveBack(2, func() {})
	}
	fault := opened(t, &fleet.Rank{Signs: engine.NewSigns(), Target: &engine.Target{URL: at(t, engineServer), TLS: handshake}, Profile: &mooncake.Profile{}, Area: a})
	require.ErrorIs(t, fault.Err, owner.ErrNotOwner)
	require.Equal(t, life.Anew, fault.Verdict().Next, "it goes to who has the group now")
	require.Equal(t, life.Keep, fault.Verdict().KV, "with its hand-off, if the group is ours again")
	require.Zero(t, asked.Load())
	require.Zero(t, a.Sending())
}

// Whatever stands before an engine and refuses an old epoch names the one that it has
// seen. The claim is told of it, so that it gets the group back with a higher one.
func TestTheEpochOfARefusalReachesTheClaim(t *testing.T) {
	var sent atomic.Value
	shim := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sent.Store(r.Header.Get(owner.EpochHeader))
		w.Header().Set(owner.EpochHeader, "17")
		w.WriteHeader(http.StatusConflict)
	}))
	defer shim.Close()
	a, claim := owned(t)
	frees := true
	fault := opened(t, &fleet.Rank{Signs: engine.NewSigns(), Target: &engine.Target{URL: at(t, shim)}, Profile: &mooncake.Profile{RejectReleases: &frees}, Area: a})
	require.Equal(t, http.StatusConflict, fault.Status)
	require.Equal(t, "2", sent.Load())
	require.EqualValues(t, 17, claim.Seen())
	require.Equal(t, lease.Giving, claim.View().Phase, "for what is given back can be acquired with a higher one")
}
