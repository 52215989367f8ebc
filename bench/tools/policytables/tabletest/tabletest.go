// Package tabletest runs the programs of policytables in tests.
package tabletest

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/tools/page"
	"evenkeel/bench/tools/policytables"
)

// Small makes a book of runs that take no time and show nothing but their shape. Its progress goes
// to says.
func Small(t *testing.T, requests int, files ...string) (b *policytables.Book, says *bytes.Buffer) {
	t.Helper()
	says = &bytes.Buffer{}
	traces, err := policytables.ReadTraces(files)
	require.NoError(t, err)
	b = policytables.NewBook(t.Context(), policytables.Options{Quick: true, Files: files}, 1, says)
	b.Traces, b.Most = traces, requests
	return b, says
}

// FillPage fills a copy of the program's page, holds that the text around the tables stays, and
// returns what stands in each block. The test runs in bench/claims/NAME.
func FillPage[B page.Book](t *testing.T, p policytables.Program[B], b *policytables.Book) map[string]string {
	t.Helper()
	before, err := os.ReadFile(filepath.Join("..", "..", "..", p.Page()))
	require.NoError(t, err)
	b.Out = filepath.Join(t.TempDir(), "page.md")
	require.NoError(t, os.WriteFile(b.Out, before, 0o644))
	was, _ := cut(t, p, string(before))
	prose, tables := fill(t, p, b)
	require.Equal(t, was, prose)
	return tables
}

// FillNew fills a file that does not exist yet, and returns what stands in each block.
func FillNew[B page.Book](t *testing.T, p policytables.Program[B], b *policytables.Book) map[string]string {
	t.Helper()
	b.Out = filepath.Join(t.TempDir(), "new.md")
	_, tables := fill(t, p, b)
	return tables
}

// fill has the program write all its tables, each of which begins with its command.
func fill[B page.Book](t *testing.T, p policytables.Program[B], b *policytables.Book) (prose string, tables map[string]string) {
	t.Helper()
	require.NoError(t, p.Fill(b))
	text, err := os.ReadFile(b.Out)
	require.NoError(t, err)
	prose, tables = cut(t, p, string(text))
	for name, body := range tables {
		command := strings.Join(append([]string{"go run ./bench/claims/" + p.Name + " --only " + name + " --quick"}, b.Files...), " ")
		require.True(t, strings.HasPrefix(body, "`"+command+"`\n"), name)
		require.NotContains(t, body, "NaN", name)
		require.NotContains(t, body, "Inf", name)
	}
	return prose, tables
}

// cut divides a page into its text and its blocks.
func cut[B page.Book](t *testing.T, p policytables.Program[B], text string) (prose string, tables map[string]string) {
	t.Helper()
	tables = map[string]string{}
	for _, name := range page.Names(p.Blocks) {
		opening, closing := page.Markers(name, p.Target())
		before, rest, found := strings.Cut(text, opening)
		inside, after, closed := strings.Cut(rest, closing)
		require.True(t, found && closed, "the page has no place for %s", name)
		text, tables[name] = before+after, inside
	}
	return text, tables
}
