// Package claims has the rules of its folders: each is the program of a page, and each page is in
// the table of claims.
package claims

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the table of docs/evidence.md anew")

const (
	table    = "../README.md"
	evidence = "../../docs/evidence.md"
	results  = "../../docs/results"

	opening = "<!-- claims: written by `go test ./bench/claims -update` -->\n"
	closing = "<!-- end of claims -->\n"
)

func read(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(b)
}

// rows are the lines of the table of claims, its head first.
func rows(t *testing.T) []string {
	t.Helper()
	_, claims, found := strings.Cut(read(t, table), "\n## Claims\n")
	require.True(t, found, table)
	var all []string
	for line := range strings.Lines(claims) {
		if strings.HasPrefix(line, "|") {
			require.Equal(t, 8, strings.Count(line, "|"), "claim, measured on, compared with, verdict, page, command and minutes: %s", line)
			all = append(all, line)
		}
	}
	require.Greater(t, len(all), 2)
	return all
}

// Evidence has the table of claims, with its links from where it is.
func TestEvidenceIsTheTableOfClaims(t *testing.T) {
	page := read(t, evidence)
	before, rest, found := strings.Cut(page, opening)
	_, after, closed := strings.Cut(rest, closing)
	require.True(t, found && closed, "%s has no place for the table", evidence)
	from := strings.NewReplacer("](../docs/evidence.md#", "](#", "](../docs/", "](")
	want := before + opening + from.Replace(strings.Join(rows(t), "")) + closing + after
	if *update {
		require.NoError(t, os.WriteFile(evidence, []byte(want), 0o644))
	}
	require.Equal(t, want, read(t, evidence), "run go test ./bench/claims -update")
}

var named = regexp.MustCompile("`make claim NAME=([a-z-]+)`")

// Each page of results has a row, each folder here writes a page, and each command is one that
// there is.
func TestEachPageHasItsProgram(t *testing.T) {
	claims := strings.Join(rows(t), "")
	pages, err := filepath.Glob(results + "/*.md")
	require.NoError(t, err)
	require.NotEmpty(t, pages)
	for _, page := range pages {
		name := filepath.Base(page)
		require.Contains(t, claims, "../docs/results/"+name, "no claim has this page")
		name = strings.TrimSuffix(name, ".md")
		_, here := os.Stat(name)
		_, rig := os.Stat("../rigs/" + name)
		require.True(t, here == nil || rig == nil, "no program writes %s", page)
	}
	folders, err := os.ReadDir(".")
	require.NoError(t, err)
	for _, f := range folders {
		if f.IsDir() {
			require.FileExists(t, filepath.Join(results, f.Name()+".md"), "the folder is named for its page")
			require.FileExists(t, filepath.Join(f.Name(), "main.go"))
		}
	}
	for _, m := range named.FindAllStringSubmatch(claims, -1) {
		_, here := os.Stat(m[1])
		_, rig := os.Stat("../rigs/" + m[1])
		require.True(t, here == nil || rig == nil, "%s: there is no such claim", m[0])
	}
}
