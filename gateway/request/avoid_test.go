package request

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Ranks 0 to 3 are one group, 4 to 7 another.
func TestWhoIsAskedAfterARefusal(t *testing.T) {
	one, other := []int32{0, 1, 2, 3}, []int32{4, 5, 6, 7}
	type refusal struct {
		by     int32
		around []int32
		others bool
	}
	for _, row := range []struct {
		name     string
		refusals []refusal
		avoided  []int32
		last     []int32
	}{
		{"the first one", []refusal{{0, one, true}}, []int32{0}, one},
		{"a second one of the same group", []refusal{{0, one, true}, {1, one, true}}, []int32{0, 1, 2, 3}, one},
		{"one of each group", []refusal{{0, one, true}, {4, other, true}}, []int32{0, 4}, append(one[:4:4], other...)},
		{
			"two of each group, so that the first one is as good again",
			[]refusal{{0, one, true}, {1, one, true}, {4, other, true}, {5, other, false}}, other, nil,
		},
		{"where there is no other group", []refusal{{0, nil, false}, {1, nil, false}}, []int32{0, 1}, nil},
	} {
		t.Run(row.name, func(t *testing.T) {
			var a avoided
			for _, r := range row.refusals {
				a.noteRefusal(r.by, r.around, r.others)
			}
			for _, id := range a.ranks() {
				require.Contains(t, row.avoided, id)
			}
			for _, id := range row.avoided {
				require.Contains(t, a.ranks(), id)
			}
			require.Equal(t, row.last, a.lastChoice)
		})
	}
}
