package vectors

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEveryKnownKindPasses(t *testing.T) {
	for kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			var out strings.Builder
			passed, failed, err := Run([]string{filepath.Join("testdata", kind+".jsonl")}, &out)
			require.NoError(t, err)
			require.Zero(t, failed, out.String())
			require.Positive(t, passed)
		})
	}
}
