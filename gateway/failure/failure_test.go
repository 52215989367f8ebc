package failure

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/prefill"
)

// Operators are told which queue is full, and clients are not.
func TestAFullQueueIsNamedToOperators(t *testing.T) {
	full := &prefill.FullError{Model: "m", Max: 40, Key: "prefill.queue.max"}
	e := UnplacedError("prefill", fmt.Errorf("request 7: %w", full), 0, "m", false)
	require.Equal(t, 429, e.Status)
	require.Equal(t, "the arrival queue of model m is full (prefill.queue.max: 40)", e.Why)
	require.NotContains(t, string(e.JSON()), "prefill.queue.max")
}
