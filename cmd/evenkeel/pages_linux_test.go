package main

import (
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheProgramIsForgottenAndRunsOn(t *testing.T) {
	before := filePages(t)
	require.NoError(t, dropProgramPages())
	require.Less(t, filePages(t), before*3/4, "the rest is what this test runs")
	status, out, _ := line("version")
	require.Zero(t, status)
	require.Contains(t, out, "evenkeel")
}

// filePages is how many kB of files this process has in memory.
func filePages(t *testing.T) int {
	text, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	m := regexp.MustCompile(`RssFile:\s+(\d+) kB`).FindSubmatch(text)
	require.NotNil(t, m, string(text))
	kB, err := strconv.Atoi(string(m[1]))
	require.NoError(t, err)
	return kB
}
