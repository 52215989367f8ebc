package dispatcher

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

// twin drives boards without a runner: it has no clock, and what the boards want done it
// only writes down.
type twin struct {
	*loop
	entries map[uint64]*pool.Entry // that wait
	slots   map[uint64]int32       // of requests that run, by entry
	counts  counts
	wrote   []string
}

func newTwin(t tb, cfg Config) *twin {
	l, err := newLoop(cfg.withDefaults())
	if err != nil {
		t.Fatal(err)
	}
	w := &twin{loop: l, entries: map[uint64]*pool.Entry{}, slots: map[uint64]int32{}}
	w.write()
	return w
}

func (w *twin) copied() *twin {
	c := &twin{loop: w.clone(), entries: map[uint64]*pool.Entry{}, slots: maps.Clone(w.slots), wrote: slices.Clone(w.wrote)}
	for _, b := range c.inOrder {
		for _, e := range b.pool.Entries() {
			c.entries[e.ID] = e
		}
	}
	c.counts = counts{slices.Clone(w.counts.tokens), slices.Clone(w.counts.began), slices.Clone(w.counts.joined)}
	return c
}

// settle has the boards decide, each round having taken so long.
func (w *twin) settle(took time.Duration) {
	for _, b := range w.inOrder {
		for b.deciding() {
			b.decide(w.now)
			w.write()
			b.decided(took, w.now)
		}
		b.counts = nil
	}
	w.write()
}

func (w *twin) turn(now time.Time, took time.Duration) {
	w.now = now
	for _, b := range w.inOrder {
		b.counts = &w.counts
		b.turn(now)
	}
	w.settle(took)
}

// write notes the effects, and keeps what a caller would know.
func (w *twin) write() {
	for _, e := range w.effects {
		line := fmt.Sprint(e.kind, e.policy, e.label, e.err, e.entry, e.worker, e.names, e.slot, e.pair, e.count, e.lasts, e.subject, e.ending)
		if e.group != nil {
			line += e.group.name
		}
		switch e.kind {
		case effectBind:
			how := e.bound
			line += fmt.Sprint(e.waits.ID, how.Slot, how.Rank.ID, how.Policy, how.Stage, how.Score, how.Wait, how.Beyond, how.New)
			w.slots[e.waits.ID] = how.Slot
			for int(how.Slot) >= len(w.counts.tokens) {
				w.counts.tokens, w.counts.began, w.counts.joined = append(w.counts.tokens, 0), append(w.counts.began, false), append(w.counts.joined, 0)
			}
			w.counts.tokens[how.Slot], w.counts.began[how.Slot], w.counts.joined[how.Slot] = 0, false, 0
			delete(w.entries, e.waits.ID)
		case effectRefuse:
			line += fmt.Sprint(e.waits.ID)
			delete(w.entries, e.waits.ID)
		case effectRound:
			line += fmt.Sprint(e.round.tick, e.round.snapshot.Workers, e.round.snapshot.Pool, e.round.snapshot.MaxAgeMs, e.round.snapshot.StepMs, e.round.snapshot.Budget, e.round.assign)
		case effectPace:
			line += fmt.Sprint(e.board.pace)
		}
		w.wrote = append(w.wrote, line)
	}
	clear(w.effects)
	w.effects = w.effects[:0]
}

