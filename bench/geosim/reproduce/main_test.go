package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/report"
)

func TestTheDocumentHasAPlaceForEveryTable(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "geo.md"))
	require.NoError(t, err)
	for _, name := range report.Names(blocks) {
		opening, closing := report.Markers(name, target)
		_, rest, found := strings.Cut(string(text), opening)
		require.True(t, found, name)
		require.Contains(t, rest, closing)
	}
}

func TestRunWritesWhatItIsAskedFor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "geo.md")
	page := "<!-- geo-faults: written by `make reproduce-geo` -->\n<!-- end of geo-faults -->\n"
	require.NoError(t, os.WriteFile(path, []byte(page), 0o600))
	require.ErrorContains(t, run(t.Context(), path, 1, "no-table"), "-only no-table: there are geo-default")
	require.ErrorContains(t, run(t.Context(), path, 0, ""), "-seeds 0")
	if testing.Short() {
		t.Skip("simulates")
	}
	require.NoError(t, run(t.Context(), path, 1, "geo-faults"))
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	for _, fault := range []string{"dies", "partition", "drains", "version"} {
		require.Contains(t, string(text), "| "+fault+" | `finish` |")
	}
	require.NotContains(t, string(text), "NaN")
}
