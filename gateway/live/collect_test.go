package live

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTheConfigOfTheStartIsNoReload(t *testing.T) {
	began := time.UnixMilli(5000)
	require.Zero(t, reloaded(began, began))
	require.Equal(t, int64(7000), reloaded(time.UnixMilli(7000), began))
}

func TestAnEngineWithManyAdaptersHasFewNames(t *testing.T) {
	many := make([]string, 3000)
	for i := range many {
		many[i] = strings.Repeat("x", 20)
	}
	many[0] = "base"
	got := named(many)
	require.Len(t, got, mostNamed+1)
	require.Equal(t, "base", got[0])
	require.Equal(t, "other", got[mostNamed])
	require.Equal(t, many[:mostNamed], named(many[:mostNamed]))
}

func TestWhoWaitsIsSortedAndBounded(t *testing.T) {
	want := []Waiting{{"f", 6}, {"e", 5}, {"", 4}, {"a", 3}, {"b", 3}, {"", 2}}
	require.Equal(t, want, waitingOf(map[string]int{"a": 3, "b": 3, "c": 1, "d": 1, "e": 5, "f": 6, "": 4}))
	require.Empty(t, waitingOf(nil))
}
