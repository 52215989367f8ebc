package main

import (
	"os"
	"regexp"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/require"
)

// TestOneVersionEverywhere: what a plain build says, the changelog's top and the chart.
func TestOneVersionEverywhere(t *testing.T) {
	changelog, err := os.ReadFile("../../CHANGELOG.md")
	require.NoError(t, err)
	top := regexp.MustCompile(`(?m)^## (\d+\.\d+\.\d+)`).FindStringSubmatch(string(changelog))
	require.NotNil(t, top, "the first section is named after a version")
	require.Equal(t, top[1]+"-dev", version)
	about := map[string]any{}
	text, err := os.ReadFile("../../configs/kubernetes/chart/Chart.yaml")
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(text, &about))
	require.Equal(t, "v"+top[1], about["appVersion"])
	require.Equal(t, top[1], about["version"])
}
