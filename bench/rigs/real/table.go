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
	"regexp"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/rigs/asked"
	"evenkeel/bench/rigs/real/vllm"
	"evenkeel/bench/tools/page"
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
	if t.connector == mooncake.None {
		fmt.Fprintf(out, "\n%s on a CPU with a MoE model: two data-parallel ranks that step together, one engine beside them, and one plain "+
			"engine. Made by `%s`", t.version, t.command)
	} else {
		fmt.Fprintf(out, "\n%s with NIXL %s on a CPU, one prefill engine, two decode engines, one plain engine. A plugin has NIXL's progress "+
			"threads sleep instead of spin "+
			"and leaves the engines' main threads on all cores; nothing that they compute is changed. Made by `%s`", t.version, vllm.NIXL, t.command)
	}
	if t.part {
		fmt.Fprintf(out, ", where several runs of some rows each may have made it.\n\n")
	} else {
		fmt.Fprintf(out, " in %.1f minutes.\n\n", t.took.Minutes())
	}
	fmt.Fprintf(out, "| row | | seen |\n|---|---|---|\n")
	for i, r := range t.rows {
		fmt.Fprintf(out, "| %s | %s | %s |\n", r.name, t.outcomes[i].verdict, asked.Cell(t.outcomes[i].seen))
	}
	fmt.Fprintf(out, "\n%d rows: %d pass, %d FAIL, %d not deterministic, %d engine's fault.\n", len(t.rows), t.count(pass), t.count(fail),
		t.count(unsteady), t.count(fault))
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

// save writes the table, and the fields that may differ, into a page. Rows of the connector that
// were not run stay.
func (t *table) save(file string) error {
	name, target, differs := t.connector, "real CONNECTOR="+t.connector, "real"
	if t.connector == mooncake.None { // it has a page of its own, with other tables
		name, target, differs = "rows", "claim NAME=real-aggregated", "claim NAME=real-aggregated"
	}
	if t.part {
		was, err := os.ReadFile(file)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		opening, closing := page.Markers(name, target)
		_, behind, _ := strings.Cut(string(was), opening)
		earlier, _, _ := strings.Cut(behind, closing)
		t.keep(earlier)
		t.command = command(options{connector: t.connector}) // which makes all rows
	}
	var now bytes.Buffer
	t.write(&now)
	rules := page.Markdown{Head: []string{"field", "because"}, Text: 1}
	for _, m := range mayDiffer {
		rules.Add(page.Code(strings.ReplaceAll(m.path.String(), "|", `\|`)), m.why)
	}
	return errors.Join(page.Write(file, target, name, name, now.String()),
		page.Write(file, differs, "differ", "What may differ", rules.String()))
}
