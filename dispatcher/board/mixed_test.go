package board

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// mixed has ranks prefill and decode, 1,000 tokens in a step.
func mixed(ws []Worker) []Worker {
	for i := range ws {
		ws[i].Mixed, ws[i].Budget = true, 1000
	}
	return ws
}

// law has a prompt token cost a step 0.1 ms.
var law = StepModel{C0Ms: 10, C1Ms: 1e-4, OwnPromptMs: 0.1}

// onMixed is a board of mixed ranks without a window.
func onMixed(t tb, spec string, fleet []Worker) *hand {
	h := newHand(t, realConfig(spec))
	h.fleet(mixed(fleet))
	if len(fleet) > 0 {
		h.apply(SetStepModel{Group: GroupKey{"m", "main", true}, StepModel: law})
		h.manyWait()
	}
	return h
}

// manyWait has many requests have waited for their first token, so that prompts are held.
func (h *hand) manyWait() { h.boards["m"].groups[0].recentSteps = recentSteps{1e6, 1e6, 1} }

// decode fills slots of rank 0 and of rank 1 in turn with requests that decode.
func (h *hand) decode(t testing.TB, n int) (all []*Slot) {
	require.NoError(t, h.setPolicy("prr"))
	for range n {
		s := h.put(pool.Entry{Prompt: 10}).slotNow(t)
		s.Started()
		s.Progress(1)
		all = append(all, s)
	}
	return all
}

// step tells the next one of the group.
func (h *hand) step() {
	g := h.boards["m"].groups[0]
	h.count()
	h.tellStep(g.lastStep.Number + 1)
	h.do()
}

func (h *hand) tellStep(number uint32) {
	h.steps.Group, h.steps.List = GroupKey{"m", "main", true}, append(h.steps.List[:0], Step{Number: number, Length: 20 * time.Millisecond})
	h.apply(&h.steps)
}

func (h *hand) backlog(rank int32) int64 {
	h.count()
	return h.status(h.at).Models[0].Workers[rank].Backlog
}

func TestABacklogIsWhatARankHasYetToCompute(t *testing.T) {
	h := onMixed(t, "prr", ranks(1, 8, 0))
	h.decode(t, 1)
	h.step()
	w := h.make(pool.Entry{Prompt: 2500})
	w.hits = []Hit{{Worker: 0, Tokens: 400}, {Worker: 7, Tokens: 2000}}
	h.do(func(h *hand) { h.enqueue(w) })
	first := w.slotNow(t)
	require.EqualValues(t, 2100, first.NewTokens)
	require.EqualValues(t, 2100, h.backlog(0))
	require.EqualValues(t, 2511, h.boards["m"].ranks[0].kv, "the whole prompt has its room")
	require.EqualValues(t, 11, h.boards["m"].ranks[0].decodingKV(), "and no step reads it")

	h.step()
	require.EqualValues(t, 2100-999, h.backlog(0), "a request decodes")
	require.EqualValues(t, 999, h.boards["m"].ranks[0].stepPromptTokens)
	second := h.put(pool.Entry{Prompt: 100}).slotNow(t)
	h.step()
	require.EqualValues(t, 202, h.backlog(0))
	require.Zero(t, h.boards["m"].groups[0].stepRanks[0].Prompt, "no prompt was there in the step before")
	h.step()
	require.EqualValues(t, 999, h.boards["m"].groups[0].stepRanks[0].Prompt, "what is learned of the step that took them")
	require.EqualValues(t, 0, h.backlog(0), "what one leaves of the budget is the next one's")
	require.EqualValues(t, 202, h.boards["m"].ranks[0].stepPromptTokens)

	third := h.put(pool.Entry{Prompt: 700}).slotNow(t)
	h.apply(Recount{"m", third.index, 900})
	require.EqualValues(t, 900, h.backlog(0), "it is longer than was thought")
	third.Started()
	third.Progress(1)
	require.EqualValues(t, 0, h.backlog(0), "with the first token all is computed")
	require.EqualValues(t, 4, len(h.boards["m"].ranks[0].slots))

	third.Progress(20)
	h.count()
	h.apply(Preempted{0})
	require.EqualValues(t, 920, h.backlog(0), "the last admitted one that decodes is computed again with its answer so far")
	third.Progress(21)
	require.EqualValues(t, 0, h.backlog(0))

	h.put(pool.Entry{Prompt: 60})
	fifth := h.slotsOf(0)[4]
	require.EqualValues(t, 60, h.backlog(0))
	h.release(fifth, second, first, third)
	require.EqualValues(t, 0, h.backlog(0))
	require.Empty(t, h.boards["m"].ranks[0].promptsToCompute)
	require.Zero(t, h.status(h.at).Drift)
}

