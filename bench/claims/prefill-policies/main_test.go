package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/tools/policytables"
	"evenkeel/bench/tools/policytables/tabletest"
	"evenkeel/internal/race"
	"evenkeel/prefill/policy"
)

func TestAPageIsFilledAndItsTextKept(t *testing.T) {
	race.Alone(t)
	b, says := tabletest.Small(t, 300)
	tables := tabletest.FillPage(t, program, b)
	require.Contains(t, says.String(), "mooncake, load 0.95: ")
	for name, body := range tables {
		require.NotContains(t, body, "Left out", name)
	}
	mooncake, others, _ := strings.Cut(tables["loads"], "**azure, ")
	for _, p := range append(policy.Names(), own) {
		require.Equal(t, len(loads), strings.Count(mooncake, "\n| `"+p+"` |"), "%s at every load", p)
	}
	for _, p := range ofEachSort {
		require.Equal(t, 2*len(loads), strings.Count(others, "\n| `"+p+"` |"), "%s on Azure's trace and on the drawn one", p)
	}
	require.Contains(t, tables["loads"], "evenkeel simulate --tier prefill --load 0.5 --trace bench/lab/trace/mooncake-conversation.jsonl.gz "+
		"--requests 300 --seeds 1 --policies lmetric,")
	require.Equal(t, 17, strings.Count(tables["claims"], policytables.Pass)+strings.Count(tables["claims"],
		policytables.Fails)+strings.Count(tables["claims"], "weaker than published"))
}

func TestTablesNeedBlocks(t *testing.T) {
	var lines strings.Builder
	for i := range 40 {
		fmt.Fprintf(&lines, `{"timestamp":%d,"input_length":600,"output_length":9}`+"\n", 3000*(i/4))
	}
	path := filepath.Join(t.TempDir(), "plain.jsonl")
	require.NoError(t, os.WriteFile(path, []byte(lines.String()), 0o644))
	shared, _ := tabletest.Small(t, 600, path)
	b := program.Book(shared)
	text := b.claims()
	require.NoError(t, b.Err())
	require.Contains(t, text, "No trace says which prompts share blocks")
}
