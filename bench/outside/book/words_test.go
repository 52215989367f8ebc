package main

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// mostWords is how long a page may be, in words that a person wrote: what one
// reader finishes in one sitting. Pages of results are in it only where their
// tables are written by hand, too.
var mostWords = map[string]int{
	"README.md": 900, "docs/quickstart.md": 1200, "docs/fit.md": 2150, "docs/trial.md": 500, "docs/how-it-works.md": 1300,
	"docs/comparison.md": 1775, "docs/glossary.md": 1700, "docs/contents.md": 200,
	"docs/migrate.md": 4550,
	"docs/operate.md": 4525, "docs/engines.md": 4000, "docs/connectors.md": 2575, "docs/aggregated.md": 1625,
	"docs/runbook.md": 7375, "docs/errors.md": 1525, "docs/failures.md": 2150, "docs/limits.md": 1400,
	"docs/fleet.md": 4500, "SECURITY.md": 2000, "docs/traces.md": 2000,
	"docs/policies.md": 2450, "docs/prefill.md": 2500, "docs/evidence.md": 900,
	"ARCHITECTURE.md": 4175, "CONTRIBUTING.md": 1130, "docs/testing.md": 2350, "CHANGELOG.md": 3500,
	"docs/results/laws.md": 1280, "docs/rollouts.md": 750,
}

const (
	mostInResults = 305
	mostInAll     = 68_000
)

// generated pages are written by programs as a whole.
var generated = []string{"docs/configuration.md", "docs/metrics.md", "docs/openapi.yaml"}

// writtenByPrograms are the regions of a page that a program writes.
var writtenByPrograms = []*regexp.Regexp{
	regexp.MustCompile(`(?s)<!-- [\w-]+: written by .*?<!-- end of [\w-]+ -->`),
	regexp.MustCompile(`(?s)<!-- written by go test ./gateway .*?<!-- end -->`), // docs/failures.md
	regexp.MustCompile(`(?s)<!-- waits -->.*?<!-- end of waits -->`),
}

// No page grows past what its reader has time for. `go test -v -run Words` prints
// the words of each page.
func TestWordsOfPages(t *testing.T) {
	b, err := read(repository, "")
	require.NoError(t, err)
	pages := []string{contentsFile}
	for _, c := range b.chapters {
		if !slices.Contains(generated, c.source) {
			pages = append(pages, c.source)
		}
	}
	all := 0
	for _, page := range pages {
		text, err := os.ReadFile(filepath.Join(repository, page))
		require.NoError(t, err)
		for _, region := range writtenByPrograms {
			text = region.ReplaceAll(text, nil)
		}
		most, listed := mostWords[page]
		if !listed && strings.HasPrefix(page, "docs/results/") {
			most, listed = mostInResults, true
		}
		words := len(strings.Fields(string(text)))
		all += words
		t.Logf("%6d of %5d  %s", words, most, page)
		assert.True(t, listed, "%s: say in mostWords how long it may be", page)
		assert.LessOrEqual(t, words, most, "%s: say it shorter, or in the page where its reader looks", page)
	}
	t.Logf("%6d of %5d  in all", all, mostInAll)
	assert.LessOrEqual(t, all, mostInAll)
	for page := range maps.Keys(mostWords) {
		assert.Contains(t, pages, page, "mostWords has a page that is gone")
	}
}
