package board

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/dispatcher/delivery"
	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// toRank admits everything to one rank, as a policy that knows of no pairs may.
func toRank(id int32) *fake {
	return &fake{Spec: "to-rank", Decides: func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
		free := s.Workers[id].Free
		for _, e := range s.Pool {
			if free > 0 {
				dst = append(dst, policy.Assignment{Entry: e.ID, Worker: id})
				free--
			}
		}
		return dst
	}}
}

// twoEngines has ranks 0 and 1 on engine d0, rank 2 on d1, and a policy that
// wants rank 0 for all.
func twoEngines(t tb, slots int) *hand {
	h := newHand(t, Config{Policy: "to-rank", DensePolicy: "immediate", Parse: fakePolicies(toRank(0)), TickLimit: time.Hour})
	ws := ranks(3, slots, 0)
	for i, e := range []string{"d0", "d0", "d1"} {
		ws[i].Engine = e
	}
	h.fleet(ws)
	return h
}

func (h *hand) from(prefiller string) waiting {
	return h.put(pool.Entry{Prompt: 10, Prefiller: prefiller})
}

func (h *hand) lose(s *Slot) {
	h.do(func(l *hand) { l.giveBack(s, Outcome{Kind: Failed, Lost: true}) })
}

func (h *hand) board() *board { return h.boards["m"] }

// arrive reports the first event of a hand-off and ends it.
func (h *hand) arrive(s *Slot) {
	s.Started()
	told := h.told
	h.told = nil
	h.do(told...)
	h.release(s)
}

// works says that a hand-off which is sent now arrives.
func (h *hand) works(prefiller, engine string) {
	h.do(func(l *hand) {
		b := l.boards["m"]
		b.carryOutChanges(b.pairs.Arrived(delivery.Link{Prefiller: prefiller, Engine: engine}, l.now, l.now))
	})
}

// quarantine makes p0 fail on d0 three times while p0 serves d1 and d0 serves p1.
func (h *hand) quarantine(t tb) {
	h.lose(h.from("p0").slotNow(t))
	h.works("p0", "d1")
	h.works("p1", "d0")
	h.lose(h.from("p0").slotNow(t))
	h.lose(h.from("p0").slotNow(t))
}

func TestWhoServesOthersIsNotToBlame(t *testing.T) {
	for _, row := range []struct {
		name     string
		from, to bool // the prefiller, the engine serves others
		losses   int
		want     *PairStatus // who is out; nil: nobody
	}{
		{"both serve others: their connection is broken", true, true, 3, &PairStatus{Prefiller: "p0", Engine: "d0"}},
		{"two losses are not enough", true, true, 2, nil},
		{"the prefiller serves nobody: it is to blame", false, true, 3, &PairStatus{Prefiller: "p0"}},
		{"the engine serves nobody: it is to blame", true, false, 3, &PairStatus{Engine: "d0"}},
		{"nobody serves anybody: all stay", false, false, 3, nil},
	} {
		t.Run(row.name, func(t *testing.T) {
			h := twoEngines(t, 4)
			if row.from && row.to { // p1 is in use, too
				h.from("p1").slotNow(t)
			}
			for range row.losses {
				h.lose(h.from("p0").slotNow(t))
			}
			if row.from {
				h.works("p0", "d1")
			}
			if row.to {
				h.works("p1", "d0")
			}
			status := h.status(h.at).Models[0].Pairs
			require.Equal(t, row.losses, status[0].Failures)
			if row.want == nil {
				require.Len(t, status, 1)
				require.False(t, status[0].Quarantined)
				return
			}
			want := *row.want
			want.Failures, want.Quarantined, want.Until = row.losses, true, h.at.Add(time.Second)
			require.Equal(t, want, status[0])
		})
	}
}

// withoutD0 has a real policy, and d0 is out, which has ranks 0 and 1. Rank 2 is on d1.
func withoutD0(t tb) *hand {
	h := newHand(t, testConfig())
	ws := ranks(3, 8, 0)
	for i, e := range []string{"d0", "d0", "d1"} {
		ws[i].Engine = e
	}
	h.fleet(ws)
	for range 3 {
		h.lose(h.from("p0").slotNow(t))
	}
	h.works("p0", "d1")
	return h
}

// A decode engine that is out gets no requests, whatever the policy wants, until its trial; without
// another one it gets them all the same.
func TestADecodeEngineThatLosesAllIsSpared(t *testing.T) {
	h := withoutD0(t)
	require.EqualValues(t, 2, h.from("p0").slotNow(t).Worker)
	require.EqualValues(t, 2, h.from("p1").slotNow(t).Worker, "from no prefill engine")
	h.pass(time.Second)
	trial := h.from("p1").slotNow(t)
	require.EqualValues(t, 0, trial.Worker)
	require.EqualValues(t, 2, h.from("p1").slotNow(t).Worker, "one is enough")
	h.arrive(trial)
	require.EqualValues(t, 0, h.from("p0").slotNow(t).Worker)
	require.False(t, h.board().pairs.AnyOut())
}

