package race

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOnlyTheDetectorSkips(t *testing.T) {
	ran := false
	t.Run("long", func(t *testing.T) {
		Alone(t)
		ran = true
	})
	require.NotEqual(t, Enabled, ran)
}