// A step has computed what was left of the prompts whose first tokens it brought, whatever was
// thought before.
func TestWhatAStepHasComputedIsKnownByItsFirstTokens(t *testing.T) {
	const first = 10 // step in which a prompt of 2,500 tokens is begun, 1,000 of them in each
	for _, tt := range []struct {
		name         string
		real         int32 // tokens that it turns out to have
		thought      int   // steps for which it was thought to be computed so far
		step, joined uint32
		computed     int64
		unsure       bool
	}{
		{"the first of three", 2500, 2, first, 0, 1000, false},
		{"the second", 2500, 3, first + 1, 0, 1000, false},
		{"the last", 2500, 3, first + 2, first + 2, 500, false},
		{"the last of one that is longer", 2900, 3, first + 2, first + 2, 900, false},
		{"of one that is shorter", 2100, 3, first + 2, first + 2, 100, false},
		{"of one that was finished a step sooner", 1900, 3, first + 1, first + 1, 900, false},
		{"it brings no token", 2500, 3, first + 2, 0, 0, true},
		{"likewise, and the next one does", 2500, 3, first + 2, first + 3, 0, true},
		{"the one that does", 2500, 3, first + 3, first + 3, 500, false},
		{"one after it", 2500, 3, first + 3, first + 2, 0, false},
		{"one before the request was there", 2500, 1, first - 1, 0, 0, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b, r := &board{}, &rank{promptsToCompute: []int32{0}, backlog: 2500}
			b.slots.records = []slotRecord{{newTokens: 2500, promptLeft: 2500}}
			for i := range tt.thought {
				r.computePrompts(b, 1000, first+uint32(i))
			}
			s := &b.slots.records[0]
			s.newTokens = tt.real
			computed, sure := s.computedIn(tt.step, tt.joined)
			require.Equal(t, tt.computed, computed)
			require.Equal(t, tt.unsure, !sure)
		})
	}
	s := slotRecord{tokensBeforePreemption: 3, progress: promptProgress{inStepBefore: 700, inLastStep: 40, lastStep: first}}
	for step, want := range map[uint32]int64{first - 1: 700, first: 40, first + 1: 0} {
		computed, sure := s.computedIn(step, 2)
		require.Equal(t, want, computed, "one that is computed again is taken at its word")
		require.True(t, sure)
	}
}

func TestWhereThereIsAnIntervalOtherStepsComputeNothing(t *testing.T) {
	fleet := ranks(1, 8, 0)
	fleet[0].Interval = 3
	h := onMixed(t, "prr", fleet)
	h.decode(t, 1)
	h.step()
	h.put(pool.Entry{Prompt: 5000})
	var all []int64
	for range 7 {
		h.step()
		all = append(all, h.backlog(0))
	}
	require.Equal(t, []int64{5000, 4001, 4001, 4001, 3002, 3002, 3002}, all)
	require.Equal(t, &RoundStatus{Steps: 8, PrefillSteps: 2, MostBacklog: 3002, MeanBacklog: 3002}, h.status(h.at).Models[0].Groups[0].Rounds)
}

// SGLang's --prefill-decode-interval 2: after a step with prompts, two without any, on all ranks of
// the group.
func TestAfterAStepWithPromptsRanksRest(t *testing.T) {
	fleet := ranks(2, 8, 0)
	for i := range fleet {
		fleet[i].Interval, fleet[i].AfterPrompts = 3, true
	}
	h := onMixed(t, "prr", fleet)
	h.decode(t, 2)
	for range 4 {
		h.step()
	}
	h.put(pool.Entry{Prompt: 2500})
	var all []int64
	for i := range 8 {
		h.step()
		if i == 0 {
			h.put(pool.Entry{Prompt: 500})
		}
		all = append(all, h.backlog(0)+h.backlog(1))
	}
	require.Equal(t, []int64{1501 + 500, 2001, 2001, 502, 502, 502, 0, 0}, all, "at once, and then in every third step")
}

func TestALawWithoutAPriceOfPromptsHoldsNothing(t *testing.T) {
	h := onMixed(t, "evenkeel", ranks(2, 8, 0))
	h.apply(SetStepModel{Group: GroupKey{"m", "main", true}, StepModel: StepModel{C0Ms: 10, C1Ms: 1e-4}})
	h.decode(t, 8)
	require.NoError(t, h.setPolicy("evenkeel"))
	first := h.put(pool.Entry{Prompt: 3000}).slotNow(t)
	second := h.put(pool.Entry{Prompt: 3000}).slotNow(t)
	require.NotEqual(t, first.Worker, second.Worker, "but backlogs are level")
	require.Zero(t, second.Held)
}

