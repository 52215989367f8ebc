package testbed

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWhatARowShows(t *testing.T) {
	r := &Report{Head: "three of them", Folder: "here"}
	r.Add("kept", "all")
	r.Add("broken", "%d", 1)
	r.Print("seen", "some")
	r.Hold(true, "kept", "never")
	r.Hold(false, "broken", "told")
	r.Skip("left", "why")
	other := &Report{}
	other.Add("kept", "more")
	other.Hold(false, "kept", "no")
	r.Join("other: ", other)
	require.Equal(t, []Row{
		{"kept", "all", "held"}, {"broken", "1", "**not held**"}, {"seen", "some", "printed"}, {"left", "why", "skipped"}, {"other: kept", "more", "**not held**"},
	}, r.Rows)
	require.Equal(t, []string{"broken: told", "kept: no"}, r.Breaches)
	var page strings.Builder
	r.Write(&page)
	require.Contains(t, page.String(), "three of them\n\n| what | measured | |\n|---|---|---|\n| kept | all | held |\n")
	require.Contains(t, page.String(), "\nBREACH broken: told\n")
	require.Contains(t, page.String(), "\nhere has the configs and logs\n")
}

func TestMedians(t *testing.T) {
	require.InDelta(t, 2.0, Median([]float64{3, 1, 2}), 1e-9)
	require.InDelta(t, 1.5, Median([]float64{2, 1}), 1e-9, "of two it is not the larger one")
}
