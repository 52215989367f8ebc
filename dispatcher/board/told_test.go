package board

import (
	"cmp"
	"fmt"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/pool"
	"evenkeel/predictor"
)

// owner owns boards and only writes down what they want done.
type owner struct {
	*Boards
	entries map[uint64]*pool.Entry // that wait
	slots   map[uint64]int32       // of requests that run, by entry
	counts  Counts
	wrote   []string
}

func newOwner(t tb, cfg Config) *owner {
	b, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &owner{Boards: b, entries: map[uint64]*pool.Entry{}, slots: map[uint64]int32{}, counts: Counts{Model: "m"}}
}

// tell applies an event with the counts, each round that follows having taken so long.
func (w *owner) tell(e Event, now time.Time, took time.Duration) {
	w.write(w.Apply(&w.counts, now))
	w.write(w.Apply(e, now))
	for w.Deciding() {
		w.write(w.Apply(Decide{}, now))
		w.write(w.Apply(&Decided{took, took}, now))
	}
}

// ask asks for all that there is to ask.
func (w *owner) ask(now time.Time) {
	w.Status(now)
	w.Loads()
	w.Next()
	w.NeedsCounts("m", now)
	_ = w.CheckSettings(Settings{Policy: "jsq"})
}

// write notes the effects, and keeps what a caller would know.
func (w *owner) write(effects []Effect) {
	for _, e := range effects {
		line := fmt.Sprint(e.Kind, e.Group, e.Policy, e.Label, e.Err, e.ID, e.Worker, e.Names, e.Bound, e.Pair, e.Count, e.Duration,
			e.Pace, e.Predictor, e.Sample)
		switch e.Kind {
		case EffectBind:
			line += fmt.Sprint(e.Entry.ID)
			w.slots[e.Entry.ID] = e.Bound.Slot
			for int(e.Bound.Slot) >= len(w.counts.Tokens) {
				w.counts.Tokens, w.counts.Started = append(w.counts.Tokens, 0), append(w.counts.Started, false)
				w.counts.FirstStep = append(w.counts.FirstStep, 0)
				w.counts.MaxUnreported = append(w.counts.MaxUnreported, 0)
			}
			w.counts.Tokens[e.Bound.Slot], w.counts.Started[e.Bound.Slot], w.counts.FirstStep[e.Bound.Slot] = 0, false, 0
			w.counts.MaxUnreported[e.Bound.Slot] = 0
			delete(w.entries, e.Entry.ID)
		case EffectRefuse:
			line += fmt.Sprint(e.Entry.ID)
			delete(w.entries, e.Entry.ID)
		case EffectRound:
			r := e.Round
			line += fmt.Sprint(r.Tick, r.At, r.Group, r.Snapshot.Workers, r.Snapshot.Pool, r.Snapshot.MaxAgeMs, r.Snapshot.StepMs, r.Snapshot.Budget,
				r.Assign)
		}
		w.wrote = append(w.wrote, line)
	}
}

