package board

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// putLocal offers a prompt without a hand-off.
func (h *hand) putLocal(e pool.Entry, l Local) waiting {
	w := h.make(e)
	w.local = &l
	h.do(func(h *hand) { h.enqueue(w) })
	return w
}

func (w waiting) placed() (*Slot, bool) {
	r := <-w.result
	return r.Slot, r.Err == nil
}

func TestAShortPromptGoesWherePrefillSaysItMay(t *testing.T) { // 256 tokens at most, 512 in flight
	for name, row := range map[string]struct {
		tokens, inFlight int
		want             bool
	}{
		"184 of 3000 are new, beside 300 in flight": {184, 300, true},
		"the same beside 400":                       {184, 400, false},
		"all of 3000 are new":                       {3000, 0, false},
		"all of 200 are new":                        {200, 0, true},
		"256 are the threshold":                     {256, 256, true},
		"257 are beyond it":                         {257, 0, false},
		"513 with those in flight":                  {256, 257, false},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, row.want, (&Local{Threshold: 256, InFlight: 512}).Allows(row.tokens, 7, row.inFlight))
		})
	}
}

func TestBreakEvenShrinksWithTheBatchAndIsClamped(t *testing.T) {
	l := Local{BreakEven: 400, InFlight: 1 << 20}
	require.True(t, l.Allows(399, 0, 0))
	require.False(t, l.Allows(400, 0, 0))
	require.True(t, l.Allows(199, 8, 0))
	require.False(t, l.Allows(200, 8, 0))
	require.True(t, l.Allows(64, 10_000, 0), "so much always pays")
	l.BreakEven = 1e9
	require.True(t, l.Allows(1024, 0, 0))
	require.False(t, l.Allows(1025, 0, 0))
}

func offers(tokens ...int) (list []LocalRank) {
	for i, n := range tokens {
		if n > 0 {
			list = append(list, LocalRank{int32(i), n})
		}
	}
	return list
}

func TestAPromptIsComputedWhereTheLeastOfItIsNew(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(3, 8, 0))
	h.put(pool.Entry{Prompt: 500}).slotNow(t) // on rank 0
	local := Local{Threshold: 256, InFlight: 512}

	local.Ranks = offers(100, 200, 200)
	s := h.putLocal(pool.Entry{Prompt: 900}, local).slotNow(t)
	require.EqualValues(t, 0, s.Worker, "though it is the fullest")
	require.EqualValues(t, 100, s.NewTokens)
	require.EqualValues(t, 1400, h.boards["m"].ranks[0].kv, "all of it is charged, as with any admission")

	local.Ranks = offers(200, 200, 200)
	require.EqualValues(t, 1, h.putLocal(pool.Entry{Prompt: 200}, local).slotNow(t).Worker, "of equals the policy chooses")
	local.Ranks = offers(200, 0, 0)
	a := h.putLocal(pool.Entry{Prompt: 200}, local).slotNow(t)
	h.putLocal(pool.Entry{Prompt: 200}, local).slotNow(t)
	require.ErrorIs(t, h.putLocal(pool.Entry{Prompt: 200}, local).errNow(t), ErrNotLocal, "500 are being computed there")
	a.Started()
	h.putLocal(pool.Entry{Prompt: 200}, local).slotNow(t)
}

func TestAPromptWithoutAHandoffPassesTheLimitsOfEveryAdmission(t *testing.T) {
	local := Local{Threshold: 256, InFlight: 512, Ranks: offers(10)}
	for name, prepare := range map[string]func(h *hand){
		"no slot is free":      func(h *hand) { h.fleet(ranks(1, 1, 0)); h.put(pool.Entry{Prompt: 1}).slotNow(t) },
		"it does not fit":      func(h *hand) { h.fleet(ranks(1, 4, 100)); h.put(pool.Entry{Prompt: 60}).slotNow(t) },
		"it would never fit":   func(h *hand) { h.fleet(ranks(1, 4, 20)) },
		"its rank is down":     func(h *hand) { ws := ranks(2, 4, 0); ws[0].Up = false; h.fleet(ws) },
		"others have no offer": func(h *hand) { h.fleet(ranks(3, 4, 0)[1:]) },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHand(t, testConfig())
			prepare(h)
			require.Error(t, h.putLocal(pool.Entry{Prompt: 50}, local).errNow(t))
		})
	}
}