func TestAMixedRankGetsNothingBeyondItsSlots(t *testing.T) {
	for _, spec := range []string{"evenkeel", "pjsq-kv", "br0", "brh"} {
		t.Run(spec, func(t *testing.T) {
			h := onMixed(t, spec, ranks(1, 3, 0))
			for range 3 {
				h.put(pool.Entry{Prompt: 10}).slotNow(t)
			}
			w := h.put(pool.Entry{Prompt: 10, Deadline: h.at.Add(time.Second)})
			require.True(t, w.waits())
			h.pass(time.Second)
			require.ErrorIs(t, w.errNow(t), ErrPoolTimeout)
		})
	}
}

// The queue in front of the pool has put them in order: a later one may be there for longer.
func TestMixedEntriesKeepTheOrderInWhichTheyCome(t *testing.T) {
	h := onMixed(t, "evenkeel", ranks(1, 1, 0))
	s := h.put(pool.Entry{Prompt: 1}).slotNow(t)
	first := h.put(pool.Entry{Prompt: 1})
	second := h.put(pool.Entry{Prompt: 1, Arrival: h.at.Add(-time.Hour)})
	h.release(s)
	require.True(t, second.waits())
	h.release(first.slotNow(t))
	second.slotNow(t)
}

func TestAPolicyThatFailsOnMixedRanksCostsNoRequest(t *testing.T) {
	bad := &fake{Spec: "bad", Decides: func(s *policy.Snapshot, _ []policy.Assignment) []policy.Assignment {
		if len(s.Pool) > 0 && s.Waits[0].Hits != nil {
			panic("hits")
		}
		return nil
	}}
	cfg := testConfig(bad)
	cfg.Policy = "bad"
	h := newHand(t, cfg)
	h.fleet(mixed(ranks(1, 2, 0)))
	w := h.make(pool.Entry{Prompt: 10})
	w.hits = []Hit{{Worker: 0, Tokens: 5}}
	h.do(func(h *hand) { h.enqueue(w) })
	require.Equal(t, FallbackSpec, w.slotNow(t).Policy)
	require.EqualValues(t, 1, h.metrics.fallbacks[FallbackPanic])
}

// An overdue prompt that fits nowhere has a rank kept for it, or smaller ones would take the room
// for ever.
func TestALongPromptIsNotPassedByForEver(t *testing.T) {
	h := onMixed(t, "evenkeel:max_age_ms=1000,watermark=0", ranks(2, 4, 1000))
	small := func() waiting { return h.put(pool.Entry{Prompt: 400}) }
	running := []*Slot{small().slotNow(t), small().slotNow(t), small().slotNow(t), small().slotNow(t)}
	long := h.put(pool.Entry{Prompt: 900})
	h.pass(time.Minute)
	for i := range 3 {
		later := small()
		h.release(running[i])
		if !long.waits() {
			long.slotNow(t)
			return
		}
		if !later.waits() {
			running = append(running, later.slotNow(t))
		}
	}
	t.Fatal("the long prompt waits though three others have left")
}

// full is a board of 32 mixed ranks whose next tick sends a round from a pool of 1,000.
func fullOfMixed(tb testing.TB) *hand {
	const ranksN, slots = 32, 32
	cfg := realConfig("prr")
	h := newHand(tb, cfg)
	h.fleet(mixed(ranks(ranksN, slots, 400_000)))
	h.apply(SetStepModel{Group: GroupKey{"m", "main", true}, StepModel: law})
	rng := rand.New(rand.NewPCG(1, 2))
	prompt := func() pool.Entry { return pool.Entry{Prompt: 100 + rng.IntN(8000)} }
	for i, w := range h.putAll(ranksN*slots, prompt) {
		if s := w.slotNow(tb); i%8 > 0 {
			s.Started()
			s.Progress(rng.IntN(300))
		}
	}
	for _, w := range h.putAll(1000, prompt) {
		for range rng.IntN(3) {
			w.hits = append(w.hits, Hit{Worker: rng.Int32N(ranksN), Tokens: rng.IntN(w.entry.Prompt)})
		}
		b := h.boards["m"]
		e := b.waiting[w.entry.ID]
		if e.Hits = w.hits; len(w.hits) > 0 {
			b.entriesWithHits++
		}
		b.waiting[w.entry.ID] = e
	}
	require.NoError(tb, h.setPolicy("evenkeel"))
	h.do()
	b := h.boards["m"]
	for i := range 64 { // room for the slots to come, without a turn
		r := b.ranks[int32(i%ranksN)]
		r.Slots++
		r.slots, r.running = append(r.slots, 0)[:len(r.slots)], append(r.running, policy.Request{})[:len(r.running)]
		r.promptsToCompute = append(r.promptsToCompute, 0)[:len(r.promptsToCompute)]
	}
	return h
}

