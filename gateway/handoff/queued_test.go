package handoff

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// gauged are the signs of a rank whose gauges a monitor has read. The monitor has ended.
func gauged(t *testing.T, rank int) *engine.Liveness {
	e := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/metrics":
			_, _ = io.WriteString(w, "vllm:num_requests_running{engine=\"0\"} 1\nvllm:num_requests_running{engine=\"1\"} 1\n")
		case "/v1/models":
			_, _ = io.WriteString(w, `{"data":[{"id":"ref"}]}`)
		}
	}))
	t.Cleanup(e.Close)
	at, err := url.Parse(e.URL)
	require.NoError(t, err)
	target := &engine.Target{ID: "d0", URL: at, Rank: rank}
	client := engine.NewClient(engine.Options{})
	m := engine.NewMonitor(engine.MonitorConfig{Client: client, Registerer: prometheus.NewRegistry(), Log: zap.NewNop()})
	m.Set([]engine.Instance{{ID: "d0", Role: "decode", Target: target, Slots: 4, Canaries: []*engine.Target{target}}})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); m.Run(ctx) }()
	liveness := m.Traffic("d0").Liveness(rank)
	require.Eventually(t, liveness.HasGauges, time.Minute, time.Millisecond)
	stop()
	<-done
	client.Close()
	return liveness
}

// A hand-off is waited for as long as its KV is certainly kept. Signs of life of a rank lengthen this only if the request is
// on that rank, and a wait for an answer in one piece ends by them only if something tells of them.
func TestWhatEndsTheWaitForTheFirstEvent(t *testing.T) {
	const hold, renewals, other = "its hold", "the end of its renewals", "something else"
	renews := mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()
	keeps := mooncake.Profile{Connector: mooncake.AscendMooncakeV1}.WithDefaults()
	for _, row := range []struct {
		name     string
		profile  *mooncake.Profile
		endpoint mooncake.Endpoint
		rank     int
		gauged   bool
		whole    bool
		ends     string
	}{
		{"a stream", &renews, mooncake.Chat, 1, false, false, renewals},
		{"a stream of KV that nothing renews", &keeps, mooncake.Chat, 1, true, false, hold},
		{"a streamed response, which may be on another rank", &renews, mooncake.Responses, 1, true, false, hold},
		{"a streamed response of an engine of one rank", &renews, mooncake.Responses, -1, false, false, renewals},
		{"a whole answer while gauges tell", &renews, mooncake.Chat, 1, true, true, renewals},
		{"a whole answer while nothing tells", &renews, mooncake.Chat, 1, false, true, other},
		{"a whole answer of KV that nothing renews", &keeps, mooncake.Chat, 1, true, true, other},
		{"a whole response, which may be on another rank", &renews, mooncake.Responses, 1, true, true, other},
		{"a whole response of an engine of one rank", &renews, mooncake.Responses, -1, true, true, renewals},
	} {
		t.Run(row.name, func(t *testing.T) {
			liveness := engine.NewLiveness()
			if row.gauged {
				liveness = gauged(t, row.rank)
			}
			r := &roster.Rank{Signs: liveness, Target: &engine.Target{Rank: row.rank}, Profile: row.profile}
			now := time.Now()
			kept := now.Add(row.profile.PulledWithin())
			h := &Handoff{Handoff: mooncake.NewHandoff(nil, kept, kept), Endpoint: row.endpoint,
				Lease: &prefill.Lease{Candidate: prefill.Candidate{Profile: row.profile}}}
			p := h.AwaitFirstEvent(r, row.endpoint, now, row.whole)
			defer p.End()
			later := kept.Add(time.Minute)
			for at := now; !at.After(later); at = at.Add(time.Second) {
				liveness.RecordSign(at)
			}
			ends := other
			if p.KeptByRenewal(later) { // kept by itself until before that
				if ends = renewals; p.CheckExpired(later) {
					ends = hold
				}
			}
			require.Equal(t, row.ends, ends)
		})
	}
	t.Run("without a hand-off", func(t *testing.T) {
		now, liveness := time.Now(), engine.NewLiveness()
		r := &roster.Rank{Signs: liveness, Target: &engine.Target{Rank: 1}, Profile: &renews}
		p := (*Handoff)(nil).AwaitFirstEvent(r, mooncake.Chat, now, false)
		defer p.End()
		require.False(t, p.CheckExpired(now.Add(time.Hour)))
	})
}

