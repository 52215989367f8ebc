package geo

import (
	"math"
	"net/http"
	neturl "net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/geo/policy"
	"evenkeel/prefill"
)

// What nobody here decodes goes to the proxy of this region that does, however
// full it is; what somebody does is a policy's business.
func TestWhatNobodyHereDecodesGoesToItsOwner(t *testing.T) {
	f := newFar(t)
	says := func(decodes ...string) {
		f.says(func(a *answer) {
			a.ID, a.Decodes, a.Models = "us-2", decodes, map[string]policy.Offer{"m": {Replicas: 1, Queue: 50}}
		})
	}
	says("m")
	var seqs atomic.Int64
	ps, _ := node(t, func(c *Config) {
		c.Siblings, c.Policy = true, "local-only"
		c.Running = func(string) (float64, int) { return 0, int(seqs.Load()) }
	}, entry(t, "us-2", f.URL))
	eventually(t, func() bool { return ps.Offered("m") })
	round := uint64(1)
	where := func(a Ask) (prefill.Where, bool) {
		round++
		a.ID, a.Model = "r", "m"
		q := ps.NewQuery(a)
		w := q.Where(here(round))
		f := q.Forward()
		if f != nil {
			f.DropUnsent()
		}
		return w, f != nil
	}
	goes := func(a Ask) bool { w, sent := where(a); return w == prefill.ToThere && sent }
	require.True(t, goes(Ask{}), "its queue is that of all")
	require.True(t, goes(Ask{RegionOnly: true}), "that is in the region")
	require.True(t, ps.Accepts("us-2", math.MaxInt), "and so is ours")
	w, sent := where(Ask{LocalOnly: true})
	require.True(t, w != prefill.ToThere && w != prefill.ToHere && !sent, "it waits")
	w, sent = where(Ask{LocalOnly: true, InboundHop: &Hop{N: 1, Max: 1, Via: []string{"us-2"}}})
	require.True(t, w == prefill.ToThere && !sent, "who sent it has to ask again")

	live, stay := ps.Siblings()
	require.Equal(t, []string{"us-2"}, live)
	require.Equal(t, live, stay)
	seqs.Store(8)
	require.False(t, goes(Ask{}), "it is decoded here now")
	seqs.Store(0)

	says()
	eventually(t, func() bool { return !ps.Offered("m") })
	require.False(t, goes(Ask{}), "nobody decodes it: it waits")
	drains := func(decodes ...string) {
		f.says(func(a *answer) {
			a.ID, a.Draining, a.Decodes, a.Models = "us-2", true, decodes, map[string]policy.Offer{"m": {Replicas: 1}}
		})
	}
	drains("m")
	eventually(t, func() bool { live, stay = ps.Siblings(); return len(live) == 1 && len(stay) == 0 })
	require.True(t, goes(Ask{}), "it drains, and nobody has taken its ranks yet")
	seqs.Store(8)
	require.False(t, goes(Ask{}), "they are ours now")
	seqs.Store(0)
	drains()
	probed := f.asked.Load()
	eventually(t, func() bool { return f.asked.Load() > probed+2 })
	require.False(t, goes(Ask{}), "it has let them go: it waits")
}

// A proxy that is no owner says so, and is not asked again before its next probe;
// what it says of the request itself is its last word.
func TestANonOwnerIsNotAskedAgain(t *testing.T) {
	status, reject := atomic.Int64{}, atomic.Value{}
	reject.Store(RejectOwner)
	status.Store(http.StatusServiceUnavailable)
	url, _ := served(t, 1, func(w http.ResponseWriter, _ *http.Request) {
		if r, _ := reject.Load().(string); r != "" {
			w.Header().Set(RejectHeader, r)
		}
		w.WriteHeader(int(status.Load()))
	})
	ps, _ := node(t, nil, entry(t, "eu-1", url))
	ps.cfg.Siblings, ps.cfg.Whole = true, time.Minute
	send := func() *Failure {
		f := forwarded(t, ps)
		f.peer.sibling = true
		f.peers.mu.Lock()
		f.peer.decodedModels = []string{"m"}
		f.peers.mu.Unlock()
		_, x := f.Send(stream)
		f.peers.mu.Lock()
		defer f.peers.mu.Unlock()
		require.Equal(t, x.Relay != nil, len(f.peer.decodedModels) == 1)
		f.peer.sibling = false
		return x
	}
	x := send()
	require.True(t, x.Sibling)
	require.False(t, x.MayHaveRun, "it was refused: %v", x.Err)
	require.Equal(t, RejectOwner, x.Reason)
	reject.Store("")
	require.Equal(t, http.StatusServiceUnavailable, send().Relay.Status, "of an owner that tried all there is")
}

