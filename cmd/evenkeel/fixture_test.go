package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCheckDecidesCases(t *testing.T) {
	cfg := filepath.Join("..", "..", "configs", "evenkeel.yaml")
	for _, tt := range []struct {
		name, cases, says string
		status            int
	}{
		{"all as wanted", `[{"name":"x","policy":"lmetric","request":{"prompt_tokens":64},"want":"b","candidates":[{"id":"a","bs":4},{"id":"b"}]}]`, "ok   x: lmetric chooses b", 0},
		{"the config's policy", `[{"name":"x","request":{"prompt_tokens":64},"want":"b","candidates":[{"id":"a","backlog_ms":4},{"id":"b"}]}]`, "finish chooses b", 0},
		{"another is chosen", `[{"name":"x","policy":"lmetric","request":{"prompt_tokens":64},"want":"a","candidates":[{"id":"a","bs":4},{"id":"b"}]}]`, "FAIL x: lmetric chooses b, not a; scores: b 64, a 320", 1},
		{"an indicator that does not exist", `[{"name":"x","request":{"prompt_tokens":64},"want":"a","candidates":[{"id":"a","batch":4}]}]`, `no value is called "batch"; there are matched_tokens, active_blocks`, 1},
		{"a candidate that does not exist", `[{"name":"x","request":{"prompt_tokens":64},"want":"c","candidates":[{"id":"a"}]}]`, `want is "c"`, 1},
		{"a policy that does not exist", `[{"name":"x","policy":"best","request":{"prompt_tokens":64},"want":"a","candidates":[{"id":"a"}]}]`, "case 1 (x): ", 1},
		{"no prompt", `[{"name":"x","want":"a","candidates":[{"id":"a"}]}]`, "request.prompt_tokens", 1},
		{"a key that does not exist", `[{"nome":"x"}]`, "unknown field", 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "cases.json")
			require.NoError(t, os.WriteFile(file, []byte(tt.cases), 0o600))
			status, out, errs := line("check", "-c", cfg, "--fixture", file)
			require.Equal(t, tt.status, status, "%s%s", out, errs)
			require.Contains(t, out+errs, tt.says)
		})
	}
	_, out, _ := line("check", "-c", cfg, "--fixture", filepath.Join("..", "..", "configs", "prefill-cases.json"))
	require.NotContains(t, out, "FAIL")
	require.Contains(t, out, "ok   the product weighs hits")
}
