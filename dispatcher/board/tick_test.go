package board

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/fakes"
	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

func TestABurstOfFreedSlotsIsDecidedOnce(t *testing.T) {
	cfg := testConfig()
	cfg.Window = 3 * time.Millisecond
	h := newHand(t, cfg)
	h.fleet(ranks(1, 4, 0))
	var running []*Slot
	for range 4 {
		running = append(running, h.put(pool.Entry{}).slotNow(t))
	}
	ticks := h.boards["m"].ticks
	var ws []waiting
	for range 4 {
		ws = append(ws, h.put(pool.Entry{}))
	}
	h.release(running[0])
	h.pass(time.Millisecond)
	h.release(running[1], running[2])
	h.pass(2*time.Millisecond - 1)
	late := h.put(pool.Entry{})
	require.True(t, ws[0].waits(), "decided before the window ended")
	require.Equal(t, h.at.Add(1), h.Next(), "the timer")
	h.pass(1)
	for i, w := range ws[:3] {
		require.False(t, w.waits(), "entry %d", i)
	}
	require.True(t, ws[3].waits())
	require.True(t, late.waits())
	require.Equal(t, ticks+1, h.boards["m"].ticks, "one tick for all of them")
	require.True(t, h.Next().IsZero(), "the window is closed")
}

func TestABurstOfEntriesIsOneRound(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(2, 8, 0))
	h.putAll(10, func() pool.Entry { return pool.Entry{} })
	require.EqualValues(t, 1, h.boards["m"].ticks)
	require.Zero(t, h.boards["m"].pool.Len())
}

func TestImmediatePoliciesWaitForNothing(t *testing.T) {
	cfg := testConfig()
	cfg.Policy, cfg.Window = "immediate", time.Hour
	h := newHand(t, cfg)
	h.fleet(ranks(1, 1, 0))
	for range 3 {
		h.put(pool.Entry{}).slotNow(t)
	}
	w := h.status(h.at).Models[0].Workers[0]
	require.Equal(t, 3, w.Used, "two of them wait in the engine")
	var free int32
	h.boards["m"].groups[0].chosenPolicy.Policy.(*fake).Decides = func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
		free = s.Workers[0].Free
		return dst
	}
	h.put(pool.Entry{})
	require.EqualValues(t, -2, free)
}

func TestGroupsAreVisitedByMeanKVTokens(t *testing.T) {
	h := newHand(t, testConfig())
	fleet := ranks(3, 4, 0)
	fleet[2].Group = "other" // one rank, the others are two
	h.fleet(fleet)

	require.Equal(t, "main", h.put(pool.Entry{Prompt: 90}).slotNow(t).Group, "a tie goes to the lower ID")
	require.Equal(t, "other", h.put(pool.Entry{Prompt: 50}).slotNow(t).Group, "0 a rank against 45")
	s := h.put(pool.Entry{Prompt: 6}).slotNow(t)
	require.Equal(t, "main", s.Group, "90 over two ranks is less than 50 on one")
	s.Progress(10)
	require.Equal(t, "other", h.put(pool.Entry{Prompt: 1}).slotNow(t).Group, "generated tokens count: 53 a rank against 50")
}

func TestAFullGroupLeavesThePoolToTheNext(t *testing.T) {
	h := newHand(t, testConfig())
	fleet := ranks(2, 1, 0)
	fleet[1].Group = "other"
	h.fleet(fleet)
	require.EqualValues(t, 0, h.put(pool.Entry{Prompt: 5}).slotNow(t).Worker)
	require.EqualValues(t, 1, h.put(pool.Entry{Prompt: 9}).slotNow(t).Worker)
	require.True(t, h.put(pool.Entry{}).waits())
}

