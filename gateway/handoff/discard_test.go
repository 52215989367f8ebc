package handoff

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
)

// slots gives the slot of a rank that is not to be avoided, or an error, and notes how it came
// back.
type slots struct {
	err     error
	entries []*pool.Entry
	back    []board.Outcome
}

func (s *slots) Enqueue(e *pool.Entry) <-chan dispatcher.Result {
	s.entries = append(s.entries, e)
	r := dispatcher.Result{Err: s.err}
	if s.err == nil {
		r.Slot = &dispatcher.Slot{}
		for slices.Contains(e.Avoid, r.Slot.Worker) {
			r.Slot.Worker++
		}
	}
	got := make(chan dispatcher.Result, 1)
	got <- r
	return got
}

func (s *slots) Release(_ *dispatcher.Slot, o board.Outcome) { s.back = append(s.back, o) }

// ranks are all at one engine, and each has a rank's own Avoid.
type ranks struct {
	rank        *roster.Rank
	gone, frees bool
	hosts       int // how often a whole host was kept off
}

func (r *ranks) Rank(int32) *roster.Rank { return r.rank }
func (r *ranks) FailingWith(worker int32, host bool, list []int32) []int32 {
	r.hosts += map[bool]int{true: 1}[host]
	return append(list, worker)
}

func (r *ranks) RegionFor(string) string { return "" }
func (r *ranks) BoardFor(_ prefill.Candidate, _, region string) string {
	return roster.BoardIn("m", region)
}
func (r *ranks) KVInDoubt(roster.Generation) (inDoubt, gone bool) { return r.gone, r.gone }
func (r *ranks) RejectionFrees(*roster.Rank) bool                 { return r.frees }

// told is what a monitor was told of the decode engine.
type told []string

func (m *told) RecordOutcome(_ string, v engine.Verdict, _ error) {
	*m = append(*m, [...]string{engine.Served: "served", engine.Faulted: "faulted", engine.Silent: "silent", engine.Unclear: "unclear"}[v])
}
func (m *told) ReportFailure(string, error)                         { *m = append(*m, "reported") }
func (m *told) Expiries(string) engine.Expiries                     { return engine.Expiries{} }
func (m *told) ExpiriesNow(context.Context, string) engine.Expiries { return engine.Expiries{} }

type unnamed struct{}

func (unnamed) MarshalLogObject(zapcore.ObjectEncoder) error { return nil }

// leased is a lease of a prompt that is prefilled.
func leased(t *testing.T) (*prefill.Scheduler, *prefill.Lease) {
	c := config.Default().Prefill
	c.Scrape.Interval = 0
	c.Registerer, c.Log, c.Places = prometheus.NewRegistry(), zap.NewNop(), pool.NewSemaphore(10)
	c.Decode = func(string, string, time.Duration) (int, bool) { return 1, false }
	scheduler, err := prefill.New(c)
	require.NoError(t, err)
	scheduler.SetCandidates([]prefill.Candidate{{ID: "p/0", Instance: "prefill p", Models: []string{"m"}, Live: true,
		Profile: &mooncake.Profile{}}})
	lease, err := scheduler.Acquire(t.Context(), prefill.Request{Model: "m", PromptTokens: 7})
	require.NoError(t, err)
	lease.Answered(prefill.Usage{PromptTokens: 7}, time.Now().Add(time.Minute))
	return scheduler, lease
}

