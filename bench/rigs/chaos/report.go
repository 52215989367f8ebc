package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/rigs/testbed"
)

// report is what a run showed.
type report struct {
	Scenario string             `json:"scenario"`
	Speaks   string             `json:"connector"`
	Seed     uint64             `json:"seed"`
	Started  time.Time          `json:"started"`
	Seconds  float64            `json:"seconds"`
	Folder   string             `json:"folder"` // of the proxy's files, kept after a breach
	Clients  *seen              `json:"clients"`
	Saved    saved              `json:"saved"`
	Struck   map[string]int     `json:"struck"`        // faults, by name
	Actions  map[string]int     `json:"actions"`       // of operators and machines
	Made     int64              `json:"handoffs_made"` // what is above the requests was computed twice, or was discarded
	Leaks    int64              `json:"handoffs_left_to_timeouts"`
	Lost     *lost              `json:"lost,omitempty"`        // nil: no engine of this connector loses blocks
	TTFT     map[string]float64 `json:"ttft_p50_ms,omitempty"` // of the same load
	Before   vitals             `json:"before"`
	After    vitals             `json:"after"`
	Checks   []check            `json:"checks"`
	Breaches []string           `json:"breaches"`
}

// check is one invariant and what was found.
type check struct {
	Name  string `json:"name"`
	Found string `json:"found"`
	OK    bool   `json:"ok"`
}

func (r *report) hold(ok bool, name, format string, args ...any) {
	found := fmt.Sprintf(format, args...)
	r.Checks = append(r.Checks, check{name, found, ok})
	if !ok {
		r.Breaches = append(r.Breaches, name+": "+found)
	}
}

func (r *report) breach(name, format string, args ...any) { r.hold(false, name, format, args...) }

// mostLeft is the share of all hand-offs that may be left to the engines' timeout
// where a fifth of the decode requests, drains among them, lose their connection.
const mostLeft = 0.025

// leastSaved is the share of requests that a retry could save and that must be.
const leastSaved = 0.999

// judge holds the invariants. idle is why something is still held.
func (r *report) judge(ctx context.Context, s scenario, f *fleet, p *proxy, books *ledger, got *seen, before vitals, idle error) {
	r.Clients, r.Before, r.Struck = got, before, maps.Clone(books.kinds)
	wrong := len(got.Wrong)
	r.hold(wrong == 0, "every client has a right answer or a clear error", "%d have neither%s", wrong, some(got.Wrong))
	r.hold(idle == nil, fmt.Sprintf("nothing is held %v later", s.settle), "%s", word(idle))
	harm, leaks, made := f.counted()
	r.hold(len(harm) == 0, "no engine was harmed", "%s", counts(harm))
	switch r.Made, r.Leaks = made, leaks; {
	case s.heads > 0:
		r.hold(float64(r.Leaks) < mostLeft*float64(made), "few hand-offs are left to their timeout where heads are reset", "%d of %d", r.Leaks,
			made)
	case s.rate == 0 && !s.operators && !s.killAll:
		r.hold(r.Leaks == 0, "no hand-off was left to its timeout", "%d", r.Leaks)
	}
	r.Saved = books.saved(got.Told)
	switch {
	case s.operators: // engines are taken away, too, and callers are over their limits
	case s.busy > 0:
		bad := got.Refused + got.Broken + wrong
		r.hold(bad*100 <= got.Sent, "at most one request in a hundred fails where engines refuse", "%d of %d%s", bad, got.Sent,
			some(got.Told))
	case s.rate+s.heads > 0:
		r.hold(r.Saved.Share >= leastSaved, "requests that a retry could save are saved", "%.2f %% of %d%s", 100*r.Saved.Share, r.Saved.Savable,
			some(r.Saved.Lost))
	default:
		told := got.Refused + got.Broken
		r.hold(told == 0, "nobody is told of an engine that others replace", "%d are%s", told, some(got.Told))
	}
	r.hold(got.Right > 0, "clients are served", "%d right answers", got.Right+got.Wide.Right)
	all, err := p.Series()
	if err != nil {
		r.breach("the proxy answers", "%v", err)
		return
	}
	bugs := map[string]int64{}
	for name, v := range all {
		metric, _, _ := strings.Cut(name, "{")
		if v != 0 && (metric == "evenkeel_audit_drift" || strings.HasSuffix(metric, "double_releases_total") ||
			metric == "evenkeel_invalid_assignments_total") {
			bugs[name] = int64(v)
		}
	}
	r.hold(len(bugs) == 0, "the proxy's books agree", "%s", counts(bugs))
	r.steady(ctx, p)
}

