package life

import (
	"cmp"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the table of waits into docs/failures.md")

// Every state in which a request waits has a bound, and the docs show all of them.
func TestEveryWaitHasABound(t *testing.T) {
	bounded := map[State]bool{Fresh: true} // nothing is waited for
	var b strings.Builder
	b.WriteString("| state | where | waits for | at most | what ends it earlier | what follows |\n|---|---|---|---|---|---|\n")
	for _, w := range Waits {
		bounded[w.State] = true
		for _, s := range []string{w.For, w.Most, w.Early, w.Then} {
			assert.NotEmpty(t, s, "%+v", w)
		}
		b.WriteString("| " + strings.Join([]string{w.State.String(), cmp.Or(w.When, "always"), w.For, w.Most, w.Early, w.Then}, " | ") + " |\n")
	}
	for s := range states {
		assert.True(t, bounded[s], "%v has no bound", s)
		assert.NotEmpty(t, s.String())
	}
	const file, begin, end = "../../docs/failures.md", "<!-- waits -->\n", "<!-- end of waits -->\n"
	page, err := os.ReadFile(file)
	require.NoError(t, err)
	before, rest, ok := strings.Cut(string(page), begin)
	require.True(t, ok)
	_, after, ok := strings.Cut(rest, end)
	require.True(t, ok)
	want := before + begin + b.String() + end + after
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(want), 0o644)) //nolint:gosec // a page of the docs
		return
	}
	require.Equal(t, want, string(page), "go test ./gateway/life -run TestEveryWaitHasABound -update writes it")
}