// Boards that are told the same stay the same, also if one is asked between any two events.
func TestBoardsThatAreToldTheSameStayTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := realConfig(rapid.SampledFrom([]string{"evenkeel", "brh", "br0", "pjsq", "rr", "p2c", "prandom", "br0:bypass"}).Draw(t, "policy"))
		cfg.Predictor.Kind, cfg.Window, cfg.TTL = predictor.KindSurvival, 3*time.Millisecond, time.Minute
		cfg.TickLimit = 20 * time.Millisecond
		both := []*owner{newOwner(t, cfg), newOwner(t, cfg)}
		now, ids, steps := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), uint64(0), uint32(1)
		fleet := ranks(4, 3, 4000)
		if rapid.Bool().Draw(t, "early") {
			early(fleet)
			cfg.BindAhead = rapid.IntRange(AheadAuto, 2).Draw(t, "ahead")
			both = []*owner{newOwner(t, cfg), newOwner(t, cfg)}
		} else if rapid.Bool().Draw(t, "mixed") {
			mixed(fleet)
			cfg.StepModel = StepModel{C0Ms: 10, C1Ms: 1e-4, OwnPromptMs: 0.1, RequestMs: 0.05}
			both = []*owner{newOwner(t, cfg), newOwner(t, cfg)}
		}
		all := func(event func(w *owner) Event, took time.Duration) {
			for i, w := range both {
				if e := event(w); e != nil {
					w.tell(e, now, took)
				}
				if i == 1 {
					w.ask(now)
				}
			}
		}
		one := func() (id uint64, ok bool) {
			ids := slices.Sorted(maps.Keys(both[0].slots))
			if len(ids) == 0 {
				return 0, false
			}
			return rapid.SampledFrom(ids).Draw(t, "which"), true
		}
		t.Repeat(map[string]func(*rapid.T){
			"enqueue": func(t *rapid.T) {
				ids++
				e := pool.Entry{
					ID: ids, Model: "m", Prompt: rapid.IntRange(1, 3000).Draw(t, "prompt"), Discard: rapid.IntRange(0, 9).Draw(t, "drain") == 0,
					Prefiller: rapid.SampledFrom([]string{"", "p0", "p1"}).Draw(t, "prefiller"), Entered: now, Response: rapid.Bool().Draw(t, "response"),
					Name: rapid.SampledFrom([]string{"", "base", "x"}).Draw(t, "name"),
				}
				e.Early = fleet[0].Early && rapid.Bool().Draw(t, "early")
				e.Aggregated = fleet[0].Mixed
				e.Express = rapid.IntRange(0, 5).Draw(t, "express") == 0
				var hits []Hit
				for i := range rapid.Int32Range(0, 3).Draw(t, "hits") {
					hits = append(hits, Hit{Worker: i, Tokens: rapid.IntRange(1, 3000).Draw(t, "hit")})
				}
				if rapid.Bool().Draw(t, "deadline") {
					e.Deadline = now.Add(time.Duration(rapid.IntRange(1, 3000).Draw(t, "within")) * time.Millisecond)
				}
				if rapid.IntRange(0, 4).Draw(t, "avoids") == 0 {
					e.Avoid, e.Last = []int32{rapid.Int32Range(0, 3).Draw(t, "rank")}, []int32{rapid.Int32Range(0, 3).Draw(t, "last")}
				}
				var local *Local
				if !e.Aggregated && rapid.IntRange(0, 5).Draw(t, "local") == 0 {
					local = &Local{Ranks: []LocalRank{{0, 100}, {2, 50}, {3, 50}}, Threshold: 200, InFlight: 300}
				}
				all(func(w *owner) Event {
					own := e
					w.entries[own.ID] = &own
					return Enqueue{Entry: &own, Local: local, Hits: hits}
				}, 0)
			},
			"unheard": func(*rapid.T) {
				if id, ok := one(); ok {
					for _, w := range both {
						w.counts.MaxUnreported[w.slots[id]] = 1000
					}
				}
			},
			"tokens": func(t *rapid.T) {
				if id, ok := one(); ok {
					n := rapid.Int32Range(1, 50).Draw(t, "tokens")
					for _, w := range both {
						w.counts.Tokens[w.slots[id]] += n
						w.counts.Started[w.slots[id]] = true
						w.counts.FirstStep[w.slots[id]] = cmp.Or(w.counts.FirstStep[w.slots[id]], steps)
					}
				}
			},
			"release": func(t *rapid.T) {
				if id, ok := one(); ok {
					o := Outcome{Kind: rapid.SampledFrom([]Kind{Finished, Cancelled, Failed}).Draw(t, "kind"), Lost: rapid.Bool().Draw(t, "lost"),
						Refused: rapid.Bool().Draw(t, "refused"), Orphaned: rapid.Bool().Draw(t, "orphaned"), Kept: rapid.Bool().Draw(t, "kept")}
					all(func(w *owner) Event {
						slot := w.slots[id]
						delete(w.slots, id)
						o.Generated = int(w.counts.Tokens[slot])
						return &Release{
							Model: "m", Slot: slot, Outcome: o, Generated: w.counts.Tokens[slot], Started: w.counts.Started[slot],
							FirstStep: w.counts.FirstStep[slot], LastStep: steps, MaxUnreported: w.counts.maxUnreported(slot),
						}
					}, 0)
				}
			},
			"reached": func(t *rapid.T) {
				if id, ok := one(); ok {
					all(func(w *owner) Event {
						w.counts.Started[w.slots[id]] = true
						return FirstEvent{"m", w.slots[id]}
					}, 0)
				}
			},
			"recount": func(t *rapid.T) {
				if id, ok := one(); ok {
					prompt := rapid.IntRange(1, 3000).Draw(t, "prompt")
					all(func(w *owner) Event { return Recount{"m", w.slots[id], prompt} }, 0)
				}
			},
			"withdraw": func(t *rapid.T) {
				id := rapid.Uint64Range(0, ids).Draw(t, "entry")
				all(func(w *owner) Event {
					if e := w.entries[id]; e != nil {
						return Withdraw{e}
					}
					return nil
				}, 0)
			},
			"fleet": func(t *rapid.T) {
				ws := append([]Worker(nil), fleet[:rapid.IntRange(0, 4).Draw(t, "ranks")]...)
				for i := range ws {
					ws[i].Slots, ws[i].Up = rapid.IntRange(1, 4).Draw(t, "slots"), rapid.IntRange(0, 5).Draw(t, "up") > 0
					ws[i].Down = !ws[i].Up && rapid.Bool().Draw(t, "down")
					ws[i].Engine = fmt.Sprint("d", i/2)
					ws[i].Unpinned = rapid.Bool().Draw(t, "strays")
					ws[i].Lists = rapid.SampledFrom([]*Names{baseOnly, withX}).Draw(t, "lists")
					ws[i].KeepsKVFor = rapid.SampledFrom([]time.Duration{0, time.Second}).Draw(t, "keeps")
					ws[i].Process = rapid.Uint64Range(0, 2).Draw(t, "process")
				}
				all(func(*owner) Event { return SetWorkers{ws} }, 0)
			},
			"step": func(t *rapid.T) {
				steps++
				told := []Step{{Number: steps, Length: time.Duration(rapid.IntRange(5, 60).Draw(t, "ms")) * time.Millisecond}}
				all(func(*owner) Event { return &Steps{GroupKey{"m", "main", true}, told} }, 0)
			},
			"outputs": func(t *rapid.T) {
				var l Learner
				key := PredictorKey{"m", predictor.KindSurvival}
				require.NoError(t, l.Follow(key, nil))
				for range 60 {
					l.Learn(&OutputSample{Model: "m", Finished: true, Prompt: 10, Output: rapid.Int32Range(1, 200).Draw(t, "output")})
				}
				built, _ := l.Rebuild(now)
				all(func(w *owner) Event {
					if w.predictors[key] != nil {
						return built[0]
					}
					return nil
				}, 0)
			},
			"policy": func(t *rapid.T) {
				spec := rapid.SampledFrom([]string{"evenkeel", "br0", "no such policy"}).Draw(t, "spec")
				all(func(*owner) Event { return SetPolicy{spec} }, 0)
			},
			"arrives": func(t *rapid.T) {
				if id, ok := one(); ok {
					all(func(w *owner) Event { return FirstEvent{"m", w.slots[id]} }, 0)
				}
			},
			"preempted": func(t *rapid.T) {
				rank := rapid.Int32Range(0, 3).Draw(t, "rank")
				all(func(*owner) Event { return Preempted{rank} }, 0)
			},
			"gauged": func(t *rapid.T) {
				g := Gauged{rapid.Int32Range(0, 3).Draw(t, "rank"), rapid.Int64Range(0, 4000).Draw(t, "in use"), now}
				all(func(*owner) Event { return g }, 0)
			},
			"tick": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 400).Draw(t, "ms")) * time.Millisecond)
				took := time.Duration(rapid.SampledFrom([]int{0, 0, 2, 30}).Draw(t, "took")) * time.Millisecond
				all(func(*owner) Event { return &Tick{"m"} }, took)
			},
			"": func(t *rapid.T) {
				require.Equal(t, strings.Join(both[1].wrote, "\n"), strings.Join(both[0].wrote, "\n"))
				for _, w := range both {
					w.wrote = w.wrote[:0]
					backlogsAreSums(t, w.boards["m"])
				}
				require.Equal(t, both[1].Status(now), both[0].Status(now))
				require.Equal(t, both[1].Next(), both[0].Next())
			},
		})
	})
}

