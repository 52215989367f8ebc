package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/page"
	"evenkeel/bench/real/vllm"
	"evenkeel/bench/report"
	"evenkeel/mooncake"
)

// verdict is what became of a row.
type verdict string

const (
	pass verdict = "pass"
	fail verdict = "FAIL"
	// unsteady: the plain engine differs from itself, and evenkeel from it by no
	// more.
	unsteady verdict = "not deterministic"
	// fault is one of the engine, which it shows without evenkeel, too.
	fault verdict = "engine's fault"
)

// outcome is a verdict and what was seen.
type outcome struct {
	verdict verdict
	seen    string
}

func passed(format string, args ...any) outcome { return outcome{pass, fmt.Sprintf(format, args...)} }
func failed(format string, args ...any) outcome { return outcome{fail, fmt.Sprintf(format, args...)} }

// row is a line of the table.
type row struct {
	name    string
	engines []string // that must run
	run     func(ctx context.Context, w *site) outcome
}

// choose returns the rows whose names match.
func choose(all []row, pattern *regexp.Regexp) (chosen []row) {
	for _, r := range all {
		if pattern.MatchString(r.name) {
			chosen = append(chosen, r)
		}
	}
	return chosen
}

func names(all []row) string {
	var list []string
	for _, r := range all {
		list = append(list, r.name)
	}
	return strings.Join(list, "; ")
}

// play runs a row. An engine that does not start is a failure of the row. One that keeps blocks for
// ever is at fault, and has them back for the next row by being started again.
func play(ctx context.Context, w *site, r row) outcome {
	if err := w.need(ctx, r.engines...); err != nil {
		return failed("%v", err)
	}
	clear(w.kept)
	o := r.run(ctx, w)
	for _, name := range slices.Sorted(maps.Keys(w.kept)) {
		w.engines[name].Stop()
		if o.seen += "; " + w.kept[name]; o.verdict == pass {
			o.verdict = fault
		}
	}
	return o
}

// table is the rows that were run.
type table struct {
	connector        string
	rows             []row
	outcomes         []outcome
	version, command string
	took             time.Duration
	part             bool // there are rows that were not chosen
}

func (t *table) add(r row, o outcome) { t.rows, t.outcomes = append(t.rows, r), append(t.outcomes, o) }

func (t *table) failed() bool { return t.count(fail) > 0 }

func (t *table) count(v verdict) (n int) {
	for _, o := range t.outcomes {
		if o.verdict == v {
			n++
		}
	}
	return n
}

// write prints the table as Markdown.
func (t *table) write(out io.Writer) {
	fmt.Fprintf(out, "\n%s with NIXL %s on a CPU, one prefill engine, two decode engines, one plain engine. A plugin has NIXL's progress threads sleep instead of spin "+
		"and leaves the engines' main threads on all cores; nothing that they compute is changed. Made by `%s`", t.version, vllm.NIXL, t.command)
	if t.part {
		fmt.Fprintf(out, ", where several runs of some rows each may have made it.\n\n")
	} else {
		fmt.Fprintf(out, " in %.1f minutes.\n\n", t.took.Minutes())
	}
	fmt.Fprintf(out, "| row | | seen |\n|---|---|---|\n")
	for i, r := range t.rows {
		fmt.Fprintf(out, "| %s | %s | %s |\n", r.name, t.outcomes[i].verdict, strings.NewReplacer("|", `\|`, "\n", " ").Replace(t.outcomes[i].seen))
	}
	fmt.Fprintf(out, "\n%d rows: %d pass, %d FAIL, %d not deterministic, %d engine's fault.\n", len(t.rows), t.count(pass), t.count(fail), t.count(unsteady), t.count(fault))
}

// keep puts the rows of an earlier table, which were not run now, where they belong.
func (t *table) keep(earlier string) {
	then := map[string]outcome{}
	for line := range strings.Lines(earlier) {
		if cells := strings.SplitN(strings.Trim(strings.TrimSpace(line), "| "), " | ", 3); len(cells) == 3 {
			then[cells[0]] = outcome{verdict(cells[1]), strings.ReplaceAll(cells[2], `\|`, "|")}
		}
	}
	for i, r := range t.rows {
		then[r.name] = t.outcomes[i]
	}
	t.rows, t.outcomes = nil, nil
	for _, r := range rowsOf(t.connector) {
		if o, ok := then[r.name]; ok {
			t.add(r, o)
		}
	}
}

// head stands above the table in the file.
const head = `# Real engines

This page is for people who ask whether evenkeel answers as a real engine does. It shows what
evenkeel did in front of vLLM on a CPU, with the NIXL connectors that GPUs use as well. The
commands below wrote it; [Testing](../testing.md) says how to run them.

Each row compares evenkeel's answers with those of a plain engine. The plain engine has no connector
and is asked directly. The comparison covers the status, the content type, and every field of the
parsed documents. The events of a stream are joined first. Two results need an explanation:

- *Not deterministic*: the plain engine is asked twice, its two answers differ, and evenkeel's
  answer differs from them by no more.
- *Engine's fault*: the engine does the same without evenkeel.

A row that begins with *completion*, *chat*, *context* or *error* shows how many fields were
compared, in an answer in one piece (*JSON*) and in a stream. [What may
differ](#what-may-differ) lists the fields that may be different.
`

// sections are the tables of the file, by connector.
var sections = []struct{ connector, title, text string }{
	{mooncake.NIXLPull, "The decode engine pulls", ""},
	{mooncake.NIXLPush, "The prefill engine pushes", "vLLM's `NixlPushConnector` writes the KV into the decode engine. Rows that begin with\n*" + strings.TrimSpace(boundEarly) +
		"* use `bind: arrival`: evenkeel chooses the decode rank before the\nprefill, and both engines get the request at once. In the other rows, evenkeel chooses the rank\nafter the prefill. Two limits show in the rows with `bind: arrival`:\n\n" +
		"- An answer may end before the prefill engine has answered. Its `cached_tokens` is then what the\n  decode engine found in its own cache ([Flags](../engines.md#flags)). So the row of KV events fails.\n" +
		"- A decode engine whose prefill never comes keeps its blocks until it is restarted ([lost\n  blocks](../connector-nixl-push.md#when-something-fails)).\n\n"},
}

// save writes the table into a file of docs. What stands there for other connectors stays, and so do rows
// of this one that were not run.
func (t *table) save(file string) error {
	was, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var b bytes.Buffer
	b.WriteString(head)
	for _, s := range sections {
		opening, closing := page.Markers(s.connector, "real CONNECTOR="+s.connector)
		_, rest, _ := strings.Cut(string(was), opening)
		earlier, _, _ := strings.Cut(rest, closing)
		if s.connector == t.connector {
			var now bytes.Buffer
			if t.part {
				t.keep(earlier)
				t.command = command(options{connector: t.connector}) // which makes all rows
			}
			t.write(&now)
			earlier = now.String()
		}
		if earlier = strings.TrimSpace(earlier); earlier != "" {
			fmt.Fprintf(&b, "\n## %s\n\n%s%s%s\n%s", s.title, s.text, opening, earlier, closing)
		}
	}
	b.WriteString("\n## What may differ\n\nThese fields may differ from the plain engine's without a failure. Each expression names the\nplace of a field in the parsed answer.\n\n| field | because |\n|---|---|\n")
	for _, m := range mayDiffer {
		fmt.Fprintf(&b, "| `%s` | %s |\n", strings.ReplaceAll(m.path.String(), "|", `\|`), m.why)
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return report.Replace(file, b.Bytes())
}
