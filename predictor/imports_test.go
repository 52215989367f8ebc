package predictor

import (
	"go/build"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestImportsArePure(t *testing.T) { // a predictor that can reach the network or the clock cannot be replayed
	pkg, err := build.ImportDir(".", 0)
	require.NoError(t, err)
	pure := []string{"bytes", "cmp", "container/list", "encoding/binary", "encoding/json", "errors", "fmt", "maps", "math", "slices", "sort",
		"time"}
	require.Subset(t, pure, pkg.Imports, "let the caller do it and pass the value in")
}
