package dispatcher

import (
	"cmp"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/fakes"
	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a policy made for a test.
type fake = fakes.Policy

func fakePolicies(extra ...*fake) func(string) (policy.Policy, error) {
	return fakes.Parser(board.FallbackSpec, extra...)
}

func testConfig(extra ...*fake) Config {
	return Config{Config: board.Config{
		Policy: "pooled", DensePolicy: "immediate", Parse: fakePolicies(extra...),
		TickLimit: time.Hour, // a busy machine must not bring the fallback in
	}}
}

// realConfig has the product's own policies.
func realConfig(spec string) Config {
	cfg := testConfig()
	cfg.Policy, cfg.DensePolicy, cfg.Parse = spec, "", nil
	return cfg
}

// lengths are outputs around a hundred tokens, the same every time.
func lengths(n int) []int32 {
	rng := rand.New(rand.NewPCG(5, 6))
	all := make([]int32, n)
	for i := range all {
		all[i] = 20 + rng.Int32N(200)
	}
	return all
}

// teach has so many outputs learned and their tables in force.
func (h *hand) teach(outputs []int32) {
	for _, o := range outputs {
		h.learner.add(board.OutputSample{Model: "m", Finished: true, Prompt: 100, Output: o})
	}
	h.at = h.at.Add(time.Second)
	before := len(h.told)
	h.learner.learn(nil, h.at)
	for _, c := range h.told[before:] { // the tables
		c(h.scheduler)
	}
	h.told = h.told[:before]
}

// ranks are n workers of one barrier group, IDs from 0.
func ranks(n, slots int, capacity int64) []board.Worker {
	ws := make([]board.Worker, n)
	for i := range ws {
		ws[i] = board.Worker{ID: int32(i), Name: "d" + string(rune('0'+i%10)), Model: "m", Group: "main", Barrier: true, Slots: slots,
			Capacity: capacity, Up: true}
	}
	return ws
}

// tb is what testing and rapid have in common.
type tb interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// hand drives a loop by hand, without its goroutine: each call is one turn.
type hand struct {
	*scheduler
	at   time.Time
	ids  uint64
	told []func(*scheduler) // by step detectors, for the next turn
}

func newHand(t tb, cfg Config) *hand {
	t.Helper()
	h := &hand{at: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
	d := &Dispatcher{metrics: newMetrics()}
	r, err := newScheduler(cfg.withDefaults(), d, func(f func(*scheduler)) bool { h.told = append(h.told, f); return true })
	if err != nil {
		t.Fatal(err)
	}
	h.scheduler = r
	return h
}

func (h *hand) do(queue ...func(*scheduler)) { h.advance(queue, h.at) }

func (h *hand) pass(d time.Duration) {
	h.at = h.at.Add(d)
	h.do()
}

// put enqueues an entry, for model m where it names none.
func (h *hand) put(e pool.Entry) waitingEntry {
	return h.putAll(1, func() pool.Entry { return e })[0]
}

// putAll enqueues n entries in one turn.
func (h *hand) putAll(n int, next func() pool.Entry) []waitingEntry {
	var all []waitingEntry
	var queue []func(*scheduler)
	for range n {
		h.ids++
		e := next()
		e.ID, e.Entered, e.Model = h.ids, h.at, cmp.Or(e.Model, "m")
		slot := newSlot(&e, h.cfg.Explain)
		w := waitingEntry{Enqueue: board.Enqueue{Entry: &e, Trace: slot.Trace}, slot: slot, result: make(chan Result, 1)}
		all = append(all, w)
		queue = append(queue, func(l *scheduler) { l.enqueue(w) })
	}
	h.do(queue...)
	return all
}

func (h *hand) release(slots ...*Slot) {
	var queue []func(*scheduler)
	for _, s := range slots {
		queue = append(queue, func(l *scheduler) { l.releaseSlot(s, board.Outcome{}) })
	}
	h.do(queue...)
}

func (h *hand) fleet(ws []board.Worker) { h.do(func(l *scheduler) { l.setWorkers(ws) }) }

func (w waitingEntry) slotNow(t tb) *Slot {
	t.Helper()
	select {
	case r := <-w.result:
		if r.Err != nil {
			t.Fatalf("entry %d: %v; want a slot", w.Entry.ID, r.Err)
		}
		return r.Slot
	default:
		t.Fatalf("entry %d still waits; want a slot", w.Entry.ID)
		return nil
	}
}

func (w waitingEntry) waits() bool { return len(w.result) == 0 }

func count(t testing.TB, c prometheus.Counter) float64 {
	t.Helper()
	var m dto.Metric
	if err := c.Write(&m); err != nil {
		t.Fatal(err)
	}
	return m.GetCounter().GetValue()
}
