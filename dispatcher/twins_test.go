package dispatcher

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestATwinThatFailsEndsNothingElse(t *testing.T) {
	_, more, failure := work(nil, 1)
	require.ErrorContains(t, failure, "panic")
	require.False(t, more)
}
