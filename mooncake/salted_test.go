package mooncake

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The salt that keeps a request from wrong blocks keeps those of different clients apart, too, and
// is one that engines take.
func TestASaltBesideTheClientsOwn(t *testing.T) {
	p := Profile{}.WithDefaults()
	salt := func(own, ours string) string {
		body := `{"model":"m","messages":[]}`
		if own != "" {
			body = `{"model":"m","messages":[],"cache_salt":` + own + `}`
		}
		var got struct {
			Salt any `json:"cache_salt"`
		}
		require.NoError(t, json.Unmarshal([]byte(join(p.DecodeBody(scan(t, body), Chat, nil, nil, ours, true, nil))), &got))
		s, _ := got.Salt.(string)
		return s
	}
	long := `"` + strings.Repeat("a", 128) + `"`
	require.Equal(t, "ours", salt("", "ours"))
	require.Equal(t, "own", salt(`"own"`, ""))
	require.Empty(t, salt(`""`, "ours"), "the engine says what it thinks of it")
	require.LessOrEqual(t, len(salt(long, "ours")), 128, "as many characters as vLLM takes")
	seen := map[string]bool{}
	for _, s := range []string{salt(long, "ours"), salt(`"own"`, "ours"), salt(`"own"`, "ours later"), salt(`"other"`, "ours")} {
		require.False(t, seen[s])
		seen[s] = true
	}
	require.Equal(t, salt(`"own"`, "ours"), salt(`"own"`, "ours"))
}
