package mooncake

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The hand-offs of every version in docs/engines.md are read. Those that name no
// request are the ones whose decode request needs the probe's id.
func TestHandoffsOfEveryVersion(t *testing.T) {
	unnamed := map[string]bool{"ascend-mooncake-v1-0.10.2": true, "ascend-mooncake-v1-0.11.0": true, "ascend-mooncake-v1-0.13.0": true,
		"nixl-pull-0.11.0": true}
	page, err := os.ReadFile(filepath.Join("..", "docs", "engines.md"))
	require.NoError(t, err)
	files, err := filepath.Glob(filepath.Join("testdata", "handoffs", "*.json"))
	require.NoError(t, err)
	require.Equal(t, len(files), strings.Count(string(page), ".json` |"), "docs/engines.md lists those that are recorded")
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".json")
		t.Run(name, func(t *testing.T) {
			require.Contains(t, string(page), "`"+name+".json` |", "docs/engines.md has no row of it")
			raw, err := os.ReadFile(file)
			require.NoError(t, err)
			kv := strings.TrimSpace(string(raw))
			connector := AscendMooncakeV1
			if strings.HasPrefix(name, NIXLPull) {
				connector = NIXLPull
			}
			p := Profile{Connector: connector}.WithDefaults()
			a, err := p.ReadProbe([]byte(strings.Replace(chatAnswer, "KV", kv, 1)), nil, known)
			require.NoError(t, err)
			require.Equal(t, json.RawMessage(kv), a.KV)
			require.Equal(t, unnamed[name], a.ReusesRequestID)
		})
	}
}
