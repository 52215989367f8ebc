package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"evenkeel/bench/real/vllm"
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

// play runs a row. An engine that does not start is a failure of the row.
func play(ctx context.Context, w *site, r row) outcome {
	if err := w.need(ctx, r.engines...); err != nil {
		return failed("%v", err)
	}
	return r.run(ctx, w)
}

// table is the rows that were run.
type table struct {
	rows             []row
	outcomes         []outcome
	version, command string
	took             time.Duration
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
		"and leaves the engines' main threads on all cores; nothing that they compute is changed. Made by `%s` in %.1f minutes.\n\n", t.version, vllm.NIXL, t.command,
		t.took.Minutes())
	fmt.Fprintf(out, "| row | | seen |\n|---|---|---|\n")
	for i, r := range t.rows {
		fmt.Fprintf(out, "| %s | %s | %s |\n", r.name, t.outcomes[i].verdict, strings.NewReplacer("|", `\|`, "\n", " ").Replace(t.outcomes[i].seen))
	}
	fmt.Fprintf(out, "\n%d rows: %d pass, %d FAIL, %d not deterministic, %d engine's fault.\n", len(t.rows), t.count(pass), t.count(fail), t.count(unsteady), t.count(fault))
}

// head stands above the table in the file.
const head = `# Real engines

This page is written by the command that stands below. It shows what evenkeel did before real engines: vLLM on a CPU, with the NIXL connector that GPUs use as well. [Testing](../testing.md) says how to run it.

The answers are compared with those of a plain engine, which has no connector and is asked directly: status, content type, and every field of the parsed documents. The events of a stream are joined first.
The plain engine is asked twice. *Not deterministic* is a row where its two answers differ, and evenkeel's differs from them by no more. *Engine's fault* is what the engine does without evenkeel, too.
`

// save writes the table into a file of docs.
func (t *table) save(file string) error {
	var b bytes.Buffer
	b.WriteString(head)
	t.write(&b)
	b.WriteString("\nThese fields may differ:\n\n| field | because |\n|---|---|\n")
	for _, m := range mayDiffer {
		fmt.Fprintf(&b, "| `%s` | %s |\n", strings.ReplaceAll(m.path.String(), "|", `\|`), m.why)
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, b.Bytes(), 0o644)
}