// A hand-off that nobody wants is decoded somewhere, so that its prefill engine frees it. Each row
// is what the decode engine does, and what becomes of the hand-off, of the slots and of the
// engine's name.
func TestWhatBecomesOfADiscardedHandOff(t *testing.T) {
	reset := func(w http.ResponseWriter) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			_ = conn.Close()
		}
	}
	answer := func(w http.ResponseWriter) { _, _ = io.WriteString(w, `{"choices":[]}`) }
	refuse := func(w http.ResponseWriter) { w.WriteHeader(http.StatusServiceUnavailable) }
	cancelled, failed, lost := board.Outcome{Kind: board.Cancelled}, board.Outcome{Kind: board.Failed},
		board.Outcome{Kind: board.Failed, Lost: true}
	answered := board.Outcome{Kind: board.Cancelled, Kept: true} // where engines keep the KV of answers
	for _, row := range []struct {
		name    string
		engine  func(w http.ResponseWriter, asked int) // nil: it says nothing
		change  func(d *Discarder, s *slots, r *ranks, h *Handoff)
		outcome string
		back    []board.Outcome
		told    string
		hosts   int
	}{
		{
			name:    "it is pulled",
			engine:  func(w http.ResponseWriter, _ int) { answer(w) },
			outcome: discardDone, back: []board.Outcome{answered}, told: "served",
		},
		{
			name: "an engine that refuses it leaves it to another one",
			engine: func(w http.ResponseWriter, asked int) {
				if asked < 2 {
					refuse(w)
					return
				}
				answer(w)
			},
			outcome: discardDone, back: []board.Outcome{failed, answered}, told: "served",
		},
		{
			name:    "three refusals are enough",
			engine:  func(w http.ResponseWriter, _ int) { refuse(w) },
			outcome: discardRefused, back: []board.Outcome{failed, failed, failed},
		},
		{
			name:    "what an engine answers with 500 may be its host's fault",
			engine:  func(w http.ResponseWriter, _ int) { w.WriteHeader(http.StatusInternalServerError) },
			outcome: discardRefused, back: []board.Outcome{lost, lost, lost}, hosts: 3,
		},
		{
			name:    "an engine that frees what it refuses is as good as one that pulls",
			engine:  func(w http.ResponseWriter, _ int) { refuse(w) },
			change:  func(_ *Discarder, _ *slots, r *ranks, _ *Handoff) { r.frees = true },
			outcome: discardDone, back: []board.Outcome{cancelled},
		},
		{
			name:    "a connection that breaks may be the hand-off's fault",
			engine:  func(w http.ResponseWriter, _ int) { reset(w) },
			outcome: discardFailed, back: []board.Outcome{lost, lost, lost}, told: "reported unclear reported unclear reported unclear",
		},
		{
			name:    "a hand-off that is known by its probe's id goes to no second engine, for the first may still have it",
			engine:  func(w http.ResponseWriter, _ int) { reset(w) },
			change:  func(_ *Discarder, _ *slots, _ *ranks, h *Handoff) { h.ReusedRequestID = "ek-x-p1" },
			outcome: discardFailed, back: []board.Outcome{lost}, told: "reported unclear",
		},
		{
			name: "an engine that says nothing is the last one, for the next would hold its slot as long",
			change: func(_ *Discarder, _ *slots, r *ranks, _ *Handoff) {
				r.rank.Profile.FirstEventTimeout = 200 * time.Millisecond
			},
			outcome: discardFailed, back: []board.Outcome{lost}, told: "reported unclear",
		},
		{
			name: "an engine that cannot be reached has not had it",
			change: func(_ *Discarder, _ *slots, r *ranks, _ *Handoff) {
				r.rank.Target = &engine.Target{ID: "d", URL: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}, Rank: -1}
			},
			outcome: discardFailed, back: []board.Outcome{failed, failed, failed}, told: "reported faulted reported faulted reported faulted",
		},
		{
			name:    "no rank has room",
			change:  func(_ *Discarder, s *slots, _ *ranks, _ *Handoff) { s.err = board.ErrNoWorkers },
			outcome: discardUnplaced,
		},
		{
			name:    "its prefill engine is another process by now",
			change:  func(_ *Discarder, _ *slots, r *ranks, _ *Handoff) { r.gone = true },
			outcome: discardExpired,
		},
		{
			name: "the slot comes too late for it",
			change: func(_ *Discarder, _ *slots, _ *ranks, h *Handoff) {
				h.Handoff = mooncake.NewHandoff([]byte(`{}`), time.Now().Add(-2*time.Second), time.Now().Add(-time.Second))
			},
			outcome: discardExpired, back: []board.Outcome{failed},
		},
		{
			name: "it was taken by an engine that may have read it",
			change: func(_ *Discarder, _ *slots, _ *ranks, h *Handoff) {
				_, _ = h.Acquire(time.Now())
			},
			outcome: discardExpired, back: []board.Outcome{failed},
		},
		{
			name:    "as many others are discarded as the pool has places",
			change:  func(d *Discarder, _ *slots, _ *ranks, _ *Handoff) { d.Places = pool.NewSemaphore(0) },
			outcome: discardCrowded,
		},
		{
			name:    "the proxy shuts down",
			change:  func(d *Discarder, _ *slots, _ *ranks, _ *Handoff) { <-d.Close() },
			outcome: discardUnplaced,
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			var mu sync.Mutex
			var bodies, ids []string
			over := make(chan struct{})
			e := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				mu.Lock()
				bodies, ids = append(bodies, string(body)), append(ids, r.Header.Get(engine.RequestID))
				n := len(bodies)
				mu.Unlock()
				if row.engine == nil {
					<-over
					return
				}
				row.engine(w, n)
			}))
			defer e.Close()
			defer close(over)
			at, err := url.Parse(e.URL)
			require.NoError(t, err)
			cfg := config.Default()
			cfg.Prefill.Retry.Base = time.Microsecond
			set, client := fleet.NewSettings(cfg), engine.NewClient(engine.Options{})
			defer client.Close()
			profile := mooncake.Profile{Connector: mooncake.AscendMooncakeV1}.WithDefaults()
			s, monitor := &slots{}, told{}
			r := &ranks{rank: &roster.Rank{Target: &engine.Target{ID: "d", URL: at, Rank: -1}, Profile: &profile, Traffic: &engine.Traffic{}}}
			id := uint64(0)
			d := NewDiscarder(Config{
				Context: t.Context(), Settings: func() *fleet.Settings { return set }, Client: client, Monitor: &monitor,
				Engines: func() Engines { return r },
				Places:  pool.NewSemaphore(1), Dispatcher: s,
				NextID: func() uint64 { id++; return id }, Registerer: prometheus.NewRegistry(), Log: zap.NewNop(),
			})
			scheduler, lease := leased(t)
			body, err := mooncake.ScanBody([]byte(`{"model":"m","messages":[]}`), 10)
			require.NoError(t, err)
			h := &Handoff{
				Handoff: mooncake.NewHandoff([]byte(`{"block":1}`), time.Now().Add(time.Minute), time.Now().Add(2*time.Minute)), Lease: lease,
				Request: unnamed{}, ID: "x", Endpoint: mooncake.Chat, Body: body, Prompt: 7, Attempt: 1, Model: roster.Route{Board: "m"},
			}
			if row.change != nil {
				row.change(d, s, r, h)
			}
			freed := 0
			d.Discard(h, func() { freed++ })
			<-d.Close()

			require.EqualValues(t, 1, testutil.ToFloat64(d.outcomes.WithLabelValues(row.outcome)))
			require.Equal(t, row.back, s.back)
			require.Equal(t, row.told, strings.Join(monitor, " "))
			require.Equal(t, row.hosts, r.hosts)
			c, pulled := scheduler.Status()[0], row.outcome == discardDone
			require.Zero(t, c.Inflight+c.Pooled+c.Dispatched)
			require.Equal(t, !pulled, c.Orphans == 1, "what no engine has pulled is left to the prefill engine's hold")
			require.Equal(t, pulled, freed == 1, "who waits for it is told that it is free, and only then")
			for i, e := range s.entries {
				require.True(t, e.Discard)
				require.Len(t, e.Avoid, i, "no rank has it twice")
			}
			mu.Lock()
			defer mu.Unlock()
			salts := map[string]bool{}
			for _, body := range bodies {
				_, salt, found := strings.Cut(body, `"cache_salt":"`)
				require.True(t, found)
				salt, _, _ = strings.Cut(salt, `"`)
				require.False(t, salts[salt], "no other request finds the blocks that it pulls")
				salts[salt] = true
				require.Contains(t, body, `"kv_transfer_params":{"block":1`)
				require.Contains(t, body, `"max_tokens":1`)
			}
			slices.Sort(ids)
			require.Len(t, slices.Compact(ids), len(bodies), "each try has an id of its own")
		})
	}
}
