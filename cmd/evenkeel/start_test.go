//go:build !race

package main

import (
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What a package prepares when the program starts, every process has in memory for good, also one
// that never needs it (under the race detector it is another amount). Make a table when it is first
// asked for.
func TestNoPackagePreparesMuchAtTheStart(t *testing.T) {
	cmd := exec.Command(os.Args[0], "version")
	cmd.Env = append(os.Environ(), asEvenkeel+"=1", "GODEBUG=inittrace=1")
	var trace strings.Builder
	cmd.Stderr = &trace
	require.NoError(t, cmd.Run())
	list, err := exec.Command("go", "list", "-deps", ".").Output()
	require.NoError(t, err)
	deps := strings.Fields(string(list)) // the tests have more, and so has this package with them
	deps = deps[:len(deps)-1]
	inits := regexp.MustCompile(`(?m)^init (\S+) .* (\d+) bytes, `).FindAllStringSubmatch(trace.String(), -1)
	require.NotEmpty(t, inits, trace.String())
	for _, m := range inits {
		if !slices.Contains(deps, m[1]) {
			continue
		}
		most := 256 << 10
		if strings.HasPrefix(m[1], "evenkeel/") {
			most = 32 << 10
		}
		bytes, err := strconv.Atoi(m[2])
		require.NoError(t, err)
		require.LessOrEqual(t, bytes, most, "of package %s", m[1])
	}
}