func TestAPromptWithoutAHandoffGoesBehindThoseThatWait(t *testing.T) {
	h := newHand(t, testConfig(&fake{Spec: "never",
		Decides: func(_ *policy.Snapshot, dst []policy.Assignment) []policy.Assignment { return dst }}))
	h.fleet(ranks(1, 4, 0))
	require.NoError(t, h.setPolicy("never"))
	w := h.putLocal(pool.Entry{Prompt: 50}, Local{Threshold: 256, InFlight: 512, Ranks: offers(10)})
	require.ErrorIs(t, w.errNow(t), ErrNotLocal, "the policy would let it wait")
	first := h.put(pool.Entry{Prompt: 10})
	require.True(t, first.waits())
	require.NoError(t, h.setPolicy("pooled"))
	w = h.putLocal(pool.Entry{Prompt: 50}, Local{Threshold: 256, InFlight: 512, Ranks: offers(10)})
	require.ErrorIs(t, w.errNow(t), ErrNotLocal)
	first.slotNow(t)
}

// Whatever comes, starts and ends: no rank computes more than its bound, every
// charge is released once, and offers alone are taken.
func TestLocalPrefillsKeepTheirBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := testConfig()
		cfg.Policy = rapid.SampledFrom([]string{"pooled", "immediate"}).Draw(t, "policy")
		h := newHand(t, cfg)
		n := rapid.IntRange(1, 4).Draw(t, "ranks")
		slots := rapid.IntRange(1, 4).Draw(t, "slots")
		h.fleet(ranks(n, slots, 2000))
		var held []*Slot
		for range rapid.IntRange(1, 60).Draw(t, "events") {
			switch rapid.IntRange(0, 4).Draw(t, "event") {
			case 4:
				if len(held) > 0 {
					s := held[rapid.IntRange(0, len(held)-1).Draw(t, "counted")]
					h.do(func(r *hand) {
						r.apply(Recount{"m", s.index, int(s.record().prompt - rapid.Int32Range(0, s.record().prompt-1).Draw(t, "fewer"))})
					})
				}
			case 0, 1:
				l := Local{Threshold: 256, InFlight: 512}
				for i := range n {
					if rapid.Bool().Draw(t, "offered") {
						l.Ranks = append(l.Ranks, LocalRank{int32(i), rapid.IntRange(0, 300).Draw(t, "tokens")})
					}
				}
				if s, ok := h.putLocal(pool.Entry{Prompt: rapid.IntRange(1, 900).Draw(t, "prompt")}, l).placed(); ok {
					held = append(held, s)
				}
			case 2:
				if len(held) > 0 {
					held[rapid.IntRange(0, len(held)-1).Draw(t, "started")].Started()
				}
			default:
				if len(held) > 0 {
					i := rapid.IntRange(0, len(held)-1).Draw(t, "released")
					h.release(held[i])
					held = append(held[:i], held[i+1:]...)
				}
			}
			b := h.boards["m"]
			total := 0
			for _, r := range b.ranks {
				require.LessOrEqual(t, b.promptsInFlight(r), 512)
				require.LessOrEqual(t, len(r.slots), slots)
				b.refreshLoad(r)
				require.LessOrEqual(t, r.kv, int64(2000))
				total += len(r.slots)
			}
			require.Equal(t, len(held), total)
			require.Empty(t, b.waiting)
		}
		h.release(held...)
		s, kv := h.boards["m"].drift()
		require.Zero(t, s)
		require.Zero(t, kv)
	})
}
