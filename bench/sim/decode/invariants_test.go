package decode

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/virtual"
	"evenkeel/internal/race"
)

// forms are all policies, and brh with more of its settings.
func forms() []string {
	return append(policy.Names(), "brh:predictor=oracle", "brh:predictor=exact,horizon=5", "brh:predictor=none",
		"brh:decrement_anchor=true,every=3")
}

func drawFleet(t *rapid.T) Fleet {
	f := Fleet{Stale: rapid.IntRange(0, 3).Draw(t, "stale"), Transfer: rapid.IntRange(0, 3).Draw(t, "transfer")}
	moment := func(what string) Moment {
		if rapid.Bool().Draw(t, what+" by step") {
			return Moment{Step: rapid.Int64Range(1, 40).Draw(t, what)}
		}
		return Moment{Ms: rapid.Float64Range(1, 3000).Draw(t, what)}
	}
	for range rapid.IntRange(1, 2).Draw(t, "groups") {
		g := Group{Name: "g", C0Ms: rapid.Float64Range(5, 60).Draw(t, "c0"), C1Ms: rapid.Float64Range(0, 0.1).Draw(t, "c1")}
		for k := range rapid.IntRange(1, 4).Draw(t, "ranks") {
			r := Rank{Slots: rapid.IntRange(1, 4).Draw(t, "slots"), Cost: rapid.SampledFrom([]float64{1, 1, 0.5, 2}).Draw(t, "cost")}
			if rapid.Bool().Draw(t, "limited") {
				r.Capacity = rapid.Int64Range(700, 3000).Draw(t, "capacity")
			}
			if rapid.IntRange(0, 3).Draw(t, "keeps answers") == 0 {
				r.Keeps = time.Duration(rapid.IntRange(1, 3000).Draw(t, "keeps")) * time.Millisecond
			}
			if k > 0 && rapid.IntRange(0, 3).Draw(t, "comes") == 0 {
				r.Join = moment("join")
			}
			if k > 0 && rapid.IntRange(0, 3).Draw(t, "goes") == 0 {
				r.Leave, r.Fails = moment("leave"), rapid.Bool().Draw(t, "fails")
			}
			g.Ranks = append(g.Ranks, r)
		}
		f.Groups = append(f.Groups, g)
	}
	return f
}

func drawWorkload(t *rapid.T, load Load, f *Fleet) *workload {
	w := &workload{}
	one := func(int) arrival {
		return arrival{
			at:     rapid.Float64Range(0, 5000).Draw(t, "at"),
			prompt: rapid.Int32Range(1, 600).Draw(t, "prompt"), output: rapid.Int32Range(1, 30).Draw(t, "output"),
			key: rapid.Uint64Range(0, 3).Draw(t, "key"),
		}
	}
	for i := range rapid.SampledFrom([]int{0, 10, 70}).Draw(t, "history") {
		w.history = append(w.history, arrival{prompt: int32(i + 1), output: int32(1 + i%25), key: uint64(i % 4)})
	}
	for i := range rapid.IntRange(1, 40).Draw(t, "jobs") {
		w.jobs = append(w.jobs, one(i))
		if i > 0 {
			w.jobs[i].at = max(w.jobs[i].at, w.jobs[i-1].at)
		}
	}
	if load.Rho > 0 {
		w.pace(load.Rho, f)
	}
	return w
}

// drawBind draws when ranks are bound, and what prefills take.
func drawBind(t *rapid.T, load *Load) {
	if rapid.Bool().Draw(t, "prefill") {
		load.Prefill = &Prefill{
			Ms: rapid.Float64Range(0, 500).Draw(t, "prefill ms"), PerTokenMs: rapid.Float64Range(0, 1).Draw(t, "prefill ms per token"),
			Engines: rapid.IntRange(0, 4).Draw(t, "prefillers"),
		}
	}
	if load.AtArrival = rapid.Bool().Draw(t, "at arrival"); load.AtArrival {
		load.Ahead = rapid.SampledFrom([]int{0, 0, 2, board.AheadAuto}).Draw(t, "ahead")
	}
}

