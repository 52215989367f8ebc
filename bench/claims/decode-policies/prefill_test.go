package main

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
	"evenkeel/prefill/policy"
)

func TestThePrefillDocumentIsFilledAndItsTextKept(t *testing.T) {
	race.Alone(t)
	ours := text(t, filepath.Join("..", "..", "..", prefillDocument))
	path := written(t, "prefill.md", ours)
	b, says := small(t, options{tier: "prefill"})
	b.most = 300
	require.NoError(t, b.fill(path, nil))
	require.Contains(t, says.String(), "mooncake, load 0.95: ")
	prose, tables := parts(t, text(t, path), prefillBlocks)
	was, _ := parts(t, ours, prefillBlocks)
	require.Equal(t, was, prose)
	for name, body := range tables {
		require.True(t, strings.HasPrefix(body, "`go run ./bench/claims/decode-policies --tier prefill --only "+name+" --quick`\n"), name)
		require.NotContains(t, body, "NaN", name)
		require.NotContains(t, body, "Left out", name)
	}
	mooncake, others, _ := strings.Cut(tables["prefill-loads"], "**azure, ")
	for _, p := range append(policy.Names(), own) {
		require.Equal(t, len(prefillLoads), strings.Count(mooncake, "\n| `"+p+"` |"), "%s at every load", p)
	}
	for _, p := range ofEachSort {
		require.Equal(t, 2*len(prefillLoads), strings.Count(others, "\n| `"+p+"` |"), "%s on Azure's trace and on the drawn one", p)
	}
	require.Contains(t, tables["prefill-loads"], "evenkeel simulate --tier prefill --load 0.5 --trace bench/lab/trace/mooncake-conversation.jsonl.gz --requests 300 --seeds 1 --policies lmetric,")
	require.Equal(t, 13, strings.Count(tables["prefill-claims"], pass)+strings.Count(tables["prefill-claims"], fails))
}

func TestPrefillTablesNeedBlocks(t *testing.T) {
	var lines strings.Builder
	for i := range 40 {
		fmt.Fprintf(&lines, `{"timestamp":%d,"input_length":600,"output_length":9}`+"\n", 3000*(i/4))
	}
	b, _ := small(t, options{tier: "prefill", traces: []string{written(t, "plain.jsonl", lines.String())}})
	text := b.prefillClaims()
	require.NoError(t, b.Err())
	require.Contains(t, text, "No trace says which prompts share blocks")
}
