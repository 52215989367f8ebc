package recording

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRecordingsAreSmallAndTellNothingOfTheirMachine: the files stay below 2 MB, and no path or
// address of the machine that made them is in them.
func TestRecordingsAreSmallAndTellNothingOfTheirMachine(t *testing.T) {
	const most = 2_000_000
	paths := regexp.MustCompile(`"/(opt|work|tmp|root|home|usr|var)/|/site-packages/`)
	hosts := regexp.MustCompile(`\b\d{1,3}(\.\d{1,3}){3}\b`)
	files, err := filepath.Glob(filepath.Join(Dir(), "*"))
	require.NoError(t, err)
	total := 0
	for _, file := range files {
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		total += len(raw)
		require.False(t, paths.Match(raw), "%s has a path: %s", file, paths.Find(raw))
		for _, host := range hosts.FindAllString(string(raw), -1) {
			require.Contains(t, []string{"127.0.0.1", "0.0.0.0"}, host, file)
		}
	}
	require.Less(t, total, most, "bytes in %s", Dir())
	t.Logf("%d files of %d bytes", len(files), total)
}

// TestEverySituationIsThere: what the recordings are for cannot be lost by recording anew with
// fewer engines.
func TestEverySituationIsThere(t *testing.T) {
	all, err := All()
	require.NoError(t, err)
	engines, statuses, ends := map[string]int{}, map[int]int{}, map[string]int{}
	streams := 0
	for _, r := range all {
		engines[r.Engine]++
		statuses[r.Status]++
		ends[r.End]++
		if r.Streams() {
			streams++
		}
		require.NotEmpty(t, r.About, r.Name)
		if r.Ask.Path == "/version" {
			var said struct {
				Version string `json:"version"`
			}
			require.NoError(t, json.Unmarshal(r.Body(), &said))
			require.Equal(t, "vllm-"+said.Version, filepath.Base(Dir()))
		}
	}
	for _, engine := range []string{"plain", "prefill", "decode"} {
		require.Greater(t, engines[engine], 15, engine)
	}
	for _, status := range []int{200, 400, 404, 405} {
		require.Positive(t, statuses[status], status)
	}
	require.Positive(t, ends[Left])
	require.Greater(t, streams, 50)
	events, err := KVEvents()
	require.NoError(t, err)
	require.NotEmpty(t, events.Live)
	require.NotEmpty(t, events.Replay)
}
