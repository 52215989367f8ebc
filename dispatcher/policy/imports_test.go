package policy

import (
	"go/build"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestImportsArePure(t *testing.T) { // a policy that can reach the network or the clock is no longer a policy
	pkg, err := build.ImportDir(".", 0)
	require.NoError(t, err)
	pure := []string{"cmp", "errors", "fmt", "math", "math/bits", "math/rand/v2", "slices", "sort", "strconv", "strings",
		"evenkeel/dispatcher/rounds", "evenkeel/dispatcher/subset", "evenkeel/internal/namedargs"}
	require.Subset(t, pure, pkg.Imports, "let the board read it and put the value in Snapshot")
}