func TestATickOfMixedRanksDoesNotTouchTheHeap(t *testing.T) {
	h := fullOfMixed(t)
	var admitted []waiting
	turn := func() {
		h.generate()
		h.at = h.at.Add(10 * time.Second) // nothing is held for so long
		admitted, _ = h.cycle(admitted)
		g := h.boards["m"].groups[0]
		h.count()
		h.tellStep(g.lastStep.Number + 1)
	}
	for range 30 {
		turn()
	}
	require.Len(t, admitted, 64)
	require.Zero(t, testing.AllocsPerRun(20, turn))
}

// BenchmarkTickMixed is a whole tick of 32 mixed ranks with 1,000 entries in the pool: half of the
// rounds are held.
func BenchmarkTickMixed(b *testing.B) {
	h := fullOfMixed(b)
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
		board.groups[0].searchBudget = searchBudget{}
		var d time.Duration
		admitted, d = h.cycle(admitted)
		if len(took) < cap(took) {
			took = append(took, float64(d.Microseconds()))
		}
	}
	slices.Sort(took)
	b.ReportMetric(took[len(took)/2], "p50-µs")
	b.ReportMetric(took[len(took)*99/100], "p99-µs")
}

// A short prompt that needs no round is placed by the same policy, which sees it as any other.
func TestAShortPromptIsPlacedOnMixedRanks(t *testing.T) {
	h := onMixed(t, "evenkeel", ranks(2, 8, 0))
	h.decode(t, 4)
	require.NoError(t, h.setPolicy("evenkeel:patience=0"))
	local := Local{Threshold: 256, InFlight: 512, Ranks: offers(90, 40)}
	s, ok := h.putLocal(pool.Entry{Prompt: 100}, local).placed()
	require.True(t, ok)
	require.EqualValues(t, 1, s.Worker, "the least of it is new there")
	require.NoError(t, h.setPolicy("evenkeel"))
	h.putLocal(pool.Entry{Prompt: 100}, local)
	require.Zero(t, h.metrics.fallbacks[FallbackPanic])
}

// How long a rank takes for the prompts that it has to compute is known once it is known what a
// prompt costs.
func TestHowLongTheFirstTokenOfAMixedRankTakes(t *testing.T) {
	for _, row := range []struct {
		name     string
		law      StepModel
		interval int
		before   int // tokens of the prompt that came first
		want     float32
	}{
		{"nothing is known", StepModel{}, 0, 0, 0},
		{"only what decodes cost", StepModel{C0Ms: 10, C1Ms: 1e-4}, 0, 0, 0},
		{"a prompt of one step", StepModel{C0Ms: 10, C1Ms: 1e-4, OwnPromptMs: 0.1}, 0, 0, 10 + 100},
		{"behind another one", StepModel{C0Ms: 10, C1Ms: 1e-4, OwnPromptMs: 0.1}, 0, 1500, 2 * (10 + 100)},
		{"in every second step", StepModel{C0Ms: 10, C1Ms: 1e-4, OwnPromptMs: 0.1}, 2, 0, 2 * (10 + 100)},
		{"where others hold it up", StepModel{C0Ms: 10, C1Ms: 1e-4, OwnPromptMs: 0.1, SharedPromptMs: 0.2, PrefillMs: 5}, 0, 0, 10 + 5 + 300},
	} {
		t.Run(row.name, func(t *testing.T) {
			cfg := testConfig()
			cfg.StepModel = row.law
			h := newHand(t, cfg)
			ws := ranks(1, 4, 0)
			mixed(ws)
			ws[0].Budget, ws[0].Interval = 1000, row.interval
			h.fleet(ws)
			if row.before > 0 {
				h.put(pool.Entry{Prompt: row.before}).slotNow(t)
			}
			require.InDelta(t, row.want, h.put(pool.Entry{Prompt: 500}).slotNow(t).ComputeMs, 0.5)
		})
	}
}