func TestAFirstEventEndsTheRow(t *testing.T) {
	h := twoEngines(t, 4)
	h.lose(h.from("p0").slotNow(t))
	h.lose(h.from("p0").slotNow(t))
	h.arrive(h.from("p0").slotNow(t))
	require.Empty(t, h.status(h.at).Models[0].Pairs)
	require.Zero(t, h.watched)
}

func TestAQuarantinedPairIsAvoided(t *testing.T) {
	h := twoEngines(t, 4)
	h.quarantine(t)
	require.EqualValues(t, 2, h.from("p0").slotNow(t).Worker, "d1 has the only rank that p0 may go to")
	require.EqualValues(t, 0, h.from("p1").slotNow(t).Worker, "others go where the policy wants")
	require.EqualValues(t, 0, h.from("").slotNow(t).Worker)
	require.EqualValues(t, 1, count(t, h.metrics.steered.WithLabelValues(SteerMoved)))
}

// A request that comes back from one rank does not go to where its hand-off
// would not arrive.
func TestAShyEntryAvoidsAQuarantinedPair(t *testing.T) {
	h := twoEngines(t, 4)
	h.quarantine(t)
	h.put(pool.Entry{Prompt: 1000, Prefiller: "p0"}).slotNow(t) // makes rank 2 the fullest
	require.EqualValues(t, 2, h.put(pool.Entry{Prompt: 10, Prefiller: "p0", Avoid: []int32{1}}).slotNow(t).Worker)
	require.EqualValues(t, 0, h.put(pool.Entry{Prompt: 10, Prefiller: "p1", Avoid: []int32{1}}).slotNow(t).Worker)
}

func TestWithoutAnotherRankAQuarantinedPairIsUsed(t *testing.T) {
	h := twoEngines(t, 4)
	h.quarantine(t)
	ws := ranks(3, 4, 0)
	for i, e := range []string{"d0", "d0", "d1"} {
		ws[i].Engine = e
	}
	ws[2].Up = false
	h.fleet(ws)
	require.EqualValues(t, 0, h.from("p0").slotNow(t).Worker)
	require.EqualValues(t, 1, count(t, h.metrics.steered.WithLabelValues(SteerKept)))
}

func TestAnEntryWaitsForTheOtherRankAndNoLongerThanTheQuarantine(t *testing.T) {
	h := twoEngines(t, 1)
	h.quarantine(t)
	busy := h.from("p0").slotNow(t)
	require.EqualValues(t, 2, busy.Worker)
	left := h.from("p0")
	require.True(t, left.waits(), "rank 2 could take it, but is full")
	h.release(busy)
	h.pass(time.Millisecond)
	require.EqualValues(t, 2, left.slotNow(t).Worker)

	left = h.from("p0")
	require.True(t, left.waits())
	require.Equal(t, h.at.Add(time.Second-time.Millisecond), h.Next(), "the end of the quarantine")
	h.pass(time.Second - time.Millisecond)
	trial := left.slotNow(t)
	require.EqualValues(t, 0, trial.Worker, "one hand-off tries the pair")
	require.True(t, h.from("p0").waits(), "only one")
}

func TestTheTrialDecides(t *testing.T) {
	h := twoEngines(t, 8)
	h.quarantine(t)
	for _, out := range []time.Duration{1, 2, 4, 8, 16, 30, 30} {
		h.pass(out*time.Second - 1)
		require.EqualValues(t, 2, h.from("p0").slotNow(t).Worker%3, "quarantined for %d s", out)
		h.pass(1)
		h.release(h.slotsOf(2)...)
		trial := h.from("p0").slotNow(t)
		require.EqualValues(t, 0, trial.Worker)
		h.lose(trial)
	}
	h.pass(30 * time.Second)
	cancelled := h.from("p0").slotNow(t)
	require.EqualValues(t, 0, cancelled.Worker)
	h.release(cancelled) // its client left: no verdict
	trial := h.from("p0").slotNow(t)
	require.EqualValues(t, 0, trial.Worker, "so the next one is the trial")
	h.arrive(trial)
	require.Empty(t, h.status(h.at).Models[0].Pairs)
	require.EqualValues(t, 0, h.from("p0").slotNow(t).Worker)
}