// The guard would keep a rank free for an entry that only another group can
// ever take, for as long as that group is full.
func TestAGroupDoesNotSeeWhatItCanNeverTake(t *testing.T) {
	for _, down := range []bool{false, true} { // the small group's own large rank is no help while it is down
		cfg := testConfig()
		cfg.Policy, cfg.DensePolicy, cfg.Parse = "br0:max_age_ms=1000,watermark=0", "", nil
		h := newHand(t, cfg)
		fleet := ranks(3, 1, 100)
		fleet[2].Group, fleet[2].Capacity = "large", 5000
		if down {
			fleet = append(fleet, Worker{ID: 3, Name: "d3", Model: "m", Group: "main", Barrier: true, Slots: 1, Capacity: 5000})
		}
		h.fleet(fleet)
		first := h.put(pool.Entry{Prompt: 2000}).slotNow(t)
		require.Equal(t, "large", first.Group)
		second := h.put(pool.Entry{Prompt: 3000})
		require.True(t, second.waits())
		h.pass(time.Minute) // it is overdue
		for range 2 {
			require.Equal(t, "main", h.put(pool.Entry{Prompt: 10}).slotNow(t).Group)
		}
		h.release(first)
		require.Equal(t, "large", second.slotNow(t).Group)
	}
}

func TestRanksWithoutBarrierAreOneSnapshotWithAPolicyOfTheirOwn(t *testing.T) {
	h := newHand(t, testConfig())
	fleet := ranks(2, 1, 0)
	fleet[0].Barrier, fleet[1].Barrier, fleet[1].Group = false, false, "b"
	h.fleet(fleet)
	for _, want := range []string{"main", "b"} {
		s := h.put(pool.Entry{Prompt: 10}).slotNow(t)
		require.Equal(t, want, s.Group)
		require.Equal(t, "immediate", s.Policy)
	}
	require.NoError(t, h.setPolicy("pooled"))
	require.Equal(t, "immediate", h.put(pool.Entry{Prompt: 10}).slotNow(t).Policy, "SetPolicy is for barrier groups")
}

func TestDownRanksAreShownButNeverOpen(t *testing.T) {
	var seen []policy.Worker
	spy := &fake{Spec: "spy", Decides: func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
		seen = append(seen[:0], s.Workers...)
		return dst
	}}
	cfg := testConfig(spy)
	cfg.Policy = "spy"
	h := newHand(t, cfg)
	fleet := ranks(2, 3, 500)
	fleet[0].Up, fleet[1].Cost = false, 1.5
	h.fleet(fleet)
	h.put(pool.Entry{})
	require.Equal(t, []policy.Worker{
		{ID: 0, Free: 0, Up: false, Capacity: 500, Running: []policy.Request{}},
		{ID: 1, Free: 3, Up: true, Capacity: 500, Cost: 1.5, Running: []policy.Request{}},
	}, seen)
}

func TestThePoolAsPoliciesSeeIt(t *testing.T) {
	var seen policy.Snapshot
	spy := &fake{Spec: "spy", AgeMs: 1000, Decides: func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
		seen = *s
		return dst
	}}
	cfg := testConfig(spy)
	cfg.Policy, cfg.TTL = "spy", 8*time.Second
	h := newHand(t, cfg)
	h.fleet(ranks(1, 1, 0))
	h.put(pool.Entry{Prompt: 5, Key: 9, Arrival: h.at.Add(-time.Minute)})
	h.put(pool.Entry{Prompt: 6, Age: 40, Arrival: h.at.Add(-time.Hour)})
	h.at = h.at.Add(6 * time.Second)
	h.put(pool.Entry{Prompt: 7})
	require.Equal(t, []policy.Entry{
		{ID: 2, Prompt: 6, Age: 40, WaitMs: 3606e3, Urgent: true}, // resumed: oldest, with its whole age
		{ID: 1, Prompt: 5, Key: 9, WaitMs: 6000, Urgent: true},    // three quarters of the TTL
		{ID: 3, Prompt: 7},
	}, seen.Pool)
	require.EqualValues(t, 1000, seen.MaxAgeMs, "no admissions yet: the policy's own")
}

