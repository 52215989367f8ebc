package trial

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"text/tabwriter"
	"time"

	"evenkeel/bench/lab/survey"
	"evenkeel/dispatcher/step"
	"evenkeel/internal/stats"
)

// Plan prints what will be played, what it costs, and what the simulator expects.
func (r *Report) Plan(out io.Writer, c Cost) {
	e := r.Engine
	fmt.Fprintf(out, "%s %s, %s: %d ranks of %d slots", e.Kind, e.Version, cmp.Or(e.Model, "a model"), e.Ranks, e.Slots)
	if e.Room > 0 {
		fmt.Fprintf(out, ", room for %s KV tokens per rank", stats.Grouped(e.Room))
	}
	fmt.Fprint(out, "\n\nThe loads:\n")
	for i, l := range r.Loads {
		fmt.Fprintf(out, "%d. %s: %v\n", i+1, l.Name, l.Load)
	}
	fmt.Fprintf(out, "\nEach load is played for about %s straight to the engine and for as long through evenkeel, in short blocks in turn. "+
		"Together that is about %s, and %s at most.\n",
		minutes(time.Duration(r.Each*float64(time.Second))), minutes(c.Time), minutes(c.Most))
	by := "By what is expected,"
	if r.Expects == nil || len(r.Expects.Loads) == 0 {
		by = "At least"
	}
	fmt.Fprintf(out, "%s %s prompts are sent, with %s tokens in all, and %s tokens are answered.\n",
		by, amount(c.Prompts), amount(c.Input), amount(c.Output))
	if r.Expects == nil || len(r.Expects.Loads) == 0 {
		fmt.Fprintf(out, "\nThe table of laws has none with %d ranks of %s, so nothing is expected.\n\n", e.Ranks, e.Kind)
		return
	}
	by = fmt.Sprintf("under the %d laws of the table that have %d ranks of %s", len(r.Expects.Laws), e.Ranks, e.Kind)
	if len(r.Expects.Laws) == 1 {
		by = "under the law " + r.Expects.Laws[0]
	}
	fmt.Fprintf(out, "\nExpected of evenkeel beside the engine's own balancing, simulated %s, in %%:\n", by)
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "load\ttokens/s\tTTFT mean\tTPOT p95")
	for i, x := range r.Expects.Loads {
		fmt.Fprintf(w, "%s\t%v\t%v\t%v\n", r.Loads[i].Name, x.Tokens, x.TTFT, x.TPOT)
	}
	_ = w.Flush() // as with fmt.Fprint, there is nobody to tell
	fmt.Fprintln(out)
}

func minutes(d time.Duration) string {
	switch {
	case d == time.Second:
		return "a second"
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0f seconds", d.Seconds())
	}
	return fmt.Sprintf("%.0f minutes", math.Ceil(d.Minutes()))
}

// amount is a count that nobody knows better.
func amount(s Span) string {
	round := func(v float64) string {
		if v >= 1e6 {
			return fmt.Sprintf("%.1f million", v/1e6)
		}
		return stats.Grouped(int64(v))
	}
	if s.High < 1.2*s.Low {
		return "about " + round(s.Middle)
	}
	return round(s.Low) + " to " + round(s.High)
}

func (s Span) String() string { return whole(s.Low) + " to " + whole(s.High) }

// whole is a number without digits behind the point, and without a sign where it is 0.
func whole(v float64) string {
	if math.Abs(v) < 0.5 {
		return "0"
	}
	return fmt.Sprintf("%+.0f", v)
}

func (i Interval) String() string {
	switch i.Pairs {
	case 1:
		return fmt.Sprintf("%+.1f (one pair)", i.Mean)
	}
	return fmt.Sprintf("%+.1f (%+.1f to %+.1f)", i.Mean, i.Mean-i.Off, i.Mean+i.Off)
}

// Text prints what came of the trial.
func (r *Report) Text(out io.Writer) {
	if !r.Complete {
		fmt.Fprintf(out, "THIS IS NOT THE WHOLE TRIAL: %v. What was measured until then:\n\n", r.Ended())
	}
	fmt.Fprintln(out, "evenkeel beside the engine's own balancing: means over the blocks, "+
		"and the difference with the 95 % interval over their pairs.")
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "load\twhat\tengine\tevenkeel\tdifference, %\texpected, %")
	for _, l := range r.Loads {
		l.rows(w)
	}
	_ = w.Flush() // as with fmt.Fprint, there is nobody to tell
	fmt.Fprint(out, "More tokens/s are better, and less of the others. In the open loop, tokens/s follow what is sent.\n\n")
	r.Law.text(out)
}