func TestAnAssignmentIsSwappedWhereNoSlotIsLeftOver(t *testing.T) {
	want := map[uint64]int32{}
	h := newHand(t, Config{DensePolicy: "immediate", TickLimit: time.Hour, Policy: "fixed", Parse: fakePolicies(&fake{
		Spec: "fixed", Decides: func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
			for i := range s.Pool {
				dst = append(dst, policy.Assignment{Entry: s.Pool[i].ID, Worker: want[s.Pool[i].ID]})
			}
			return dst
		},
	})})
	ws := ranks(2, 1, 0)
	ws[0].Engine, ws[1].Engine = "d0", "d1"
	h.fleet(ws)
	h.quarantine(t)
	want[h.ids+1], want[h.ids+2] = 0, 1
	froms := []string{"p0", "p1"}
	got := h.putAll(2, func() pool.Entry {
		p := froms[0]
		froms = froms[1:]
		return pool.Entry{Prompt: 10, Prefiller: p}
	})
	require.EqualValues(t, 1, got[0].slotNow(t).Worker)
	require.EqualValues(t, 0, got[1].slotNow(t).Worker)
	require.EqualValues(t, 1, count(t, h.metrics.steered.WithLabelValues(SteerSwapped)))
}

func TestAnUrgentEntryTakesTheRiskOfAPair(t *testing.T) {
	h := twoEngines(t, 1)
	h.quarantine(t)
	h.from("p0").slotNow(t)
	w := h.make(pool.Entry{Prompt: 10, Prefiller: "p0", Deadline: h.at.Add(400 * time.Millisecond)})
	h.do(func(l *hand) { l.enqueue(w) })
	require.True(t, w.waits())
	h.at = h.at.Add(300 * time.Millisecond)
	h.board().decideNow = true
	h.do()
	require.EqualValues(t, 0, w.slotNow(t).Worker)
}

// Slots that may be used now are a policy's free ones; fewer of them than are
// in use takes nothing from anybody.
func TestALimitHoldsBackSlots(t *testing.T) {
	h := newHand(t, testConfig())
	ws := ranks(1, 4, 0)
	ws[0].Limit = 1
	h.fleet(ws)
	first, second := h.put(pool.Entry{Prompt: 1}), h.put(pool.Entry{Prompt: 1})
	slots := []*Slot{first.slotNow(t)}
	require.True(t, second.waits())
	ws[0].Limit = 3
	h.fleet(ws)
	slots = append(slots, second.slotNow(t), h.put(pool.Entry{Prompt: 1}).slotNow(t))
	ws[0].Limit = 1
	h.fleet(ws)
	last := h.put(pool.Entry{Prompt: 1})
	require.True(t, last.waits())
	require.Equal(t, 3, h.status(h.at).Models[0].Workers[0].Used)
	h.release(slots...)
	require.Equal(t, "d0", last.slotNow(t).WorkerName)
	drift, _ := h.board().drift()
	require.Zero(t, drift)
}

// Whatever goes up and down, is slow, fails or is quarantined: what is charged
// to a rank is what was bound there and not released, to the token.
func TestHealthNeverTouchesLoad(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := newHand(t, testConfig())
		ws := ranks(3, 4, 0)
		for i := range ws {
			ws[i].Engine = ws[i].Name
		}
		h.fleet(ws)
		held := map[*Slot]bool{}
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				w := h.put(pool.Entry{Prompt: rapid.IntRange(1, 100).Draw(t, "prompt"),
					Prefiller: rapid.SampledFrom([]string{"p0", "p1"}).Draw(t, "from")})
				for {
					select {
					case r := <-w.result:
						if r.Err == nil {
							held[r.Slot] = true
						}
						return
					default:
						h.do(func(l *hand) { l.withdraw(w.entry) })
					}
				}
			},
			"health": func(t *rapid.T) {
				r := &ws[rapid.IntRange(0, 2).Draw(t, "rank")]
				r.Up, r.Limit = rapid.Bool().Draw(t, "up"), rapid.IntRange(0, 4).Draw(t, "limit")
				h.fleet(ws)
			},
			"end": func(t *rapid.T) {
				for s := range held {
					delete(held, s)
					h.do(func(l *hand) { l.giveBack(s, Outcome{Kind: Failed, Lost: rapid.Bool().Draw(t, "lost")}) })
					return
				}
			},
			"first event": func(*rapid.T) {
				for s := range held {
					s.Started()
					break
				}
				told := h.told
				h.told = nil
				h.do(told...)
			},
			"time": func(t *rapid.T) { h.pass(time.Duration(rapid.IntRange(0, 3000).Draw(t, "ms")) * time.Millisecond) },
			"": func(t *rapid.T) {
				want := map[int32]int64{}
				for s := range held {
					want[s.Worker] += int64(s.record().prompt)
				}
				for _, w := range h.status(h.at).Models[0].Workers {
					require.Equal(t, want[w.ID], w.KVTokens)
				}
				slots, kv := h.board().drift()
				require.Zero(t, slots)
				require.Zero(t, kv)
			},
		})
	})
}