// Two boards that are told the same stay the same, also after one was copied in the middle,
// and the copy shares nothing with its original: that goes on with other events.
func TestACopyOfTheBoardsGoesOnAsTheOriginalWould(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := realConfig(rapid.SampledFrom([]string{"evenkeel", "brh", "br0", "pjsq", "rr", "p2c", "prandom", "br0:bypass"}).Draw(t, "policy"))
		cfg.Predictor.Kind, cfg.Window, cfg.TTL = predictor.KindSurvival, 3*time.Millisecond, time.Minute
		cfg.TickLimit = 20 * time.Millisecond
		both := []*twin{newTwin(t, cfg), newTwin(t, cfg)}
		now, ids, steps := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), uint64(0), uint32(1)
		fleet := ranks(4, 3, 4000)
		all := func(event func(w *twin)) {
			for _, w := range both {
				w.now = now
				event(w)
				w.settle(0)
			}
		}
		one := func(from func(w *twin) map[uint64]int32) (id uint64, ok bool) {
			ids := sortedKeys(from(both[0]))
			if len(ids) == 0 {
				return 0, false
			}
			return rapid.SampledFrom(ids).Draw(t, "which"), true
		}
		running := func(w *twin) map[uint64]int32 { return w.slots }
		t.Repeat(map[string]func(*rapid.T){
			"enqueue": func(t *rapid.T) {
				ids++
				e := pool.Entry{
					ID: ids, Model: "m", Prompt: rapid.IntRange(1, 3000).Draw(t, "prompt"), Drain: rapid.IntRange(0, 9).Draw(t, "drain") == 0,
					Prefiller: rapid.SampledFrom([]string{"", "p0", "p1"}).Draw(t, "prefiller"), Entered: now,
				}
				if rapid.Bool().Draw(t, "deadline") {
					e.Deadline = now.Add(time.Duration(rapid.IntRange(1, 3000).Draw(t, "within")) * time.Millisecond)
				}
				if rapid.IntRange(0, 4).Draw(t, "avoids") == 0 {
					e.Avoid = []int32{rapid.Int32Range(0, 3).Draw(t, "rank")}
				}
				var local *Local
				if rapid.IntRange(0, 5).Draw(t, "local") == 0 {
					local = &Local{Ranks: []LocalRank{{0, 100}, {2, 50}, {3, 50}}, Threshold: 200, InFlight: 300}
				}
				all(func(w *twin) {
					own := e
					w.entries[own.ID] = &own
					if local != nil && w.boards["m"] != nil {
						w.boards["m"].counts = &w.counts
					}
					w.enqueue(entrant{entry: &own, local: local})
				})
			},
			"tokens": func(t *rapid.T) {
				if id, ok := one(running); ok {
					n := rapid.Int32Range(1, 50).Draw(t, "tokens")
					for _, w := range both {
						w.counts.tokens[w.slots[id]] += n
						w.counts.began[w.slots[id]] = true
						w.counts.joined[w.slots[id]] = cmp.Or(w.counts.joined[w.slots[id]], steps)
					}
				}
			},
			"release": func(t *rapid.T) {
				if id, ok := one(running); ok {
					o := Outcome{Kind: rapid.SampledFrom([]Kind{Finished, Cancelled, Failed}).Draw(t, "kind"), Lost: rapid.Bool().Draw(t, "lost")}
					all(func(w *twin) {
						slot, b := w.slots[id], w.boards["m"]
						o.Generated = int(w.counts.tokens[slot])
						b.counts = &w.counts
						b.depart(slot, w.counts.tokens[slot], w.counts.joined[slot], steps)
						b.release(slot, o, w.counts.tokens[slot], w.counts.began[slot], now)
						delete(w.slots, id)
					})
				}
			},
			"withdraw": func(t *rapid.T) {
				id := rapid.Uint64Range(0, ids).Draw(t, "entry")
				all(func(w *twin) {
					if e := w.entries[id]; e != nil {
						w.withdraw(e)
					}
				})
			},
			"fleet": func(t *rapid.T) {
				ws := append([]Worker(nil), fleet[:rapid.IntRange(0, 4).Draw(t, "ranks")]...)
				for i := range ws {
					ws[i].Slots, ws[i].Up = rapid.IntRange(1, 4).Draw(t, "slots"), rapid.IntRange(0, 5).Draw(t, "up") > 0
					ws[i].Down = !ws[i].Up && rapid.Bool().Draw(t, "down")
					ws[i].Beyond, ws[i].Engine = rapid.IntRange(0, 2).Draw(t, "beyond"), fmt.Sprint("d", i/2)
				}
				all(func(w *twin) {
					for _, b := range w.inOrder {
						b.counts = &w.counts
					}
					w.setWorkers(ws)
				})
			},
			"step": func(t *rapid.T) {
				steps++
				told := []step{{number: steps, length: time.Duration(rapid.IntRange(5, 60).Draw(t, "ms")) * time.Millisecond}}
				all(func(w *twin) {
					if b := w.boards["m"]; b != nil && len(b.groups) > 0 {
						b.counts = &w.counts
						b.hear(b.groups[0], told)
					}
				})
			},
			"outputs": func(t *rapid.T) {
				o, err := predictor.NewOnline(predictor.OnlineConfig{Kind: predictor.KindSurvival})
				require.NoError(t, err)
				for range 60 {
					o.Finished(10, rapid.Int32Range(1, 200).Draw(t, "output"), 0)
				}
				p, survival, _ := o.Rebuild(now)
				all(func(w *twin) {
					if key := (subjectKey{"m", predictor.KindSurvival}); w.subjects[key] != nil {
						w.learned(key, &tables{predictor: p, survival: survival})
					}
				})
			},
			"arrives": func(t *rapid.T) {
				key := pair{rapid.SampledFrom([]string{"p0", "p1"}).Draw(t, "from"), rapid.SampledFrom([]string{"d0", "d1"}).Draw(t, "to")}
				all(func(w *twin) {
					if b := w.boards["m"]; b != nil {
						b.reached(key, now)
					}
				})
			},
			"preempted": func(t *rapid.T) {
				rank := rapid.Int32Range(0, 3).Draw(t, "rank")
				all(func(w *twin) { w.preempted(rank) })
			},
			"turn": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 400).Draw(t, "ms")) * time.Millisecond)
				took := time.Duration(rapid.SampledFrom([]int{0, 0, 2, 30}).Draw(t, "took")) * time.Millisecond
				for _, w := range both {
					w.turn(now, took)
				}
			},
			"copy": func(t *rapid.T) {
				original := both[0]
				both[0] = original.copied()
				ids := uint64(1 << 40) // the original goes on with something else
				original.setWorkers(ranks(3, 9, 0))
				for range 5 {
					ids++
					original.enqueue(entrant{entry: &pool.Entry{ID: ids, Model: "m", Prompt: 7, Entered: now}})
				}
				original.turn(now.Add(time.Second), 0)
				original.answerAll(ErrDraining)
			},
			"": func(t *rapid.T) {
				require.Equal(t, strings.Join(both[1].wrote, "\n"), strings.Join(both[0].wrote, "\n"))
				for _, w := range both {
					w.wrote = w.wrote[:0]
				}
				x, y := both[0].status(now), both[1].status(now)
				for _, s := range []*Status{&x, &y} {
					for i := range s.Models {
						s.Models[i].Predictors = nil // the scores are not copied
					}
				}
				require.Equal(t, y, x)
				require.Equal(t, both[1].next(), both[0].next())
			},
		})
	})
}

