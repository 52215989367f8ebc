package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestATableGoesBetweenItsMarkers(t *testing.T) {
	page := "# Title\n<!-- x: written by `make reproduce-geo` -->\nold\n<!-- end of x -->\ntail\n"
	got, err := put(page, "x", "\nnew\n\n")
	require.NoError(t, err)
	require.Equal(t, "# Title\n<!-- x: written by `make reproduce-geo` -->\nnew\n<!-- end of x -->\ntail\n", got)
	_, err = put("nothing", "x", "new")
	require.ErrorContains(t, err, "no place for a table: put the lines")
}

func TestTheDocumentHasAPlaceForEveryTable(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "geo.md"))
	require.NoError(t, err)
	for _, name := range names() {
		_, err := put(string(text), name, "x")
		require.NoError(t, err)
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