// An end that is gone says nothing any more, so neither its failures nor its
// quarantine may stay.
func TestAPairThatNobodyTriesAgainIsForgotten(t *testing.T) {
	h := twoEngines(t, 4)
	h.quarantine(t)
	h.lose(h.from("p9").slotNow(t))
	h.pass(5 * time.Minute)
	h.arrive(h.from("p1").slotNow(t))
	require.Len(t, h.status(h.at).Models[0].Pairs, 2)
	h.pass(time.Minute)
	h.arrive(h.from("p1").slotNow(t))
	require.Empty(t, h.status(h.at).Models[0].Pairs)
	require.False(t, h.board().pairs.AnyOut())
}

// The KV of a request that was bound before its prefill may come from another prefiller in the end.
func TestAReroutedSlotIsOfItsLastPrefiller(t *testing.T) {
	h := twoEngines(t, 8)
	h.quarantine(t)
	s, other := h.from("p1").slotNow(t), h.put(pool.Entry{Prompt: 10, Prefiller: "p1", Only: []int32{2}}).slotNow(t)
	require.Equal(t, []string{"p0"}, h.Quarantined("m", s.Slot, h.at))
	require.Equal(t, []string{"p0"}, h.Quarantined("m", -1, h.at))
	require.Empty(t, h.Quarantined("another", -1, h.at))
	require.Empty(t, h.Quarantined("m", other.Slot, h.at))
	h.apply(Rerouted{Model: "m", Slot: other.Slot, Prefiller: "p2"})
	h.lose(other)
	suspected := h.board().pairs.Suspected()
	require.Equal(t, delivery.Link{Prefiller: "p2", Engine: "d1"}, suspected[len(suspected)-1].Link)
	h.release(s)
}

// Orphans take room of a rank. An entry that is steered off a quarantined pair is not steered
// there.
func TestASteeredEntryGoesToARankWithRoom(t *testing.T) {
	h := newHand(t, Config{Policy: "to-rank", DensePolicy: "immediate", Parse: fakePolicies(toRank(0)), TickLimit: time.Hour})
	ws := early(ranks(3, 4, 1000))
	for i, engine := range []string{"d0", "d1", "d2"} {
		ws[i].Engine = engine
	}
	h.fleet(ws)
	h.quarantine(t) // p0 and d0
	h.orphan(h.put(pool.Entry{Prompt: 900, Prefiller: "p1", Only: []int32{1}}).slotNow(t))
	require.EqualValues(t, 2, h.put(pool.Entry{Prompt: 50, Prefiller: "p1", Only: []int32{2}}).slotNow(t).Worker)
	w := h.put(pool.Entry{Prompt: 200, Prefiller: "p0"})
	require.EqualValues(t, 2, w.slotNow(t).Worker, "rank 1 runs less, but has no room")
	require.Zero(t, h.metrics.invalid[FaultRoom])
}

// A request that only one rank may get waits for the end of its pair's quarantine. The board looks
// at it then.
func TestAnEntryIsLookedAtWhenTheQuarantineEnds(t *testing.T) {
	for name, entry := range map[string]pool.Entry{
		"only one rank may get it":  {Prompt: 10, Prefiller: "p0", Only: []int32{0}},
		"one engine lists its name": {Prompt: 10, Prefiller: "p0", Name: "lora"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHand(t, Config{
				Policy: "to-rank", DensePolicy: "immediate", Parse: fakePolicies(toRank(0)), TickLimit: time.Hour, TTL: time.Minute,
			})
			ws, lists := ranks(3, 4, 0), NewNames([]string{"m", "lora"})
			for i, engine := range []string{"d0", "d0", "d1"} {
				ws[i].Engine, ws[i].Lists = engine, lists
			}
			ws[2].Lists = NewNames([]string{"m"})
			h.fleet(ws)
			h.quarantine(t)
			w := h.put(entry)
			require.True(t, w.waits())
			until := h.status(h.at).Models[0].Pairs[0].Until
			require.False(t, h.Next().After(until))
			h.at = until
			h.do()
			require.False(t, w.waits())
		})
	}
}

// The hand-off of a request was lost at a decode engine that works, because its prefill engine is
// sick. The request does not wait for a decode engine that is out, and it is not the trial of one:
// with a second lost trial it would come to the end of its attempts.
func TestARequestThatHasFailedIsNoTrial(t *testing.T) {
	h := withoutD0(t)
	require.True(t, h.board().pairs.AnyOut())
	failed := func() waiting { return h.put(pool.Entry{Prompt: 10, Prefiller: "p1", Avoid: []int32{2}}) }
	require.EqualValues(t, 2, failed().slotNow(t).Worker, "d0 is out")
	h.pass(time.Second)
	require.EqualValues(t, 2, failed().slotNow(t).Worker, "though a trial of d0 is due")
	require.EqualValues(t, 0, h.from("p1").slotNow(t).Worker)
}
