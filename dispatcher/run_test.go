package dispatcher

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/pool"
)

// A group that is gone leaves nothing behind, also if its last stream still speaks.
func TestAGroupThatIsGoneIsForgotten(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 1, 0))
	s := h.put(pool.Entry{Prompt: 5}).slotNow(t)
	s.Progress(1)
	h.fleet(nil)
	require.Empty(t, h.detectors)
	s.Progress(2) // a step of the group
	h.do(h.told...)
	h.release(s)
	require.Empty(t, h.byModel)
}
