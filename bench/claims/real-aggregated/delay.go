package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"evenkeel/bench/rigs/real/ranks"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/tools/page"
	"evenkeel/internal/stats"
)

// disturbance is prompts that come while rank 1 decodes.
type disturbance struct {
	prompt int
	both   bool // rank 1 gets one, too, at the same time
}

func (d disturbance) String() string {
	if d.both {
		return fmt.Sprintf("%d on each rank", d.prompt)
	}
	return fmt.Sprint(d.prompt)
}

var disturbances = []disturbance{{128, false}, {500, false}, {1000, false}, {2000, false}, {4000, false}, {500, true}, {2000, true}}

// What rank 1 decodes meanwhile.
const (
	watchers      = 4
	watcherPrompt = 200
	watcherOutput = 1000
)

// delay is what the tokens of rank 1 had to wait, in ms, once for each token stream and each
// repeat.
type delay struct {
	disturbance
	interval int
	usual    []float64 // median gap, before and between disturbances
	longest  []float64 // gap during one
	long     []float64 // gaps that were more than half as long again as usual
	more     []float64 // by which all gaps together were longer than usual
}

// delays measures each disturbance of each engine so many times.
func (w *site) delays(ctx context.Context) (all []*delay, err error) {
	c := ranks.NewClient()
	defer c.CloseIdleConnections()
	for i, interval := range intervals {
		list := make([]*delay, len(disturbances))
		for k, d := range disturbances {
			list[k] = &delay{disturbance: d, interval: interval}
		}
		for range w.repeats + 1 { // an engine's first steps are slow
			if err := w.disturb(ctx, c, w.engines[i].URL, list); err != nil {
				return nil, err
			}
		}
		for _, d := range list {
			d.forgetFirst()
		}
		w.Logf("interval %d: %d prompts while rank 1 decoded", interval, w.repeats*len(list))
		all = append(all, list...)
	}
	return all, nil
}

// spell is the time of a disturbance.
type spell struct{ from, to time.Time }

// disturb has rank 1 decode, and sends each disturbance once.
func (w *site) disturb(ctx context.Context, c ranks.Client, url string, list []*delay) error {
	watching, leave := context.WithCancel(ctx)
	defer leave()
	answers := make([]ranks.Answer, watchers)
	var all sync.WaitGroup
	for i := range answers {
		all.Go(func() {
			answers[i] = c.Ask(watching, url, ranks.Request{Prompt: watcherPrompt, Output: watcherOutput}, 1)
		})
	}
	spells := make([]spell, len(list))
	for i, d := range list {
		if err := testbed.Pause(ctx, 500*time.Millisecond); err != nil {
			return err
		}
		asked := 1
		if d.both {
			asked = ranks.Count
		}
		spells[i].from = time.Now()
		errs := make([]error, asked)
		var prompts sync.WaitGroup
		for rank := range asked {
			prompts.Go(func() { errs[rank] = c.Ask(ctx, url, ranks.Request{Prompt: d.prompt, Output: 1}, rank).Err })
		}
		prompts.Wait()
		if err := errors.Join(errs...); err != nil {
			return fmt.Errorf("a prompt of %v: %w", d, err)
		}
		spells[i].to = time.Now()
	}
	if err := testbed.Pause(ctx, 500*time.Millisecond); err != nil {
		return err
	}
	leave()
	all.Wait()
	for i := range answers {
		if answers[i].Err == nil {
			return fmt.Errorf("rank 1 had written all of an answer of %d tokens before the last prompt was computed", watcherOutput)
		}
		for k, d := range list {
			if err := d.take(answers[i].Chunks, spells, k); err != nil {
				return err
			}
		}
	}
	return nil
}

// take adds what one stream saw of one of the disturbances.
func (d *delay) take(chunks []ranks.Chunk, spells []spell, at int) error {
	var calm, during []float64
	for i := 1; i < len(chunks); i++ {
		from, to := chunks[i-1].At, chunks[i].At
		in := func(s spell) bool { return to.After(s.from) && from.Before(s.to) }
		gap := ms(to.Sub(from)) / float64(chunks[i].Tokens-chunks[i-1].Tokens)
		switch {
		case in(spells[at]):
			during = append(during, gap)
		case !slices.ContainsFunc(spells, in):
			calm = append(calm, gap)
		}
	}
	if len(calm) == 0 || len(during) == 0 {
		return fmt.Errorf("a stream of rank 1 has %d tokens while nothing is computed, and %d while a prompt of %v is", len(calm), len(during),
			d.disturbance)
	}
	slices.Sort(calm)
	usual, long, more := stats.Median(calm), 0, 0.0
	for _, gap := range during {
		if gap > 1.5*usual {
			long++
		}
		more += gap - usual
	}
	d.usual, d.longest, d.long, d.more = append(d.usual, usual), append(d.longest, slices.Max(during)), append(d.long, float64(long)),
		append(d.more, more)
	return nil
}

// forgetFirst leaves out the first repeat.
func (d *delay) forgetFirst() {
	for _, list := range []*[]float64{&d.usual, &d.longest, &d.long, &d.more} {
		*list = (*list)[watchers:]
	}
}

func writeDelays(out io.Writer, all []*delay) {
	repeats := len(all[0].more) / watchers
	fmt.Fprintf(out, "Rank 1 answers %d requests. The figures are means over %d repeats, ± the standard deviation.\n\n", watchers, repeats)
	// The streams of a repeat saw the same steps, so that they are one value.
	cell := func(digits int, of func(*delay) []float64) func(*delay) string {
		return func(d *delay) string {
			var each []float64
			for i := 0; i < len(of(d)); i += watchers {
				each = append(each, stats.Mean(of(d)[i:i+watchers]))
			}
			return fmt.Sprintf("%.*f ± %.*f", digits, stats.Mean(each), digits, stats.Deviation(each))
		}
	}
	fmt.Fprint(out, page.Rows("prompt tokens on rank 0", all, func(d *delay) string { return d.String() },
		page.Cells[*delay]{Title: "interval", Of: func(d *delay) string { return fmt.Sprint(d.interval) }},
		page.Cells[*delay]{Title: "usual gap, ms", Of: cell(1, func(d *delay) []float64 { return d.usual })},
		page.Cells[*delay]{Title: "longest gap, ms", Of: cell(0, func(d *delay) []float64 { return d.longest })},
		page.Cells[*delay]{Title: "long gaps", Of: cell(1, func(d *delay) []float64 { return d.long })},
		page.Cells[*delay]{Title: "all gaps longer by, ms", Of: cell(0, func(d *delay) []float64 { return d.more })},
		page.Cells[*delay]{Title: "per prompt token, ms", Of: cell(3, func(d *delay) (list []float64) {
			for _, more := range d.more {
				list = append(list, more/float64(d.prompt))
			}
			return list
		})},
	))
}
