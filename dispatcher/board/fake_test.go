package board

import (
	"cmp"
	"slices"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/dispatcher/fakes"
	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// fake is a policy made for a test.
type fake = fakes.Policy

func fakePolicies(extra ...*fake) func(string) (policy.Policy, error) {
	return fakes.Parser(FallbackSpec, extra...)
}

func testConfig(extra ...*fake) Config {
	return Config{
		Policy: "pooled", DensePolicy: "immediate", Parse: fakePolicies(extra...),
		TickLimit: time.Hour, // a busy machine must not bring the fallback in
	}
}

// ranks are n workers of one barrier group, IDs from 0.
func ranks(n, slots int, capacity int64) []Worker {
	ws := make([]Worker, n)
	for i := range ws {
		ws[i] = Worker{ID: int32(i), Name: "d" + string(rune('0'+i%10)), Model: "m", Group: "main", Barrier: true, Slots: slots,
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

// hand owns boards by hand, without a goroutine: each do is one turn.
type hand struct {
	*Boards
	at       time.Time
	ids      uint64
	told     []command // by streams, for the next turn
	waiting  map[*pool.Entry]waiting
	slots    []*Slot // of model m, by index
	counts   Counts
	pace     Throughput
	watched  int
	pulses   map[GroupKey]*beat
	learner  Learner
	finished []OutputSample
	shown    *Round // copies of rounds, if it is there
	metrics  counted

	tick    Tick
	decided Decided
	judged  *Decided // what each round is said to have taken; nil: what it took
	steps   Steps
}

// command is what a turn begins with.
type command func(*hand)

// counted is how often effects came, by label.
type counted struct {
	fallbacks, invalid, steered labelled
	thought                     []float64
}

type labelled map[string]float64

func (l labelled) WithLabelValues(label string) float64 { return l[label] }

func count(_ tb, n float64) float64 { return n }

// waiting is an entry with what its caller is answered with.
type waiting struct {
	entry  *pool.Entry
	slot   *Slot
	result chan Result
	local  *Local
	hits   []Hit
}

// Result is an answer.
type Result struct {
	Slot *Slot
	Err  error
}

// Slot is what a caller has of its place.
type Slot struct {
	Binding
	Grounds *Explanation

	h             *hand
	key           GroupKey
	index         int32
	generated     atomic.Int32
	started       bool
	waits         bool
	maxUnreported int32
	first, last   uint32 // steps
}

// beat is the steps that the streams of a group tell of.
type beat struct {
	number uint32
	at     time.Time // of the last; zero: nothing ran before
}

func newHand(t tb, cfg Config) *hand {
	t.Helper()
	b, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &hand{
		Boards: b, at: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), waiting: map[*pool.Entry]waiting{}, pulses: map[GroupKey]*beat{},
		metrics: counted{fallbacks: labelled{}, invalid: labelled{}, steered: labelled{}}, tick: Tick{Model: "m"}, counts: Counts{Model: "m"},
	}
}

func (h *hand) apply(e Event) {
	h.carryOut(h.Apply(e, h.at))
	for h.Deciding() {
		start := time.Now()
		effects := h.Apply(Decide{}, h.at)
		took := time.Since(start)
		h.decided = Decided{Took: took, Computed: took}
		if h.judged != nil {
			h.decided = *h.judged
		}
		h.carryOut(effects)
		h.carryOut(h.Apply(&h.decided, h.at))
	}
}

func (h *hand) do(queue ...command) {
	for _, c := range queue {
		c(h)
	}
	for _, b := range h.inOrder {
		if h.NeedsCounts(b.model, h.at) {
			h.count()
		}
		h.tick.Model = b.model
		h.apply(&h.tick)
	}
}

func (h *hand) pass(d time.Duration) {
	h.at = h.at.Add(d)
	h.do()
}

// count tells how far the slots are.
func (h *hand) count() {
	c := &h.counts
	if grow := len(h.slots) - len(c.Tokens); grow > 0 {
		c.Tokens, c.Started, c.FirstStep = append(c.Tokens, make([]int32, grow)...), append(c.Started, make([]bool, grow)...),
			append(c.FirstStep, make([]uint32, grow)...)
		c.MaxUnreported = append(c.MaxUnreported, make([]int32, grow)...)
	}
	for i, s := range h.slots {
		if s != nil {
			c.Tokens[i], c.Started[i], c.FirstStep[i], c.MaxUnreported[i] = s.generated.Load(), s.started, s.first, s.maxUnreported
		} else {
			c.Tokens[i], c.Started[i], c.FirstStep[i], c.MaxUnreported[i] = 0, false, 0, 0
		}
	}
	h.Apply(c, h.at)
}

func (h *hand) carryOut(effects []Effect) {
	for i := range effects {
		switch e := &effects[i]; e.Kind {
		case EffectBind:
			w := h.waiting[e.Entry]
			s := w.slot
			s.Binding, s.key, s.index, s.waits = e.Bound, e.Group, e.Bound.Slot, e.Bound.InEngineQueue
			if grow := int(s.index) + 1 - len(h.slots); grow > 0 {
				h.slots = append(h.slots, make([]*Slot, grow)...)
			}
			h.slots[s.index] = s
			w.result <- Result{Slot: s}
			delete(h.waiting, e.Entry)
		case EffectRefuse:
			h.waiting[e.Entry].result <- Result{Err: e.Err}
			delete(h.waiting, e.Entry)
		case EffectRound:
			if h.shown != nil {
				h.shown.Copy(e.Round)
			}
		case EffectInvalid:
			h.metrics.invalid[e.Label]++
		case EffectFallback:
			h.metrics.fallbacks[e.Label]++
		case EffectEstimate:
			h.metrics.thought = append(h.metrics.thought, e.EstimatedTokens/float64(e.Count))
		case EffectSteered:
			h.metrics.steered[e.Label]++
		case EffectPace:
			h.pace = e.Pace
		case EffectWatchFirstEvents:
			h.watched = e.Count
		case EffectNewPredictor:
			_ = h.learner.Follow(e.Predictor, e.Fit)
		case EffectFit:
			h.learner.Load(e.Fit)
		case EffectOutputSample:
			h.finished = append(h.finished, e.Sample)
		case EffectGroup:
			h.pulses[e.Group] = &beat{number: 1}
		case EffectGroupGone:
			delete(h.pulses, e.Group)
		case EffectGroupIdle:
			h.pulses[e.Group].at = time.Time{}
		}
	}
}

// set has the boards change a setting, or returns why they do not.
func (h *hand) set(e Event) (err error) {
	for _, effect := range h.Apply(e, h.at) {
		if effect.Kind == EffectRejected {
			return effect.Err
		}
		h.carryOut([]Effect{effect})
	}
	return nil
}

func (h *hand) setPolicy(spec string) error { return h.set(SetPolicy{spec}) }

func (h *hand) enqueue(w waiting) {
	if w.local != nil {
		h.count()
	}
	h.waiting[w.entry] = w
	h.apply(Enqueue{Entry: w.entry, Local: w.local, Hits: w.hits, Trace: w.slot.Grounds})
}

func (h *hand) withdraw(e *pool.Entry) { h.apply(Withdraw{e}) }

func (h *hand) preempted(worker int32) { h.apply(Preempted{worker}) }

// giveBack releases a slot.
func (h *hand) giveBack(s *Slot, o Outcome) {
	h.count()
	h.slots[s.index] = nil
	h.apply(&Release{Model: s.key.Model, Slot: s.index, Outcome: o, Generated: s.generated.Load(), Started: s.started, FirstStep: s.first,
		LastStep: s.last, MaxUnreported: s.maxUnreported})
}

func (h *hand) status(now time.Time) Status {
	h.count()
	return h.Status(now)
}

// put enqueues an entry, for model m where it names none.
func (h *hand) put(e pool.Entry) waiting {
	return h.putAll(1, func() pool.Entry { return e })[0]
}

// putAll enqueues n entries in one turn.
func (h *hand) putAll(n int, next func() pool.Entry) []waiting {
	var all []waiting
	var queue []command
	for range n {
		w := h.make(next())
		all = append(all, w)
		queue = append(queue, func(h *hand) { h.enqueue(w) })
	}
	h.do(queue...)
	return all
}

// make is an entry that is about to be enqueued.
func (h *hand) make(e pool.Entry) waiting {
	h.ids++
	e.ID, e.Entered, e.Model = h.ids, h.at, cmp.Or(e.Model, "m")
	if b := h.boards[e.Model]; b != nil {
		for _, r := range b.ranks {
			e.Early = e.Early || r.present && r.Early
		}
		e.Aggregated = e.Aggregated || b.ranksPrefill && !e.Early
	}
	w := waiting{entry: &e, slot: &Slot{h: h}, result: make(chan Result, 1)}
	if h.cfg.Explain {
		w.slot.Grounds = &Explanation{}
	}
	return w
}

func (h *hand) release(slots ...*Slot) {
	var queue []command
	for _, s := range slots {
		queue = append(queue, func(h *hand) { h.giveBack(s, Outcome{}) })
	}
	h.do(queue...)
}

// slotsOf are the slots that are charged to a rank.
func (h *hand) slotsOf(rank int32) (all []*Slot) {
	for _, slot := range h.boards["m"].ranks[rank].slots {
		all = append(all, h.slots[slot])
	}
	return all
}

func (h *hand) fleet(ws []Worker) {
	h.do(func(h *hand) {
		h.count()
		h.apply(SetWorkers{ws})
	})
}

// Progress tells of tokens. The first stream of a group that speaks twice in a step tells of the
// next.
func (s *Slot) Progress(generated int) {
	s.generated.Store(max(s.generated.Load(), int32(generated)))
	p := s.h.pulses[s.key]
	if p == nil || !s.key.Barrier {
		return
	}
	switch s.last {
	case 0:
		s.first = p.number
	case p.number:
		p.number++
		told := Step{Number: p.number}
		if !p.at.IsZero() {
			told.Length = s.h.at.Sub(p.at)
		}
		p.at = s.h.at
		s.h.told = append(s.h.told, func(h *hand) {
			h.count()
			h.apply(&Steps{s.key, []Step{told}})
		})
	}
	s.last = p.number
}

func (s *Slot) Generated() int { return int(s.generated.Load()) }

func (s *Slot) Waits() bool { return s.waits }

// Started tells of the first event.
func (s *Slot) Started() {
	s.started, s.waits = true, false
	if s.h.watched > 0 {
		s.h.told = append(s.h.told, func(h *hand) {
			if h.slots[s.index] == s {
				h.apply(FirstEvent{s.key.Model, s.index})
			}
		})
	}
}

func (w waiting) slotNow(t tb) *Slot {
	t.Helper()
	select {
	case r := <-w.result:
		if r.Err != nil {
			t.Fatalf("entry %d: %v; want a slot", w.entry.ID, r.Err)
		}
		return r.Slot
	default:
		t.Fatalf("entry %d still waits; want a slot", w.entry.ID)
		return nil
	}
}

func (w waiting) errNow(t tb) error {
	t.Helper()
	select {
	case r := <-w.result:
		return r.Err
	default:
		t.Fatalf("entry %d still waits; want an error", w.entry.ID)
		return nil
	}
}

func (w waiting) waits() bool { return len(w.result) == 0 }

// requests are those of a property.
type requests struct {
	wait []waiting
	held []*Slot
}

// collect takes in what became of those that waited, and returns why some got no slot.
func (q *requests) collect(t *rapid.T) (failed []error) {
	t.Helper()
	q.wait = slices.DeleteFunc(q.wait, func(w waiting) bool {
		if w.waits() {
			return false
		}
		r := <-w.result
		require.NotEqual(t, r.Err == nil, r.Slot == nil, "a slot or an error: %+v", r)
		if r.Slot != nil {
			q.held = append(q.held, r.Slot)
		} else {
			failed = append(failed, r.Err)
		}
		return true
	})
	return failed
}

// leave draws one that has a slot, and no longer counts it.
func (q *requests) leave(t *rapid.T) *Slot {
	if len(q.held) == 0 {
		t.Skip()
	}
	i := rapid.IntRange(0, len(q.held)-1).Draw(t, "slot")
	s := q.held[i]
	q.held = slices.Delete(q.held, i, i+1)
	return s
}