// backlogsAreSums: the backlog of a mixed rank is what is left of its requests that no step has
// read yet.
func backlogsAreSums(t *rapid.T, b *board) {
	if b == nil {
		return
	}
	for _, r := range b.ranks {
		sum, notDecoding := int64(0), 0
		for _, slot := range r.slots {
			s := &b.slots.records[slot]
			if sum += int64(s.promptLeft); s.notDecoding {
				notDecoding++
				require.Equal(t, r.Mixed, slices.Contains(r.promptsToCompute, slot))
			}
		}
		require.Equal(t, sum, r.backlog)
		require.Equal(t, notDecoding, r.notDecodingSlots)
		if r.Mixed {
			require.Len(t, r.promptsToCompute, notDecoding)
		}
	}
}

// The boards have no clock, log, metric, lock or goroutine: only then can a simulator drive them.
func TestTheBoardsArePure(t *testing.T) {
	files, err := os.ReadDir(".")
	require.NoError(t, err)
	for _, f := range files {
		if name := f.Name(); strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") {
			text, err := os.ReadFile(name)
			require.NoError(t, err)
			file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.ImportsOnly)
			require.NoError(t, err)
			for _, i := range file.Imports {
				pure := []string{
					// debug: the stack of a policy that panicked
					"cmp", "errors", "fmt", "iter", "maps", "math", "runtime/debug", "slices", "strconv", "time",
					"evenkeel/dispatcher/delivery", "evenkeel/dispatcher/forecast", "evenkeel/dispatcher/kept",
					"evenkeel/dispatcher/policy", "evenkeel/dispatcher/step",
					"evenkeel/pool", "evenkeel/predictor", "evenkeel/engine/circuit",
				}
				require.Contains(t, pure, strings.Trim(i.Path.Value, `"`), name)
			}
			for _, impure := range []string{"time.Now", "time.Since", "time.Until", "time.After", "time.Sleep", "time.NewT", "go func", "chan ",
				"select {"} {
				require.NotContains(t, string(text), impure, name)
			}
		}
	}
}
