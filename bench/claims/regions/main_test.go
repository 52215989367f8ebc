package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/tools/page"
	"evenkeel/internal/race"
)

func TestTheDocumentHasAPlaceForEveryTable(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "results", "regions.md"))
	require.NoError(t, err)
	for _, name := range page.Names(blocks) {
		opening, closing := page.Markers(name, makes)
		_, rest, found := strings.Cut(string(text), opening)
		require.True(t, found, name)
		require.Contains(t, rest, closing)
	}
}

func TestRunWritesWhatItIsAskedFor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "geo.md")
	page := "<!-- geo-faults: written by `make claim NAME=regions` -->\n<!-- end of geo-faults -->\n"
	require.NoError(t, os.WriteFile(path, []byte(page), 0o600))
	require.ErrorContains(t, run(t.Context(), path, 1, "no-table"), "-only no-table: there are geo-default")
	require.ErrorContains(t, run(t.Context(), path, 0, ""), "-seeds 0")
	if testing.Short() {
		t.Skip("simulates")
	}
	race.Alone(t)
	require.NoError(t, run(t.Context(), path, 1, "geo-faults"))
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	for _, fault := range []string{"dies", "partition", "drains", "version"} {
		require.Contains(t, string(text), "| "+fault+" | `finish` |")
	}
	require.NotContains(t, string(text), "NaN")
}

func TestAVerdictComparesThePrintedFigureWithThePrintedLimit(t *testing.T) {
	limits := target{mostTTFT: 0.75, leastTokens: 1.05}
	require.True(t, limits.met(0.7549, 1.0451), "they are printed as 0.75 and 1.05")
	require.False(t, limits.met(0.7551, 1.0451))
	require.False(t, limits.met(0.7549, 1.0449))
	require.Equal(t, "≤ 0.75, ≥ 1.05", limits.String())
	require.Equal(t, "0.97 to 1.03, any", target{leastTTFT: 0.97, mostTTFT: 1.03}.String())
}
