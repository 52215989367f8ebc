package trace

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// docs/traces.md lists every name that is known.
func TestTheTracesPageHasEveryName(t *testing.T) {
	page, err := os.ReadFile("../../../docs/traces.md")
	require.NoError(t, err)
	for which, list := range names {
		require.Contains(t, string(page), "| "+says[which]+" | `"+strings.Join(list, "`, `")+"` |\n")
	}
}

// The examples of docs/traces.md are read.
func TestTheExamplesOfThePageAreRead(t *testing.T) {
	page, err := os.ReadFile("../../../docs/traces.md")
	require.NoError(t, err)
	_, section, ok := strings.Cut(string(page), "\n## Request traces\n")
	require.True(t, ok)
	section, _, ok = strings.Cut(section, "\n## Request logs\n")
	require.True(t, ok)
	n := 0
	for i, block := range strings.Split(section, "```") {
		kind, text, _ := strings.Cut(block, "\n")
		if i%2 == 0 || kind == "" {
			continue
		}
		n++
		_, err := Parse(strings.NewReader(text), Options{Name: kind})
		require.NoError(t, err, text)
	}
	require.Equal(t, 4, n)
}