// The prefill engine keeps the KV by its own timeout, and not by that of the decode engine's profile. If it keeps it for a shorter time, an
// answer after a silence that a decode engine of its own profile could not have may be made of another prompt's KV.
func TestAHoldIsThatOfThePrefillEngine(t *testing.T) {
	holding := func(timeout time.Duration) *mooncake.Profile {
		return new(mooncake.Profile{Connector: mooncake.NIXLPull, KVHoldTimeout: timeout}.WithDefaults())
	}
	none := holding(30 * time.Second)
	none.QueueRenews = new(false)
	for _, row := range []struct {
		name            string
		prefill, decode *mooncake.Profile
		silence         time.Duration
		believed        bool
	}{
		{"longer than that of the decode engine", holding(120 * time.Second), holding(30 * time.Second), 20 * time.Second, true},
		{"shorter", holding(30 * time.Second), holding(120 * time.Second), 20 * time.Second, false},
		{"over between two heartbeats", holding(30 * time.Second), holding(120 * time.Second), time.Second, false},
		{"that nothing renews at the prefill engine", none, holding(30 * time.Second), time.Second, false},
		{"that the decode engine does not renew", holding(30 * time.Second), none, time.Second, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := &roster.Rank{Signs: engine.NewLiveness(), Target: &engine.Target{Rank: 1}, Profile: row.decode}
			now := time.Now()
			kept := now.Add(row.prefill.PulledWithin())
			h := &Handoff{Handoff: mooncake.NewHandoff(nil, kept, kept), Endpoint: mooncake.Chat,
				Lease: &prefill.Lease{Candidate: prefill.Candidate{Profile: row.prefill}}}
			p := h.AwaitFirstEvent(r, mooncake.Chat, now, false)
			defer p.End()
			end := now.Add(5 * time.Minute)
			for at := now; !at.After(end); at = at.Add(time.Second) {
				r.Signs.RecordSign(at)
			}
			require.Equal(t, row.believed, p.RecordFirstEvent(end.Add(row.silence)))
		})
	}
}

// Heartbeats may be so far apart that they prove no renewal of a short hold. Its end is then fixed, and the time of an answer in one piece
// does not show whether its KV was read before.
func TestAWholeAnswerOfAHoldThatIsRenewedTooSeldomIsBelieved(t *testing.T) {
	holding := func(timeout time.Duration) *mooncake.Profile {
		return new(mooncake.Profile{Connector: mooncake.NIXLPull, KVHoldTimeout: timeout}.WithDefaults())
	}
	short := holding(30 * time.Second)
	r := &roster.Rank{Signs: gauged(t, 1), Target: &engine.Target{Rank: 1}, Profile: holding(120 * time.Second)}
	now := time.Now()
	kept := now.Add(short.PulledWithin())
	h := &Handoff{Handoff: mooncake.NewHandoff(nil, kept, kept), Endpoint: mooncake.Chat,
		Lease: &prefill.Lease{Candidate: prefill.Candidate{Profile: short}}}
	p := h.AwaitFirstEvent(r, mooncake.Chat, now, true)
	defer p.End()
	require.True(t, p.RecordFirstEvent(kept.Add(time.Minute)))
}

// Ranks behind one address have prefix caches of their own. A response may run on any of them, also on one that has read wrong KV for a
// chat, or does so while the response waits.
func TestAResponseDoesNotFindWhatAnotherRankHasReadTooLate(t *testing.T) {
	now, traffic, profile := time.Now(), &engine.Traffic{}, mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()
	send := func(rank int, ep mooncake.Endpoint) *engine.PendingPull {
		r := &roster.Rank{Signs: traffic.Liveness(rank), Traffic: traffic, Target: &engine.Target{Rank: rank}, Profile: &profile}
		var noHandoff *Handoff
		p := noHandoff.AwaitFirstEvent(r, ep, now, false)
		t.Cleanup(p.End)
		return p
	}
	for range 2 {
		lost, waiting := send(1, mooncake.Chat), send(0, mooncake.Responses)
		otherChat := send(0, mooncake.Chat)
		lost.MarkLost()
		later := send(0, mooncake.Responses)
		require.NotEmpty(t, later.Salt())
		require.NotContains(t, []string{lost.Salt(), waiting.Salt(), send(1, mooncake.Chat).Salt()}, later.Salt())
		require.False(t, waiting.RecordFirstEvent(now.Add(time.Second)), "it has the salt of the wrong KV")
		require.True(t, later.RecordFirstEvent(now.Add(time.Second)))
		require.True(t, otherChat.RecordFirstEvent(now.Add(time.Second)), "it runs on the rank that it names")
	}
}
