package geo

import (
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/prefill"
)

// here is a region with one prefiller, as good as any.
func here(round uint64) *prefill.Here {
	now := time.Now()
	h := &prefill.Here{Model: "m", Now: now, Since: now, Round: round, Tokens: 100}
	h.Prefillers = []prefill.Prefiller{{Live: true, Open: true}}
	h.Prefillers[0].ID = "a/0"
	return h
}

func TestWhatWaitsInARegionThatLeavesGoesElsewhere(t *testing.T) {
	url, _ := served(t, 100, hang)
	draining := false
	ps, _ := node(t, func(c *Config) {
		c.Policy, c.Draining = "skylb", func() bool { return draining }
	}, entry(t, "eu-1", url))
	forwarded(t, ps).DropUnsent() // it is available
	round := uint64(10_000)
	where := func(a Ask) prefill.Where {
		round++
		a.ID, a.Model = "r", "m"
		q := ps.NewQuery(a)
		w := q.Where(here(round))
		if f := q.Forward(); f != nil {
			f.DropUnsent()
		}
		return w
	}
	require.Equal(t, prefill.ToHere, where(Ask{}), "local first")
	require.Equal(t, prefill.ToThere, where(Ask{PreferForward: true}), "attempts here have failed")
	draining = true
	require.Equal(t, prefill.ToThere, where(Ask{}))
	require.Equal(t, prefill.ToHere, where(Ask{LocalOnly: true}), "one that may not is served")
	require.Equal(t, prefill.ToHere, where(Ask{InboundHop: &Hop{Via: []string{"eu-1"}}}), "nor goes one back to where it came from")
}

func TestARequestThatMayNotGoToTheCentralProxyLeavesWithItsRegion(t *testing.T) {
	central, other := newFar(t), newFar(t)
	other.says(func(a *answer) { a.ID, a.Boot = "as-1", "as" })
	ps, _ := node(t, func(c *Config) {
		c.Mode, c.Central, c.Residency = Central, "eu-1", map[string][]string{"acme": {"us", "as"}}
		c.Draining = func() bool { return true }
	}, entry(t, "eu-1", central.URL), entry(t, "as-1", other.URL))
	eventually(t, func() bool {
		s := ps.Status()
		return s.Peers[0].Available["m"] == "available" && s.Peers[1].Available["m"] == "available"
	})
	for round, row := range []struct{ tenant, peer string }{{"globex", "eu-1"}, {"acme", "as-1"}} {
		q := ps.NewQuery(Ask{ID: "r", Model: "m", Tenant: row.tenant})
		require.Equal(t, prefill.ToThere, q.Where(here(uint64(10_000+round))), row.tenant)
		require.Equal(t, row.peer, q.Forward().PeerID())
		q.Forward().DropUnsent()
	}
}

// All requests of one round see the state at its begin, so that each must count those before it.
func TestARegionThatLeavesSendsAPeerNoMoreThanItTakes(t *testing.T) {
	url, _ := served(t, 3, hang)
	ps, _ := node(t, func(c *Config) { c.Draining = func() bool { return true } }, entry(t, "eu-1", url))
	forwarded(t, ps).DropUnsent()
	sent := 0
	for range 10 {
		q := ps.NewQuery(Ask{ID: "r", Model: "m"})
		if q.Where(here(10_000)) == prefill.ToThere {
			sent++
			defer q.Forward().DropUnsent()
		}
	}
	require.Equal(t, 3, sent)
}

func TestARequestWithSeveralLegsTakesAsManyPlacesAtAPeer(t *testing.T) {
	for name, drains := range map[string]bool{"by the policy": false, "because the region drains": true} {
		url, _ := served(t, 4, hang)
		ps, _ := node(t, func(c *Config) { c.Draining = func() bool { return drains } }, entry(t, "eu-1", url))
		forwarded(t, ps).DropUnsent()
		sent := 0
		for range 10 {
			q := ps.NewQuery(Ask{ID: "r", Model: "m"})
			q.SetLegs(2)
			if q.Where(nobody(10_000)) == prefill.ToThere {
				sent += 2
				defer q.Forward().DropUnsent()
			}
		}
		require.Equal(t, 4, sent, name)
	}
}

func TestAnAnswerThatIsTooLargeIsServedHereAndBlamesNobody(t *testing.T) {
	url, _ := served(t, 100, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`"` + strings.Repeat("x", 2000) + `"`))
	})
	ps, _ := node(t, func(c *Config) { c.WholeBytes = 1000 }, entry(t, "eu-1", url))
	for range 6 {
		whole, fail := forwarded(t, ps).Send(&Request{Method: http.MethodPost, Target: "/v1/completions"})
		require.Nil(t, whole)
		require.Equal(t, causeLarge, fail.Reason)
	}
	require.Equal(t, "closed", first(ps).Circuit)
}

func TestTwiceTauMayWaitOfWhatOthersSend(t *testing.T) {
	ps, _ := node(t, func(c *Config) { c.Policy = "skylb:tau=3" })
	require.True(t, ps.Accepts("eu-1", 6))
	require.False(t, ps.Accepts("eu-1", 7))
	require.NoError(t, ps.Tune(Tuning{Policy: new("skylb:tau=4")}))
	require.True(t, ps.Accepts("eu-1", 8), "the policy in force counts")
	require.False(t, ps.Accepts("eu-1", 9))
	ps, _ = node(t, func(c *Config) { c.Mode, c.Central = Central, c.Self.ID })
	require.True(t, ps.Accepts("eu-1", math.MaxInt), "a centre holds the queue of all")
}

func TestASessionStandsOnTheRingElseItsAddress(t *testing.T) {
	require.Equal(t, RingKeyOf(7, "10.0.0.1"), RingKeyOf(7, "10.0.0.2"))
	require.NotEqual(t, RingKeyOf(7, "10.0.0.1"), RingKeyOf(8, "10.0.0.1"))
	require.NotEqual(t, RingKeyOf(0, "10.0.0.1"), RingKeyOf(0, "10.0.0.2"))
}
