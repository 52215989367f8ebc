package policy

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestExplainSaysWhyAnEntryWaits(t *testing.T) {
	limited := level(2, 600, 1)
	limited[0].Capacity, limited[1].Capacity = 1000, 1000
	limited[1].Running[0].Prompt = 700
	for _, c := range []struct {
		name, spec string
		s          Snapshot
		want       []Unplaced
	}{
		{"no rank is up", "br0", Snapshot{Workers: []Worker{{ID: 1, Free: 2}}, Pool: entries(5)}, []Unplaced{{1, "no rank is up"}}},
		{"no slot was free", "br0", Snapshot{Workers: level(2, 5, 0), Pool: entries(5)}, []Unplaced{{1, "no free slot"}}},
		{"others took the slots", "pjsq", Snapshot{Workers: level(1, 5, 1), Pool: entries(5, 6)}, []Unplaced{{2, "no free slot left"}}},
		{
			"no room", "br0", Snapshot{Workers: limited, Pool: entries(400)},
			[]Unplaced{{1, "fits no rank's room: 400 tokens, the largest room beside a free slot is 350"}},
		},
		{"no room ever", "jsq", Snapshot{Workers: limited, Pool: entries(1001)}, []Unplaced{{1, "larger than the KV budget of every rank: 1001 tokens"}}},
		{
			"a reservation", "br0", Snapshot{Workers: limited, Pool: append([]Entry{{ID: 8, Prompt: 400, Urgent: true}}, entries(300)...)},
			[]Unplaced{
				{8, "overdue, but fits no rank with a free slot; worker 0 is reserved for it"},
				{1, "worker 0 is reserved for an overdue entry, 8"},
			},
		},
		{"all placed", "br0", Snapshot{Workers: level(2, 5, 1), Pool: entries(5)}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := Parse(c.spec)
			require.NoError(t, err)
			_, left := Explain(p, &c.s)
			require.Equal(t, c.want, left)
		})
	}
}
