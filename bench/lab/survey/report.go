package survey

import (
	_ "embed"
	"errors"
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel/bench/lab/report"
)

// Report is what a survey says.
type Report struct {
	Command  string
	Lasted   time.Duration
	Engines  int
	Silent   []string // engines that did not answer now and then, with how often
	Advice   string   // how SGLang counts what it did not; empty: there is nothing to advise
	Findings []*Finding
}

// NewReport puts it together.
func NewReport(command string, lasted time.Duration, all []*Series, findings []*Finding) *Report {
	r := &Report{Command: command, Lasted: lasted.Round(time.Second), Engines: len(all), Findings: findings}
	if slices.ContainsFunc(findings, (*Finding).unasked) {
		r.Advice = askBarrier
	}
	for _, s := range all {
		if s.Silent > 0 {
			r.Silent = append(r.Silent,
				fmt.Sprintf("%s: pages that did not come or were not believed: %d; the last reason: %v", s.Address, s.Silent, s.Err))
		}
	}
	return r
}

const askBarrier = "With DP attention, SGLang 0.5.22 or later counts itself how long its ranks wait for each other. " +
	"Start it with SGLANG_ENABLE_METRICS_DP_ATTENTION=1, and the next report has that beside its own figures."

// Verdict is the sentence that a group's reader wants first.
func (f *Finding) Verdict() string {
	if errors.Is(f.Why, errAlone) {
		return fmt.Sprintf("There is nothing to gain here: %v.", f.Why)
	}
	if f.Why != nil {
		return fmt.Sprintf("What a change would gain cannot be told: %v.", f.Why)
	}
	if len(f.Changes) == 0 {
		if f.Most.High < little {
			return "There is nothing to gain here: steps are as long without prompts as with them."
		}
		return fmt.Sprintf("If prompts cost nothing, answers would come %.0f %% faster (%.0f to %.0f). No change can gain more. "+
			"How much of that rounds would gain cannot be told from metrics; %s.",
			100*f.Most.Middle, 100*f.Most.Low, 100*f.Most.High, measureIt)
	}
	best := f.Changes[len(f.Changes)-1]
	switch {
	case best.Narrow && best.Gain.High < little:
		return fmt.Sprintf("There is nothing to gain here: with %s there would be %s.", best.What, f.gain(best))
	case !best.Narrow:
		return fmt.Sprintf("What a change would gain cannot be told: it lies between %.0f and %.0f %%, and a longer survey, or --slots, may "+
			"narrow it.",
			100*best.Gain.Low, 100*best.Gain.High)
	}
	return fmt.Sprintf("With %s there would be %s.", best.What, f.gain(best))
}

// little is a gain that nobody would change anything for.
const little = 0.02

// gain is what a change makes, in words.
func (f *Finding) gain(c Change) string {
	of := "tokens per second of each answer"
	if f.Closed {
		of = "tokens per second"
	}
	return fmt.Sprintf("%.1f %% (%.1f to %.1f) more %s", 100*c.Gain.Middle, 100*c.Gain.Low, 100*c.Gain.High, of)
}

// Row is a line of a group's table.
type Row struct{ What, Value string }

// Rows are what was seen of a group.
func (f *Finding) Rows() (rows []Row) {
	add := func(what, format string, args ...any) { rows = append(rows, Row{what, fmt.Sprintf(format, args...)}) }
	add("ranks", "%d, which %s", len(f.Ranks), f.Kind)
	add("watched", "%.0f s", f.Seconds)
	if f.Lost > 0 {
		add("windows left out, because an engine was silent, was not believed or began anew", "%d", f.Lost)
	}
	if f.Tokens > 0 {
		add("requests in the engines, in the mean", "%.1f", f.InFlight)
		add("tokens of answers, a second", "%s", report.Grouped(f.Tokens, 0))
		add("time between two tokens of an answer", "%.1f ms", f.GapMs)
	}
	if f.Kind == both && f.Prompts > 0 {
		add("tokens of prompts computed, a second", "%s", report.Grouped(f.Prompts, 0))
	}
	if f.ComingMs > 0 {
		add("a request has its rank before it runs for", "%.0f ms, %.1f steps", f.ComingMs, f.ComingMs/f.GapMs)
	}
	if !math.IsNaN(f.KVExcess) {
		add("KV of the fullest rank, beyond the mean", "%.0f %%", 100*f.KVExcess)
		if b := f.barrier; f.Kind == decodes && b.FewerPairs < mostRanks*b.Pairs { // where prompts are computed, these have pairs, too
			add("the same, by SGLang's own count of all steps", "%.0f %%", 100*b.FewerPairs/b.Pairs)
		}
	}
	if !math.IsNaN(f.RequestExcess) {
		add("requests of the rank with the most, beyond the mean", "%.0f %%", 100*f.RequestExcess)
	}
	if !math.IsNaN(f.KVFull) {
		add("KV room in use", "%.0f %%", 100*f.KVFull)
	}
	if p := f.Prefilling; p.Known {
		add("steps with a prompt", "%.0f %%, on %.1f of %d ranks in the mean", 100*p.Share, p.Ranks, len(f.Ranks))
	}
	if b := f.barrier; b.Steps > 0 {
		law := ""
		if f.Law.ok {
			law = fmt.Sprintf("; %.2f ms in all, by the law of steps below", f.WaitMs)
		}
		add("a rank waits for the others in a step, in the mean",
			"%.2f ms at the gather before it, by SGLang's own clock%s", b.WaitedMs/b.Steps, law)
	}
	if f.Law.ok {
		add("a step takes", "%s", f.Law.words())
		if f.Law.C1Ms > 0 {
			add("of a step, reading KV on the fullest rank takes", "%.0f %%", 100*f.KVShare)
		}
		add("the most that levelling could gain",
			"%.1f %% (%.1f to %.1f), if each rank always had the mean, and no slot stood empty while a request waits",
			100*f.Most.Middle, 100*f.Most.Low, 100*f.Most.High)
	} else if f.Why == nil {
		add("the most that could be gained", "answers faster by %.1f %% (%.1f to %.1f), if prompts cost nothing", 100*f.Most.Middle,
			100*f.Most.Low, 100*f.Most.High)
	}
	if n := f.Nearest; n != nil {
		among := "this model and as many ranks"
		if !n.Same {
			among = "as many ranks, because none is for this model"
		}
		far := ""
		if n.Error > Far {
			far = fmt.Sprintf("; that is more than %.0f %%, so what is simulated by it does not hold here", 100*Far)
		}
		add("the nearest law of the table", "%s (%s), out of %d for %s; it is %.0f %% off in the mean of the steps%s",
			n.Name, n.Form, n.Among, among, 100*n.Error, far)
	}
	if b := f.Budget; b != nil {
		add("tokens of a rank in a step, now "+strconv.Itoa(b.Now), "%s", b.words(len(f.Ranks), f.Nearest.Name))
	}
	for _, c := range f.Changes {
		told := ""
		if !c.Narrow {
			told = "; too wide to decide by"
		}
		add(c.What, "%s%s", f.gain(c), told)
	}
	return rows
}

