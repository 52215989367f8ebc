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

	"evenkeel/bench/lab/trace"
	"evenkeel/bench/tools/page"
	"evenkeel/dispatcher/policy"
	"evenkeel/internal/race"
)

func written(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

func text(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}

func TestWhereTablesGo(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		want options
	}{
		{"our traces fill our document", nil, options{tier: "decode", out: document}},
		{"a quick run does not", []string{"--quick"}, options{tier: "decode", out: scratch, quick: true, traces: []string{}}},
		{"nor do a user's traces", []string{"a.csv", "b.jsonl"}, options{tier: "decode", out: scratch, traces: []string{"a.csv", "b.jsonl"}}},
		{"unless that is said", []string{"--quick", "--out", "x.md", "a.csv"}, options{tier: "decode", out: "x.md", quick: true, traces: []string{"a.csv"}}},
		{"the other tier's go to its own", []string{"--tier", "prefill"}, options{tier: "prefill", out: prefillDocument, traces: []string{}}},
		{"some tables", []string{"--only", "open,claims"}, options{tier: "decode", out: document, only: []string{"open", "claims"}, traces: []string{}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := parse(c.args, io.Discard)
			require.NoError(t, err)
			require.Equal(t, c.want, got)
		})
	}
	var says bytes.Buffer
	_, err := parse([]string{"--only", "opened"}, &says)
	require.ErrorContains(t, err, "--only opened: there are closed, scaling")
	require.Contains(t, says.String(), "there are closed")
}

// small makes a book of runs that take no time and show nothing but their shape.
func small(t *testing.T, o options) (*book, *bytes.Buffer) {
	t.Helper()
	var says bytes.Buffer
	o.quick = true
	b, err := newBook(t.Context(), o, &says)
	require.NoError(t, err)
	b.most = 600
	return b, &says
}

// parts cuts a document into text and blocks.
func parts(t *testing.T, doc string, blocks []page.Block[*book]) (prose string, tables map[string]string) {
	t.Helper()
	tables = map[string]string{}
	for _, name := range page.Names(blocks) {
		o := options{}
		if strings.HasPrefix(name, "prefill-") {
			o.tier = "prefill"
		}
		opening, closing := page.Markers(name, o.target())
		before, rest, found := strings.Cut(doc, opening)
		inside, after, closed := strings.Cut(rest, closing)
		require.True(t, found && closed, "the document has no place for %s", name)
		doc, tables[name] = before+after, inside
	}
	return doc, tables
}

func TestADocumentIsFilledAndItsTextKept(t *testing.T) {
	race.Alone(t)
	ours := text(t, filepath.Join("..", "..", "..", document))
	path := written(t, "decode-policies.md", ours)
	b, says := small(t, options{})
	require.NoError(t, b.fill(path, nil))
	require.Contains(t, says.String(), "azure, 8 x 16, closed: ")
	filled := text(t, path)
	prose, tables := parts(t, filled, blocks)
	was, _ := parts(t, ours, blocks)
	require.Equal(t, was, prose)

	for name, body := range tables {
		require.True(t, strings.HasPrefix(body, "`go run ./bench/claims/decode-policies --only "+name+" --quick`\n"), name)
		require.NotContains(t, body, "NaN", name)
		require.NotContains(t, body, "Inf", name)
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
	for _, item := range []string{"**1.", "**2.", "**3a.", "**3b.", "**4.", "**5."} {
		require.Contains(t, tables["claims"], item)
	}
	_, ofDefault, _ := strings.Cut(tables["claims"], "**5.")
	for _, sc := range append(b.closedLoops(), b.openLoops()...) {
		require.Equal(t, b.Done[sc.String()].Refused == "", strings.Contains(ofDefault, "| "+sc.String()+" |"), "%s has a line, if it is not too wide for so few requests", sc)
	}
}

func TestTheSameTablesAgain(t *testing.T) {
	var made []string
	for range 2 {
		b, _ := small(t, options{})
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

	out := filepath.Join(dir, "out.md")
	b, _ := small(t, options{traces: []string{long, short}})
	require.NoError(t, b.fill(out, nil))
	_, tables := parts(t, text(t, out), blocks)
	require.Contains(t, tables["closed"], "`go run ./bench/claims/decode-policies --only closed --quick "+long+" "+short+"`")
	require.Contains(t, tables["closed"], "long.csv, 8 x 16, closed")
	require.Contains(t, tables["closed"], "Left out: 30 requests", "a trace too short for the fleet is no reason to show nothing")
	require.Contains(t, tables["claims"], "| long.csv, 8 x 16, closed |")
	for _, name := range []string{"drawn", "short", "reference"} {
		require.Contains(t, tables[name], notAsked)
	}

	_, err := newBook(t.Context(), options{traces: []string{filepath.Join(dir, "none.csv")}}, io.Discard)
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestTracesOfOneNameAreToldApart(t *testing.T) {
	dir := t.TempDir()
	var paths []string
	for _, sub := range []string{"a", "b"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, sub), 0o755))
		path := filepath.Join(dir, sub, "t.csv")
		require.NoError(t, os.WriteFile(path, []byte("0.0,5,5\n1.0,5,5\n"), 0o644))
		paths = append(paths, path)
	}
	s, err := newSources(paths)
	require.NoError(t, err)
	require.Equal(t, "t.csv", s.real[0].name)
	require.Equal(t, "t.csv (2)", s.real[1].name)
}

func TestAScenarioIsSimulatedOnce(t *testing.T) {
	b, says := small(t, options{})
	sc := closed(b.traces.code, 4)
	b.at(sc, "jsq", "br0")
	o := b.at(sc, "br0", "jsq-kv")
	require.NoError(t, b.Err())
	require.Len(t, o.Metrics, 3)
	require.Equal(t, 2, strings.Count(says.String(), "\n"))
	require.Contains(t, says.String(), "synth:code, 4 x 16, closed: 1 policies")
}

func TestCommandsAreOfTheScenario(t *testing.T) {
	b, err := newBook(t.Context(), options{}, io.Discard)
	require.NoError(t, err)
	sc := closed(b.traces.moon, 64)
	sc.pool, sc.capacity, sc.stale, sc.transfer = 128, 5000, 16, 4
	require.Equal(t, "evenkeel simulate --trace bench/lab/trace/mooncake-conversation.jsonl.gz --workers 64 --slots 16 --pool 128 --capacity 5000 "+
		"--stale 16 --transfer 4 --seeds 5 --policies jsq,br0:window=4,theta=0", b.command(sc, []string{"jsq", "br0:window=4,theta=0"}))
	require.Equal(t, "evenkeel simulate --trace synth:code --workers 8 --slots 16 --load 0.9 --seeds 5 --policies jsq", b.command(open(b.traces.code, 8, 0.9), []string{"jsq"}))
	require.Empty(t, b.command(closed(b.traces.azure200, 8), nil), "the command line has no such trace")
	for _, s := range b.traces.real {
		read, err := trace.Read(filepath.Join("..", "..", "..", s.flag), trace.Options{})
		require.NoError(t, err)
		require.Equal(t, s.from.Trace, read, "the command names the same trace")
	}
}

// TestSettingsAreDocumented holds the table of docs/policies.md against the
// policies: every key, its default and who takes it.
func TestSettingsAreDocumented(t *testing.T) {
	const policies = "docs/policies.md"
	_, settings, there := strings.Cut(text(t, filepath.Join("..", "..", "..", policies)), "\n## Settings\n")
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