func TestTheGuardIsSixMeanWaits(t *testing.T) {
	var guard float32
	p := &fake{Spec: "p", AgeMs: 1000}
	admit := fakes.LeastKV(false)
	p.Decides = func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
		guard = s.MaxAgeMs
		return admit(s, dst)
	}
	cfg := testConfig(p)
	cfg.Policy = "p"
	h := newHand(t, cfg)
	h.fleet(ranks(1, 1, 0))
	s := h.put(pool.Entry{}).slotNow(t)
	w := h.put(pool.Entry{})
	h.at = h.at.Add(4 * time.Second)
	h.release(s)
	s = w.slotNow(t)
	require.Equal(t, 4*time.Second, s.Wait)
	h.release(s)
	h.put(pool.Entry{}).slotNow(t)
	require.EqualValues(t, 6*2000, guard, "the mean of 0 and 4 s, six times")

	p.AgeMs = 0
	h.fleet(ranks(1, 2, 0))
	h.put(pool.Entry{}).slotNow(t)
	require.Zero(t, guard, "a policy without a guard gets none")
}

func TestWaitsRememberAThousand(t *testing.T) {
	var w waitTimes
	for range 500 {
		w.add(time.Hour)
	}
	for range 1000 {
		w.add(2 * time.Millisecond)
	}
	require.EqualValues(t, 2, w.meanMs())
}

func TestAPolicyThatPanicsIsReplacedForTheTick(t *testing.T) {
	calls := 0
	p := &fake{Spec: "p"}
	admit := fakes.LeastKV(false)
	p.Decides = func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
		if calls++; calls == 1 {
			panic("index out of range")
		}
		return admit(s, dst)
	}
	cfg := testConfig(p)
	cfg.Policy = "p"
	made, parse := 0, cfg.Parse
	cfg.Parse = func(spec string) (policy.Policy, error) {
		if spec == "p" {
			made++
		}
		return parse(spec)
	}
	h := newHand(t, cfg)
	h.fleet(ranks(1, 4, 0))
	before := made
	require.Equal(t, FallbackSpec, h.put(pool.Entry{}).slotNow(t).Policy)
	require.Equal(t, before+1, made, "the one that panicked may have left its scratch half written")
	require.Equal(t, "p", h.put(pool.Entry{}).slotNow(t).Policy, "only that tick")
	require.EqualValues(t, 1, count(t, h.metrics.fallbacks.WithLabelValues("panic")))
}

func TestASlowPolicyIsReplacedForSixtyFourRounds(t *testing.T) {
	p := &fake{Spec: "p"}
	admit := fakes.LeastKV(false)
	p.Decides = func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment { return admit(s, dst) }
	cfg := testConfig(p)
	cfg.Policy, cfg.TickLimit = "p", 1 // every round takes longer than a nanosecond
	h := newHand(t, cfg)
	h.fleet(ranks(1, 100, 0))
	require.Equal(t, "p", h.put(pool.Entry{}).slotNow(t).Policy, "what it decided late still counts")
	for range SlowRounds {
		require.Equal(t, FallbackSpec, h.put(pool.Entry{}).slotNow(t).Policy)
	}
	require.Equal(t, "p", h.put(pool.Entry{}).slotNow(t).Policy)
	require.EqualValues(t, 2, count(t, h.metrics.fallbacks.WithLabelValues("slow")))
}

// Where other processes have the CPU, a round takes long and its policy computes for little: such a
// policy stays, unless it blocks.
func TestAPolicyIsJudgedByWhatItComputes(t *testing.T) {
	for name, c := range map[string]struct {
		round  Decided
		reason string
	}{
		"it computes for too long":                  {Decided{Took: 30 * time.Millisecond, Computed: 21 * time.Millisecond}, FallbackSlow},
		"it is not scheduled for a while":           {Decided{Took: 900 * time.Millisecond, Computed: time.Millisecond}, ""},
		"it waits for something, and computes less": {Decided{Took: 1100 * time.Millisecond, Computed: time.Millisecond}, FallbackBlocked},
	} {
		t.Run(name, func(t *testing.T) {
			admit := fakes.LeastKV(false)
			cfg := testConfig(&fake{Spec: "p", Decides: func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment { return admit(s, dst) }})
			cfg.Policy, cfg.TickLimit = "p", 20*time.Millisecond
			h := newHand(t, cfg)
			h.fleet(ranks(1, 100, 0))
			h.judged = &c.round
			require.Equal(t, "p", h.put(pool.Entry{}).slotNow(t).Policy, "what it decided late still counts")
			g := h.Status(h.at).Models[0].Groups[0]
			require.Equal(t, c.reason, g.FallbackReason)
			require.Equal(t, c.reason != "", g.FallbackRounds > 0)
		})
	}
}