// rows print a load.
func (p *Played) rows(w io.Writer) {
	if p.Gain == nil {
		fmt.Fprintf(w, "%s\tnot measured\t\t\t\t\n", p.Name)
		return
	}
	failed := 0
	for i := range p.Pairs {
		failed += p.Pairs[i].Engine.Failed + p.Pairs[i].Evenkeel.Failed
	}
	blocks := fmt.Sprintf("  %d pairs of %d requests", p.Gain.Tokens.Pairs, p.Requests)
	about := []string{p.Name, blocks, fmt.Sprintf("  %d failed", failed), ""}
	if p.Dropped > 0 {
		about[3] = fmt.Sprintf("  %d pairs left out: many failed", p.Dropped)
	} else if p.Cut {
		about[3] = "  the time was over"
	}
	x := p.Expected
	if x == nil {
		x = &Expected{}
	}
	for i, row := range []struct {
		what     string
		figure   func(b *Block) float64
		off      Interval
		expected Span
		digits   int
	}{
		{"tokens/s", func(b *Block) float64 { return b.Tokens }, p.Gain.Tokens, x.Tokens, 0},
		{"TTFT mean, ms", func(b *Block) float64 { return b.TTFT }, p.Gain.TTFT, x.TTFT, 0},
		{"TTFT p95, ms", func(b *Block) float64 { return b.TTFT95 }, p.Gain.TTFT95, Span{}, 0},
		{"TPOT p95, ms", func(b *Block) float64 { return b.TPOT95 }, p.Gain.TPOT95, x.TPOT, 1},
	} {
		theirs, ours := p.mean(row.figure)
		expected := "–"
		if row.expected != (Span{}) {
			expected = row.expected.String()
		}
		fmt.Fprintf(w, "%s\t%s\t%.*f\t%.*f\t%v\t%s\n", about[i], row.what, row.digits, theirs, row.digits, ours, row.off, expected)
	}
}

// mean is a figure both ways, over the pairs that count.
func (p *Played) mean(figure func(b *Block) float64) (theirs, ours float64) {
	n := 0.0
	for i := range p.Pairs {
		if x := &p.Pairs[i]; x.counts() {
			theirs, ours, n = theirs+figure(&x.Engine), ours+figure(&x.Evenkeel), n+1
		}
	}
	return theirs / n, ours / n
}

// text prints the law.
func (l *Law) text(out io.Writer) {
	const prompts = "%.1f µs per token of the slowest rank, %.1f µs per token of a rank in the mean, and %.2f ms if there are any.\n"
	switch m := l.Learned; {
	case m == nil:
		fmt.Fprintln(out, "evenkeel learned no law of the steps: it saw too few, or they follow nothing that it knows.")
	case m.C0Ms == 0:
		fmt.Fprintf(out, "From %s steps, evenkeel learned only what prompts take: "+prompts,
			stats.Grouped(m.Steps), 1e3*m.OwnMs, 1e3*m.SharedMs, m.PrefillMs)
	default:
		fmt.Fprintf(out, "The law that evenkeel learned from %s steps (R2 %.2f): a step takes %.2f ms, "+
			"%.4f µs per KV token and %.3f ms per request of the slowest rank; of prompts, "+prompts,
			stats.Grouped(m.Steps), m.R2, m.C0Ms, 1e3*m.C1Ms, m.RequestMs, 1e3*m.OwnMs, 1e3*m.SharedMs, m.PrefillMs)
		switch step.Bottleneck(m.Way) {
		case step.OneRank:
			fmt.Fprintln(out, "Steps wait for the rank that has most KV and requests together: "+
				"the engine is eager, or has buckets of its own for each rank.")
		case step.TwoRanks:
			fmt.Fprintln(out, "Steps wait for the most KV and for the most requests, of whichever ranks: "+
				"the engine pads its ranks in graphs.")
		case step.UnknownBottleneck:
			fmt.Fprintln(out, "The steps do not tell whether the engine pads its ranks.")
		}
		if m.Error > 0 {
			fmt.Fprintf(out, "It is %.0f %% off in the mean of %d windows in which the engine's page told of its steps.\n",
				100*m.Error, l.Seen)
		}
	}
	switch n := l.Nearest; {
	case l.Unread:
		fmt.Fprintf(out, "The engine's page of metrics could not be read (%s), so no law of the table was compared.\n", l.Detail)
	case l.Seen == 0:
		fmt.Fprintln(out, "The engine's page of metrics did not tell how long steps are (SGLang needs --enable-metrics), "+
			"so no law of the table was compared.")
	case n == nil:
		fmt.Fprintln(out, "The table of laws has none with as many ranks of this engine.")
	default:
		of := fmt.Sprintf("%d laws with as many ranks of this engine", n.Among)
		if n.Same {
			of = fmt.Sprintf("%d laws of this model with as many ranks", n.Among)
		}
		fmt.Fprintf(out, "The nearest of %s: %s (%s), %.0f %% off in the mean of these windows.\n", of, n.Name, n.Form, 100*n.Error)
		if n.Error > survey.Far {
			fmt.Fprintf(out, "WARNING: that is more than %.0f %%, so the law is not that of your engines, "+
				"and what is expected under laws of the table may be wrong here.\n", 100*survey.Far)
		}
	}
	if b := l.Barrier; b != nil {
		fmt.Fprintf(out, "SGLang counted both ways together: a rank waits %.2f ms before a step (of %s), "+
			"and the rank with most attention computes %.0f %% beyond the mean.\n",
			b.WaitMs, stats.Grouped(int64(b.Steps)), 100*b.Beyond)
	}
}
