package couple

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNoIDBeginsAnotherOne(t *testing.T) {
	var all []string
	for attempt := 1; attempt <= 120; attempt++ { // prefill.retry.attempts is at most 100
		all = append(all, ID("r", attempt), ID("r-1", attempt))
	}
	for i, id := range all {
		for k, other := range all {
			require.False(t, i != k && strings.HasPrefix(other, id), "an abort of %s would end %s", id, other)
		}
	}
}