func TestAssignmentsThatBreakALimitAreNotBound(t *testing.T) {
	for _, c := range []struct {
		name, fault string
		worker      int32
		entry       uint64 // added to the ID of the one that waits
	}{
		{"an entry nobody enqueued", "unknown_entry", 0, 77},
		{"a rank that does not exist", "unknown_worker", 9, 0},
		{"a rank that is down", "worker_down", 1, 0},
		{"a rank whose slots are taken", "no_slot", 2, 0},
		{"a rank without room for the prompt", "no_room", 3, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := &fake{Spec: "p", Decides: func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
				return append(dst, policy.Assignment{Entry: s.Pool[0].ID + c.entry, Worker: c.worker})
			}}
			cfg := testConfig(p)
			cfg.Policy = "p"
			h := newHand(t, cfg)
			fleet := ranks(4, 1, 100)
			fleet[1].Up, fleet[2].Slots, fleet[3].Capacity = false, 0, 40
			h.fleet(fleet)
			s := h.put(pool.Entry{Prompt: 50}).slotNow(t)
			require.EqualValues(t, 0, s.Worker, "where it may go, by the fallback")
			require.Equal(t, FallbackSpec, s.Policy)
			require.EqualValues(t, 1, count(t, h.metrics.invalid.WithLabelValues(c.fault)))
			require.EqualValues(t, 1, count(t, h.metrics.fallbacks.WithLabelValues("invalid")))
		})
	}
}

// fullBoard is G ranks of which each runs 40 requests, some slots free, and a
// pool behind them.
func fullBoard(tb testing.TB, cfg Config, g, running, free, waits int) *hand {
	h := newHand(tb, cfg)
	rng := rand.New(rand.NewPCG(1, 2))
	h.fleet(ranks(g, running, 0))
	prompt := func() pool.Entry { return pool.Entry{Prompt: 100 + rng.IntN(8000)} }
	for _, w := range h.putAll(g*running, prompt) {
		w.slotNow(tb).Progress(rng.IntN(300))
	}
	h.putAll(waits, prompt)
	b := h.boards["m"]
	for i := range free { // room for the slots to come, without a turn
		r := b.ranks[int32(i%g)]
		r.Slots++
		r.slots, r.running = append(r.slots, 0)[:len(r.slots)], append(r.running, policy.Request{})[:len(r.running)]
	}
	return h
}

// cycle is a tick and the release of all it admitted, the entries going back
// to the pool: the same state before and after.
func (h *hand) cycle(admitted []waiting) ([]waiting, time.Duration) {
	b := h.boards["m"]
	admitted = admitted[:0]
	for _, e := range b.pool.Entries() {
		admitted = append(admitted, h.waiting[e])
	}
	began := time.Now()
	h.count()
	b.decideNow = true
	h.apply(&h.tick)
	took := time.Since(began)
	n := 0
	for _, w := range admitted {
		if len(w.result) == 0 {
			continue
		}
		<-w.result
		b.discharge(w.slot.index)
		h.slots[w.slot.index] = nil
		b.pool.Add(w.entry, h.at)
		b.waiting[w.entry.ID] = waitingEntry{Enqueue: Enqueue{Entry: w.entry, Trace: w.slot.Grounds}}
		h.waiting[w.entry] = w
		n++
	}
	return admitted[:n], took
}

// tickPolicies are what ticks are measured with.
var tickPolicies = []string{"pjsq-kv", "br0", "brh", "evenkeel"}

