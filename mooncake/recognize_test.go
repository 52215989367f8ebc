package mooncake

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every hand-off of a known version is told apart from those of other connectors, except the
// oldest.
func TestTheConnectorOfAnAnswer(t *testing.T) {
	files, err := filepath.Glob("testdata/handoffs/*.json")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		kv, err := os.ReadFile(file)
		require.NoError(t, err)
		name := filepath.Base(file)
		got := ConnectorOf(fmt.Appendf(nil, `{"choices":[],"kv_transfer_params":%s}`, kv))
		if name == "ascend-mooncake-v1-0.10.2.json" { // it has what all have, and nothing else
			require.Empty(t, got)
			continue
		}
		require.NotEmpty(t, got, name)
		require.True(t, strings.HasPrefix(name, got), "%s is of %s", name, got)
	}
	for _, answer := range []string{``, `{}`, `{"kv_transfer_params":null}`, `{"kv_transfer_params":[]}`, `{"kv_transfer_params":{"do_remote_prefill":true}}`} {
		require.Empty(t, ConnectorOf([]byte(answer)))
	}
}