// steady holds that what the proxy took for the run it has given back.
func (r *report) steady(ctx context.Context, p *proxy) {
	limit := vitals{Goroutines: 1.2*r.Before.Goroutines + 30, Heap: 1.5*r.Before.Heap + 16<<20, Files: 1.2*r.Before.Files + 50}
	for end := time.Now().Add(20 * time.Second); ; { // fasthttp's workers and idle connections live for some seconds
		v, err := p.vitals()
		if err != nil {
			r.breach("the proxy answers", "%v", err)
			return
		}
		r.After = v
		ok := v.Goroutines <= limit.Goroutines && v.Heap <= limit.Heap && v.Files <= limit.Files
		if ok || time.Now().After(end) || !pause(ctx, 500*time.Millisecond) {
			break
		}
	}
	r.hold(r.After.Goroutines <= limit.Goroutines, "goroutines are back", "%.0f, %.0f before", r.After.Goroutines, r.Before.Goroutines)
	r.hold(r.After.Heap <= limit.Heap, "memory is back", "%.1f MiB in use, %.1f before", testbed.MiB(r.After.Heap), testbed.MiB(r.Before.Heap))
	r.hold(r.After.Files <= limit.Files, "open files are back", "%.0f, %.0f before", r.After.Files, r.Before.Files)
}

func word(err error) string {
	if err == nil {
		return "nothing"
	}
	return err.Error()
}

// counts lists names with their numbers.
func counts[N int | int64](m map[string]N) string {
	if len(m) == 0 {
		return "nothing"
	}
	var list []string
	for _, name := range slices.Sorted(maps.Keys(m)) {
		list = append(list, fmt.Sprintf("%d %s", m[name], name))
	}
	return strings.Join(list, ", ")
}

// some are the first failures, for people.
func some(failures []load.Failure) (text string) {
	for _, f := range failures[:min(8, len(failures))] {
		text += fmt.Sprintf("\n    %.1000v", f)
	}
	return text
}

func (r *report) writeJSON(out io.Writer) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

func (r *report) writeTable(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	c := r.Clients
	fmt.Fprintf(w, "%.0f s\t%d requests: %d right, %d left by plan, %d refused, %d ended by an error event\n", r.Seconds, c.Sent, c.Right,
		c.Left, c.Refused, c.Broken)
	fmt.Fprintf(w, "not right\t%s\n", counts(c.Kinds))
	fmt.Fprintf(w, "several answers\t%d right, %d told, %d wrong\n", c.Wide.Right, c.Wide.Failed, c.Wide.Wrong)
	fmt.Fprintf(w, "slow clients\t%d right, %d told, %d wrong\n", c.Slow.Right, c.Slow.Failed, c.Slow.Wrong)
	fmt.Fprintf(w, "faults\t%s\n", counts(r.Struck))
	fmt.Fprintf(w, "trouble\t%s\n", counts(r.Actions))
	fmt.Fprintf(w, "struck\t%d requests: %d told no by an engine, %d more than once, %d that a retry could save (%.2f %% saved)\n",
		r.Saved.Struck, r.Saved.Final,
		r.Saved.Often, r.Saved.Savable, 100*r.Saved.Share)
	fmt.Fprintf(w, "hand-offs\t%d made, %d left to an engine's timeout\n", r.Made, r.Leaks)
	if r.Lost != nil {
		fmt.Fprintf(w, "KV of nobody\t%d tokens in decode engines until their restart, %d on the proxy's account\n", r.Lost.Stranded,
			r.Lost.Orphans)
	}
	if len(r.TTFT) > 0 {
		fmt.Fprintf(w, "first token\t")
		for i, when := range slices.Sorted(maps.Keys(r.TTFT)) {
			fmt.Fprintf(w, "%s%.1f ms %s", []string{"", ", "}[min(i, 1)], r.TTFT[when], when)
		}
		fmt.Fprintf(w, " (median)\n")
	}
	fmt.Fprintf(w, "resident\t%.1f MiB, %.1f before\n\n", testbed.MiB(r.After.Resident), testbed.MiB(r.Before.Resident))
	for _, check := range r.Checks {
		mark := "ok"
		if !check.OK {
			mark = "BREACH"
		}
		fmt.Fprintf(w, "%s\t%s: %s\n", mark, check.Name, check.Found)
	}
	if len(r.Breaches) > 0 {
		fmt.Fprintf(w, "\n%d breaches; the proxy's files are in %s\n", len(r.Breaches), r.Folder)
	}
	return w.Flush()
}