// saturated is a board whose next tick fills 64 slots from a pool of 1000, by a
// policy that knows how long outputs are and how long a step takes.
func saturated(tb testing.TB, spec string) *hand {
	cfg := realConfig("pjsq-kv")
	cfg.StepModel = StepModel{C0Ms: 55, C1Ms: 2e-5, RequestMs: 0.4}
	cfg.Predictor.Kind = "survival"
	h := fullBoard(tb, cfg, 144, 40, 64, 1000)
	h.teach(lengths(4096))
	require.NoError(tb, h.setPolicy(spec))
	return h
}

// generate gives every running request a token; one that has 300 is taken for
// another that begins.
func (h *hand) generate() {
	for _, s := range h.slots {
		if s != nil && s.generated.Add(1) > 300 {
			s.generated.Store(0)
			record := s.record()
			record.id += 1 << 32
			record.rank.running[record.pos].ID = record.id
		}
	}
}

func TestATickDoesNotTouchTheHeap(t *testing.T) {
	for _, spec := range tickPolicies {
		t.Run(spec, func(t *testing.T) {
			h := saturated(t, spec)
			var admitted []waiting
			turn := func() {
				h.generate()
				admitted, _ = h.cycle(admitted)
			}
			for range 30 { // caches by slot, and answers of all that fall due together
				turn()
			}
			require.NotEmpty(t, admitted)
			require.Zero(t, testing.AllocsPerRun(20, turn))
		})
	}
}

func TestATickWithRequestsThatStrayDoesNotTouchTheHeap(t *testing.T) {
	h := saturated(t, "evenkeel")
	b := h.boards["m"]
	for id, r := range b.ranks {
		r.Engine, r.Unpinned = "d"+string('0'+id%9), true
	}
	for _, e := range b.pool.Entries() {
		e.Response = true
	}
	for i := range b.slots.records {
		s := &b.slots.records[i]
		s.engineChoosesRank = true
		s.rank.unpinnedSlots++
	}
	b.regroupEngines()
	var admitted []waiting
	turn := func() {
		h.generate()
		admitted, _ = h.cycle(admitted)
	}
	for range 30 {
		turn()
	}
	require.Positive(t, b.ranks[0].kvFromOtherRanks)
	require.Zero(t, testing.AllocsPerRun(20, turn))
}

func TestATickThatIsWatchedDoesNotTouchTheHeap(t *testing.T) {
	h := saturated(t, "br0")
	h.shown = &Round{}
	var admitted []waiting
	turn := func() { admitted, _ = h.cycle(admitted) }
	turn()
	require.Zero(t, testing.AllocsPerRun(20, turn))
}

// BenchmarkTick is a whole tick of the board, a step apart from the last:
// counters read, r-hat moved on, snapshot, decision, binding; 144 ranks of 40
// requests, 64 slots free, 1000 entries, the whole budget. ns/op has the undoing of the tick in
// it, the percentiles are of ticks alone.
func BenchmarkTick(b *testing.B) {
	for _, spec := range tickPolicies {
		b.Run(spec, func(b *testing.B) {
			h := saturated(b, spec)
			board := h.boards["m"]
			var admitted []waiting
			for range 30 {
				h.generate()
				admitted, _ = h.cycle(admitted)
			}
			took := make([]float64, 0, 4096)
			b.ReportAllocs()
			for b.Loop() {
				h.generate()
				board.groups[0].searchBudget = searchBudget{} // the whole of it, however busy the machine
				var d time.Duration
				admitted, d = h.cycle(admitted)
				if len(took) < cap(took) {
					took = append(took, float64(d.Microseconds()))
				}
			}
			slices.Sort(took)
			b.ReportMetric(took[len(took)/2], "p50-µs")
			b.ReportMetric(took[len(took)*99/100], "p99-µs")
		})
	}
}

// BenchmarkShow is what a round costs a tick when it is recorded.
func BenchmarkShow(b *testing.B) {
	h := saturated(b, "br0")
	h.cycle(nil)
	var r Round
	b.ReportAllocs()
	for b.Loop() {
		r.Copy(&h.boards["m"].round)
	}
}