func TestNothingIsLostWhateverHappens(t *testing.T) {
	race.Alone(t)
	for _, spec := range forms() {
		t.Run(spec, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				f := drawFleet(t)
				require.NoError(t, f.Validate())
				load := Load{Pool: rapid.IntRange(0, 8).Draw(t, "pool")}
				if rapid.Bool().Draw(t, "open") {
					load = Load{Rho: rapid.Float64Range(0.2, 1.5).Draw(t, "rho")}
				}
				drawBind(t, &load)
				w := drawWorkload(t, load, &f)
				r, err := newRun(&f, load, w, by(spec))
				require.NoError(t, err)
				r.meter.warm, r.meter.over, r.meter.measuring = 0, true, true // all of it is measured
				checkWaits := watchWaits(t, r)
				for turns, over := 0, false; !over; turns++ {
					require.Less(t, turns, 200_000, "no end")
					before := r.Now
					over, err = r.instant()
					require.NoError(t, err)
					require.GreaterOrEqual(t, r.Now, before)
					checkRun(t, r, before)
					checkWaits()
				}
				checkEnd(t, r, w)
			})
		})
	}
}

// checkRun: what must hold after any turn, here the one at the time last. It runs millions of
// times, so it compares without the help of testify.
func checkRun(t *rapid.T, r *run, last float64) {
	placed, slots, seen := 0, map[int32]bool{}, map[int32]int64{}
	must := func(ok bool, what string, args ...any) {
		if !ok {
			t.Fatalf(what, args...)
		}
	}
	kept := keptByTheBoards(r)
	for _, g := range r.groups {
		for _, w := range g.Ranks {
			must(w.Active <= w.Slots || w.MaxRunning > 0, "%d requests in %d slots", w.Active, w.Slots)
			_, running := w.Load(w.Group.Step)
			must(running <= max(w.Slots, w.MaxRunning), "%d run where %d may", running, max(w.Slots, w.MaxRunning))
			must(r.immediate() || r.load.Ahead != 0 || len(w.Requests) <= w.Slots, "%d requests bound for %d slots", len(w.Requests), w.Slots)
			kv, pulled := int64(0), 0
			for i, l := range w.Requests {
				q := &r.jobs[l.Job]
				must(q.state == jobPlaced && l.Prompt == q.prompt, "request %d of %d tokens is in state %d with %d", l.Job, q.prompt, q.state, l.Prompt)
				must(r.Counts.Tokens[l.Slot] == max(0, l.Gen-int32(r.fleet.Stale)), "%d tokens generated, told %d", l.Gen, r.Counts.Tokens[l.Slot])
				must(q.output == q.age+l.Gen+l.Left && l.Left > 0, "%d of %d tokens, %d left", q.age+l.Gen, q.output, l.Left)
				must(!slots[l.Slot], "slot %d twice", l.Slot)
				slots[l.Slot] = true
				seen[w.ID] += int64(l.Prompt) + int64(r.Counts.Tokens[l.Slot])
				must(l.Reserved || i >= w.Active, "no slot without KV")
				if l.Reserved {
					pulled++
					kv += int64(q.prompt) + int64(l.Gen)
				}
				placed++
			}
			must(kv == w.KV, "%d KV tokens charged for %d", w.KV, kv)
			must(w.Capacity == 0 || kv+w.EndedKV.Tokens() <= w.Capacity || pulled <= 1, "%d KV tokens, and %d kept, on a rank for %d", kv,
				w.EndedKV.Tokens(), w.Capacity)
			w.EndedKV.Expire(r.Instant(last)) // as the engine itself will do before it next looks for room
			must(kept[w.ID] == w.EndedKV.Tokens(), "the board believes that %d KV tokens are kept, and %d are", kept[w.ID], w.EndedKV.Tokens())
		}
	}
	r.Count(r.Now)
	loads := r.Boards.Loads()
	for _, l := range loads.Ranks {
		must(l.KVTokens == seen[l.Worker], "the board holds %d KV tokens on rank %d, requests that are told have %d", l.KVTokens, l.Worker,
			seen[l.Worker])
	}
	must(loads.Pool == r.waits, "%d wait on the board, %d here", loads.Pool, r.waits)
	must(r.inside == placed+r.waits+len(r.back)+len(r.line), "%d inside, of whom %d+%d+%d+%d are somewhere", r.inside, placed, r.waits,
		len(r.back), len(r.line))
}