// words are the law with the terms that the windows tell.
func (f *fitted) words() string {
	s := fmt.Sprintf("%.1f ms", f.C0Ms)
	if f.C1Ms > 0 {
		s += fmt.Sprintf(" + %.3f µs for each KV token", 1000*f.C1Ms)
	}
	if f.RequestMs > 0 {
		s += fmt.Sprintf(" + %.2f ms for each request", f.RequestMs)
	}
	return s + fmt.Sprintf(" (R2 %.2f of %d windows)", max(0, f.R2), f.Windows)
}

// Text writes the report for a terminal.
func (r *Report) Text(w io.Writer) error {
	var b strings.Builder
	for _, f := range r.Findings {
		fmt.Fprintf(&b, "%s, model %q\n  %s\n", f.Name, f.Model, f.Verdict())
		for _, row := range f.Rows() {
			fmt.Fprintf(&b, "  %-58s %s\n", row.What, row.Value)
		}
		for _, a := range f.Assumed {
			fmt.Fprintf(&b, "  assumed: %s\n", a)
		}
		b.WriteByte('\n')
	}
	for _, s := range r.Silent {
		fmt.Fprintf(&b, "%s\n", s)
	}
	if r.Advice != "" {
		fmt.Fprintf(&b, "%s\n", r.Advice)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

//go:embed report.html
var page string

// HTML writes the report as a page that needs nothing else.
func (r *Report) HTML(w io.Writer) error {
	t := template.Must(template.New("report").Funcs(template.FuncMap{"bars": bars}).Parse(page))
	return t.Execute(w, r)
}

// Below is where the picture ends, with room for the labels of its axis.
func (p *picture) Below() float64 { return p.Height + 18 }

// bar is an interval in a picture 600 wide.
type bar struct {
	What            string
	Y, From, To, At float64
	Told            bool
}

// picture is the changes of a group side by side.
type picture struct {
	Bars   []bar
	Ticks  []tick
	Height float64
	Zero   float64
}

type tick struct {
	X     float64
	Label string
}

func bars(f *Finding) *picture {
	if f.Why != nil {
		return nil
	}
	low, high := min(0, f.Most.Low), max(0.02, f.Most.High)
	for _, c := range f.Changes {
		low, high = min(low, c.Gain.Low), max(high, c.Gain.High)
	}
	const left, wide = 250, 330
	x := func(v float64) float64 { return left + wide*(v-low)/(high-low) }
	p := &picture{Zero: x(0)}
	add := func(what string, s Span, told bool) {
		y := 14 + 30*float64(len(p.Bars))
		p.Bars = append(p.Bars, bar{What: what, Y: y, From: x(s.Low), To: x(s.High), At: x(s.Middle), Told: told})
	}
	add("the most that could be gained", f.Most, true)
	for _, c := range f.Changes {
		add(c.What, c.Gain, c.Narrow)
	}
	step := 0.01
	for (high-low)/step > 8 {
		step *= 2
		if (high-low)/step > 8 {
			step *= 2.5
		}
	}
	for v := math.Ceil(low/step) * step; v <= high+1e-9; v += step {
		p.Ticks = append(p.Ticks, tick{x(v), fmt.Sprintf("%.0f %%", math.Round(100*v)+0)}) // no -0
	}
	p.Height = 4 + 30*float64(len(p.Bars))
	return p
}
