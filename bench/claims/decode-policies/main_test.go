package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/tools/policytables"
	"evenkeel/bench/tools/policytables/tabletest"
	"evenkeel/dispatcher/policy"
	"evenkeel/internal/race"
)

// small makes a book of runs that take no time and show nothing but their shape.
func small(t *testing.T, files ...string) (*book, *bytes.Buffer) {
	t.Helper()
	b, says := tabletest.Small(t, 600, files...)
	return program.Book(b), says
}

func TestAPageIsFilledAndItsTextKept(t *testing.T) {
	race.Alone(t)
	b, says := small(t)
	tables := tabletest.FillPage(t, program, b.Book)
	require.Contains(t, says.String(), "azure, 8 x 16, closed: ")

	for name, body := range tables {
		rows := 0
		for tab := range strings.SplitSeq(body, "\n\n") {
			if !strings.HasPrefix(tab, "| ") {
				continue
			}
			rows += strings.Count(tab, "\n") - 1
			if name == "claims" || name == "predictors" {
				continue
			}
			require.Contains(t, tab, "`jsq-kv`", "the baseline stands in every table of %s", name)
			require.Contains(t, tab, "`pjsq-kv`", "and so it does pooled")
			require.Contains(t, tab, "longest wait", name)
		}
		require.Positive(t, rows, name)
	}
	require.Contains(t, tables["predictors"], "trained on the first 900 requests, scored on the 300 after them")
	for _, item := range []string{"**1.", "**2.", "**3a.", "**3b.", "**4.", "**5."} {
		require.Contains(t, tables["claims"], item)
	}
	_, ofDefault, _ := strings.Cut(tables["claims"], "**5.")
	for _, sc := range append(b.closedLoops(), b.openLoops()...) {
		require.Equal(t, b.Done[sc.String()].Refused == "", strings.Contains(ofDefault, "| "+sc.String()+" |"),
			"%s has a line, if it is not too wide for so few requests", sc)
	}
}

func TestTheSameTablesAgain(t *testing.T) {
	var made []string
	for range 2 {
		b, _ := small(t)
		text := b.shortAnswers()
		require.NoError(t, b.Err())
		made = append(made, text)
	}
	require.Equal(t, made[0], made[1])
}

func TestOtherTraces(t *testing.T) {
	dir := t.TempDir()
	long, short := filepath.Join(dir, "long.csv"), filepath.Join(dir, "short.jsonl")
	var csv, lines strings.Builder
	csv.WriteString("TIMESTAMP,ContextTokens,GeneratedTokens\n")
	for i := range 900 {
		fmt.Fprintf(&csv, "%d.0,%d,%d\n", i, 100+37*(i%50), 5+(i*7)%90)
	}
	for i := range 40 {
		fmt.Fprintf(&lines, `{"timestamp":%d,"input_length":600,"output_length":%d,"hash_ids":[1,%d]}`+"\n", 3000*(i/4), 9+i%5, i%7)
	}
	require.NoError(t, os.WriteFile(long, []byte(csv.String()), 0o644))
	require.NoError(t, os.WriteFile(short, []byte(lines.String()), 0o644))

	b, _ := small(t, long, short)
	tables := tabletest.FillNew(t, program, b.Book)
	require.Contains(t, tables["closed"], "long.csv, 8 x 16, closed")
	require.Contains(t, tables["closed"], "Left out: 30 requests", "a trace too short for the fleet is no reason to show nothing")
	require.Contains(t, tables["claims"], "| long.csv, 8 x 16, closed |")
	for _, name := range []string{"drawn", "short", "reference"} {
		require.Contains(t, tables[name], notAsked)
	}
}

func TestAScenarioIsSimulatedOnce(t *testing.T) {
	b, says := small(t)
	sc := closed(b.Traces.Code, 4)
	b.at(sc, "jsq", "br0")
	o := b.at(sc, "br0", "jsq-kv")
	require.NoError(t, b.Err())
	require.Len(t, o.Metrics, 3)
	require.Equal(t, 2, strings.Count(says.String(), "\n"))
	require.Contains(t, says.String(), "synth:code, 4 x 16, closed: 1 policies")
}

func TestCommandsAreOfTheScenario(t *testing.T) {
	traces, err := policytables.ReadTraces(nil)
	require.NoError(t, err)
	full := policytables.NewBook(t.Context(), policytables.Options{}, program.Seeds, io.Discard)
	full.Traces = traces
	b := program.Book(full)
	sc := closed(b.Traces.Mooncake, 64)
	sc.pool, sc.capacity, sc.stale, sc.transfer = 128, 5000, 16, 4
	require.Equal(t,
		"evenkeel simulate --trace bench/lab/trace/mooncake-conversation.jsonl.gz --workers 64 --slots 16 --pool 128 --capacity 5000 "+
			"--stale 16 --transfer 4 --seeds 5 --policies jsq,br0:window=4,theta=0", b.command(sc, []string{"jsq", "br0:window=4,theta=0"}))
	require.Equal(t, "evenkeel simulate --trace synth:code --workers 8 --slots 16 --load 0.9 --seeds 5 --policies jsq",
		b.command(open(b.Traces.Code, 8, 0.9), []string{"jsq"}))
	require.Empty(t, b.command(closed(b.Traces.Azure200, 8), nil), "the command line has no such trace")
}

// TestSettingsAreDocumented holds the table of docs/policies.md against the
// policies: every key, its default and who takes it.
func TestSettingsAreDocumented(t *testing.T) {
	const policies = "docs/policies.md"
	page, err := os.ReadFile(filepath.Join("..", "..", "..", policies))
	require.NoError(t, err)
	_, settings, there := strings.Cut(string(page), "\n## Settings\n")
	require.True(t, there, policies)
	settings, _, _ = strings.Cut(settings, "\n## ")
	type entry struct{ key, value string }
	said := map[entry]string{} // whom the line names
	for line := range strings.Lines(settings) {
		if cells := strings.Split(line, "|"); len(cells) == 7 && strings.HasPrefix(line, "| `") {
			key := entry{strings.Trim(cells[1], " `"), strings.TrimSpace(cells[2])}
			said[key] += cells[4]
		}
	}
	for _, name := range policy.Names() {
		spec, err := policy.ParseSpec(name)
		require.NoError(t, err)
		_, err = spec.With("no such key", "")
		_, list, found := strings.Cut(err.Error(), "it takes ")
		require.True(t, found, err)
		if list == "none" {
			continue
		}
		base, preset, _ := strings.Cut(name, ":")
		for key := range strings.SplitSeq(list, ", ") {
			documented := false
			for e, who := range said {
				if e.key != key || !strings.Contains(who, "`"+base+"`") && !strings.Contains(who, "`"+name+"`") && !strings.Contains(who, "all but") {
					continue
				}
				set, err := spec.With(key, e.value)
				require.NoError(t, err)
				documented = documented || set.String() == name || preset == "paper" && key == "horizon"
			}
			require.True(t, documented, "%s takes %s: say so, with its default, in %s", name, key, policies)
		}
	}
}