// keptByTheBoards has the KV tokens that each rank keeps of ended answers, as the boards believe.
func keptByTheBoards(r *run) map[int32]int64 {
	if !slices.ContainsFunc(r.workers, func(w *worker) bool { return w.KeepsKVFor > 0 }) { // spares most runs the status
		return nil
	}
	kept := map[int32]int64{}
	r.Count(r.Now)
	for _, m := range r.Boards.Status(r.Instant(r.Now)).Models {
		for _, w := range m.Workers {
			kept[w.ID] = w.Kept
		}
	}
	return kept
}

// watchWaits: a pooled policy sends into free slots and room only, so that a request decodes or is
// pulled as soon as it comes. The board hears of tokens f.Stale steps late, and a rank may have
// less room by those that it has not heard of. They fit into what the watermark leaves empty. But
// that is a share of the room that a rank has for requests, and nearly nothing where answers that
// are kept have most of
// it: only there, and only for want of so few tokens, a request waits in the engine, until a step begins for which the engine has room.
func watchWaits(t *rapid.T, r *run) (check func()) {
	if r.immediate() || r.load.AtArrival {
		return func() {}
	}
	lacks := func(w *virtual.Rank, l *virtual.Request) int64 {
		return w.KV + w.EndedKV.Tokens() + int64(l.Prompt) - w.Capacity
	}
	bound, preempted := r.OnBind, r.Preempted
	r.OnBind = func(e *board.Effect) {
		bound(e)
		w, unheard := r.workers[e.Bound.Worker].Rank, int64(0)
		if len(w.Requests) == w.Active {
			return
		}
		last := &w.Requests[len(w.Requests)-1]
		for _, l := range w.Requests {
			unheard += int64(l.Gen - r.Counts.Tokens[l.Slot])
		}
		if w.Active == w.Slots || w.EndedKV.Tokens() == 0 || lacks(w, last) > unheard {
			t.Fatalf("request %d came to a rank with %d of %d slots in use that lacks %d tokens of room; the board has not heard of %d, and %d are "+
				"kept",
				last.Job, w.Active, w.Slots, lacks(w, last), unheard, w.EndedKV.Tokens())
		}
	}
	freed := map[*virtual.Rank]int64{} // the step before which a rank preempted what it had no room for, after it had looked at what waits
	r.Preempted = func(w *virtual.Rank, l virtual.Request) {
		freed[w] = w.Group.Step
		preempted(w, l)
	}
	return func() {
		for _, g := range r.groups {
			for _, w := range g.Ranks {
				if len(w.Requests) == w.Active {
					continue
				}
				step, ok := freed[w]
				if first := &w.Requests[w.Active]; lacks(w, first) <= 0 && !(ok && step == g.Step) {
					t.Fatalf("request %d waits on a rank that has room for it", first.Job)
				}
			}
		}
	}
}

// immediate says whether the policy sends everything on at once.
func (r *run) immediate() bool {
	p, err := policy.Parse(r.Boards.Policy())
	return err == nil && p.Immediate()
}

// checkEnd: every request came to an end and every token was counted once.
func checkEnd(t *rapid.T, r *run, w *workload) {
	tokens, done, failed := 0.0, 0, 0
	for i := range r.jobs {
		q := &r.jobs[i]
		switch q.state {
		case jobDone:
			done++
			tokens += float64(q.output)
			require.Greater(t, q.first, q.arrival)
		case jobFailed:
			failed++
			tokens += float64(q.age)
		default:
			require.Fail(t, "request left", "%d is in state %d", i, q.state)
		}
		require.Equal(t, w.jobs[i].prompt+q.age, q.prompt)
	}
	require.Equal(t, done, r.meter.done)
	require.Equal(t, failed, r.meter.failed)
	require.Equal(t, tokens, r.meter.tokens)
	require.Zero(t, r.waits)
	require.Zero(t, r.inside)
}
