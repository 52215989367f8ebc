package board

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/pool"
)

// threeGroups are ranks of three barrier groups, two of each.
func threeGroups() []Worker {
	ws := ranks(6, 2, 0)
	for i := range ws {
		ws[i].Group = []string{"a", "b", "c"}[i/2]
	}
	return ws
}

// One client at a time finds all groups idle each time. Each of them gets its share.
func TestGroupsThatAreAlikeTakeTurns(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(threeGroups())
	var got []int32
	for range 7 {
		s := h.put(pool.Entry{Prompt: 100}).slotNow(t)
		got = append(got, s.Worker)
		h.release(s)
	}
	require.Equal(t, []int32{0, 2, 4, 0, 2, 4, 0}, got, "and within a group the lower ID")

	heavy := h.put(pool.Entry{Prompt: 100}).slotNow(t)
	require.EqualValues(t, 2, heavy.Worker)
	require.EqualValues(t, 4, h.put(pool.Entry{Prompt: 50}).slotNow(t).Worker)
	require.EqualValues(t, 0, h.put(pool.Entry{Prompt: 60}).slotNow(t).Worker)
	require.EqualValues(t, 5, h.put(pool.Entry{Prompt: 1}).slotNow(t).Worker, "a group that holds less is no equal")
}

// Entries that the board binds without a policy find the same groups alike.
func TestGroupsTakeTurnsWithoutAPolicy(t *testing.T) {
	for name, row := range map[string]struct {
		entry pool.Entry
		fleet func([]Worker)
		want  []int32
	}{
		"that must avoid a rank": {pool.Entry{Prompt: 100, Avoid: []int32{5}}, func([]Worker) {}, []int32{0, 2, 4, 0, 2}},
		"whose name some ranks list": {pool.Entry{Prompt: 100, Name: "lora"}, func(ws []Worker) {
			base, both := NewNames([]string{"m"}), NewNames([]string{"m", "lora"})
			naming(ws, base, both, base, both, base, both)
		}, []int32{1, 3, 5, 1, 3}},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHand(t, testConfig())
			fleet := threeGroups()
			row.fleet(fleet)
			h.fleet(fleet)
			var got []int32
			for range row.want {
				s := h.put(row.entry).slotNow(t)
				got = append(got, s.Worker)
				h.release(s)
			}
			require.Equal(t, row.want, got)
		})
	}
}

// A group that has a prompt in its prefix caches is no equal of one that has not.
func TestATurnLeavesNoPrefixBehind(t *testing.T) {
	h := newHand(t, realConfig("prr"))
	h.fleet(mixed(threeGroups()))
	for range 4 {
		w := h.make(pool.Entry{Prompt: 100})
		w.hits = []Hit{{Worker: 3, Tokens: 80}}
		h.do(func(h *hand) { h.enqueue(w) })
		s := w.slotNow(t)
		require.EqualValues(t, "b", s.Group)
		h.release(s)
	}
}