// Otherwise one client could keep all other clients from the owner of a group.
func TestAClientsOwnLimitsTakeNoGroupFromItsOwner(t *testing.T) {
	url, _ := served(t, 100, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`"` + strings.Repeat("x", 2000) + `"`))
	})
	ps, _ := node(t, func(c *Config) { c.WholeBytes = 1000 }, entry(t, "eu-1", url))
	for cause, deadline := range map[string]time.Time{RejectDeadline: time.Now().Add(-time.Second), causeLarge: {}} {
		f := forwarded(t, ps)
		ps.mu.Lock()
		f.peer.decodedModels = []string{"m"}
		ps.mu.Unlock()
		_, fail := f.Send(&Request{Method: http.MethodPost, Target: "/v1/completions", Deadline: deadline})
		require.Equal(t, cause, fail.Reason)
		ps.mu.Lock()
		decoded := f.peer.decodedModels
		ps.mu.Unlock()
		require.Equal(t, []string{"m"}, decoded, cause)
	}
}

// A request never goes back to where it came from, though that has what it needs.
func TestAnOwnerThatARequestCameFromIsNotAsked(t *testing.T) {
	b, c := newFar(t), newFar(t)
	for id, f := range map[string]*far{"us-2": b, "us-3": c} {
		f.says(func(a *answer) {
			a.ID, a.Boot, a.Decodes, a.Models = id, id, []string{"m"}, map[string]policy.Offer{"m": {Replicas: 1}}
		})
	}
	ps, _ := node(t, func(c *Config) {
		c.Siblings, c.MaxHops = true, 2
		c.Running = func(string) (float64, int) { return 0, 0 }
	}, entry(t, "us-2", b.URL), entry(t, "us-3", c.URL))
	eventually(t, func() bool { live, _ := ps.Siblings(); return len(live) == 2 })
	for round, from := range []string{"us-2", "us-3"} {
		q := ps.NewQuery(Ask{ID: "r", Model: "m", InboundHop: &Hop{N: 1, Max: 2, Via: []string{from}}})
		require.Equal(t, prefill.ToThere, q.Where(here(uint64(round+1))))
		require.NotNil(t, q.Forward(), "it goes to the other one, not back to %s", from)
		require.NotEqual(t, from, q.Forward().PeerID())
		q.Forward().DropUnsent()
	}
}

func TestWhatStaysInTheRegionDoesNotLeaveItWithIt(t *testing.T) {
	url, _ := served(t, 100, hang)
	ps, _ := node(t, func(c *Config) { c.Policy = "skylb" }, entry(t, "eu-1", url))
	forwarded(t, ps).DropUnsent()
	for home, want := range map[bool]bool{false: true, true: false} {
		q := ps.NewQuery(Ask{ID: "r", Model: "m", PreferForward: true, RegionOnly: home})
		_ = q.Where(nobody(20_000))
		require.Equal(t, want, q.Forward() != nil, "it wants to stay: %v", home)
	}
}

// What may have run at a peer counts among the runs of a request.
func TestAFailureSaysWhetherTheRequestMayHaveRun(t *testing.T) {
	for name, row := range map[string]struct {
		serve http.HandlerFunc
		end   func(f *Forward)
		ran   bool
	}{
		"the connection broke":   {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, nil, true},
		"the peer is down":       {hang, func(f *Forward) { f.abandon(causeDown) }, true},
		"no event came in time":  {hang, nil, true},
		"it was refused":         {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }, nil, false},
		"nobody could be called": {nil, nil, false},
	} {
		asked := make(chan struct{}, 1)
		url, _ := served(t, 8, func(w http.ResponseWriter, r *http.Request) {
			asked <- struct{}{}
			row.serve(w, r)
		})
		ps, _ := node(t, func(c *Config) { c.FirstByte = 200 * time.Millisecond }, entry(t, "eu-1", url))
		f := forwarded(t, ps)
		if row.serve == nil {
			gone := *f.peer.conf.Target
			gone.URL = &neturl.URL{Scheme: "http", Host: "127.0.0.1:1"}
			f.peer = ps.newPeer(f.peer.conf, "gone", &gone) // one that nobody probes
		}
		if row.end != nil {
			go func() { <-asked; row.end(f) }()
		}
		_, x := f.Send(stream)
		require.Equal(t, row.ran, x.MayHaveRun, "%s: %v", name, x.Err)
	}
}
