package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/tools/page"
	"evenkeel/bench/tools/policytables"
	"evenkeel/internal/race"
)

func TestTheDocumentHasAPlaceForEveryTable(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "..", filepath.FromSlash(program.Page())))
	require.NoError(t, err)
	for _, name := range page.Names(program.Blocks) {
		opening, closing := page.Markers(name, program.Target())
		_, rest, found := strings.Cut(string(text), opening)
		require.True(t, found, name)
		require.Contains(t, rest, closing)
	}
}

func TestRunWritesWhatItIsAskedFor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "geo.md")
	page := "<!-- geo-faults: written by `make claim NAME=regions` -->\n<!-- end of geo-faults -->\n"
	require.NoError(t, os.WriteFile(path, []byte(page), 0o600))
	if testing.Short() {
		t.Skip("simulates")
	}
	race.Alone(t)
	o := policytables.Options{Out: path, Quick: true, Only: []string{"geo-faults"}}
	require.NoError(t, program.Fill(policytables.NewBook(t.Context(), o, program.Seeds, io.Discard)))
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