func sortedKeys(m map[uint64]int32) []uint64 {
	return slices.Sorted(maps.Keys(m))
}

// The boards have no clock, log, metric, lock or goroutine: only then can a simulator drive
// them, and only then can they be copied. These files hold what owns them instead.
func TestTheBoardsArePure(t *testing.T) {
	owners := map[string]bool{
		"dispatcher.go": true, "run.go": true, "room.go": true, "inbox.go": true, "slot.go": true, "pulse.go": true,
		"learner.go": true, "shadow.go": true, "declog.go": true, "metrics.go": true, "gauges.go": true,
	}
	files, err := os.ReadDir(".")
	require.NoError(t, err)
	seen := 0
	for _, f := range files {
		if name := f.Name(); strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") && !owners[name] {
			seen++
			text, err := os.ReadFile(name)
			require.NoError(t, err)
			file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.ImportsOnly)
			require.NoError(t, err)
			for _, i := range file.Imports {
				path := strings.Trim(i.Path.Value, `"`)
				pure := path == "math" || !strings.Contains(path, ".") && !strings.HasPrefix(path, "evenkeel/") && !strings.HasPrefix(path, "sync") &&
					path != "context" && path != "os" && path != "io"
				for _, own := range []string{"dispatcher/policy", "pool", "predictor", "engine/circuit"} {
					pure = pure || path == "evenkeel/"+own
				}
				require.True(t, pure, "%s imports %s", name, path)
			}
			for _, impure := range []string{"time.Now", "time.Since", "time.Until", "time.After", "go func", "chan ", "prometheus", "cfg.Log", "cfg.Registerer"} {
				require.NotContains(t, string(text), impure, name)
			}
		}
	}
	require.Greater(t, seen, 15)
}
