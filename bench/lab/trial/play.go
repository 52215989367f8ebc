package trial

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/trace"
)

// Way is how requests get to the ranks.
type Way string

// The ways: straight to the address, where the engine balances, and through evenkeel.
const (
	Straight Way = "engine"
	Ours     Way = "evenkeel"
)

// Block is a list of requests that went one way. Times are of the requests that were sent while the
// load was full.
type Block struct {
	Way          Way               `json:"way"`
	Seconds      float64           `json:"seconds"`
	Sent         int               `json:"sent"`
	OK           int               `json:"ok"`
	Failed       int               `json:"failed"`
	Stopped      int               `json:"stopped,omitempty"`
	Kinds        map[load.Kind]int `json:"kinds"` // how requests ended
	Window       float64           `json:"window_s"`
	Requests     float64           `json:"requests_per_s"`
	Tokens       float64           `json:"tokens_per_s"`
	TTFT         float64           `json:"ttft_mean_ms"`
	TTFT95       float64           `json:"ttft_p95_ms"`
	TPOT95       float64           `json:"tpot_p95_ms"`
	Late         float64           `json:"sent_late_p99_ms,omitempty"` // of an open loop
	PromptTokens int64             `json:"prompt_tokens"`              // as the engine counts them
	OutputTokens int64             `json:"output_tokens"`
}

// whole says whether the block can be compared: it was not broken off, and at most one request in
// 50 failed.
func (b *Block) whole() bool { return b.Sent > 0 && b.Stopped == 0 && 50*b.Failed <= b.Sent }

// Pair is the same requests both ways, in blocks that follow each other.
type Pair struct {
	First    Way   `json:"first"`
	Engine   Block `json:"engine"`
	Evenkeel Block `json:"evenkeel"`
}

// Played is what became of a load.
type Played struct {
	*Load
	Requests int       `json:"requests_per_block"`
	Rate     float64   `json:"requests_per_s,omitempty"` // of an open loop
	Pairs    []Pair    `json:"pairs"`
	Dropped  int       `json:"dropped_pairs,omitempty"` // pairs in which too many requests failed; they do not count
	Cut      bool      `json:"cut,omitempty"`           // the time was over before it had all its pairs
	Learned  *Learned  `json:"learned,omitempty"`       // what evenkeel knew of the steps after the last block that went through it
	Expected *Expected `json:"expected,omitempty"`
	Gain     *Gain     `json:"gain,omitempty"`
}

// Player plays loads.
type Player struct {
	Engine Engine
	URLs   map[Way]string
	APIKey string
	Each   time.Duration // of a load, one way
	Bound  time.Duration // for which answers are waited for, however soon they should come
	Pairs  int           // that a load has at most
	Least  int           // and that it has even where they last longer

	Told    func(now load.Progress, what string)
	Learned func() *Learned // what evenkeel knows of the steps now

	seed uint64 // of the texts: each block has its own, so that no prefix cache knows a prompt
}

// Patience is the Bound that leaves a busy engine time enough.
const Patience = 2 * time.Minute

const (
	mostTimes = 2 // so many times as long as it should, a load may last
	perPlace  = 4 // a block of a closed loop has so many requests for each that is in flight
	perWarmUp = 3 // and a run that is not counted, so many
)

// lasts is how long a load may last.
func lasts(each, bound time.Duration) time.Duration { return 2*mostTimes*each + bound }

// An engine counts so many tokens for each word of our prompts. By any other number, prompts would
// not have the length that they should.
const leastTokens, mostTokens = 0.5, 20

// Measure asks for a few answers, to see that there are any, and how the engine counts the words of
// prompts.
func (p *Player) Measure(ctx context.Context) error {
	const words, asked = 200, 4
	list := slices.Repeat([]trace.Request{{Prompt: min(words, max(2, p.Engine.Context/4)), Output: 4}}, asked)
	if p.Engine.Context == 0 {
		list = slices.Repeat([]trace.Request{{Prompt: words, Output: 4}}, asked)
	}
	p.Engine.Tokens = 1
	r, err := p.run(ctx, Straight, list, 2, p.Bound, "asking for a few answers")
	switch {
	case err != nil:
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	case r.OK < asked:
		return fmt.Errorf("%d of %d requests for a few tokens were not answered (%s); look into the engine's log, and mend that first",
			asked-r.OK, asked, whyOf(r))
	}
	per := float64(r.ReportedPromptTokens) / float64(max(1, r.PromptTokens))
	if per < leastTokens || per > mostTokens {
		return fmt.Errorf("the engine counts %d tokens in prompts of %d words, and that cannot be right; "+
			"see whether the usage in its answers tells the whole prompt_tokens", r.ReportedPromptTokens, r.PromptTokens)
	}
	p.Engine.Tokens = per
	return nil
}

// Early says why the rest was not worth waiting for.
type Early struct {
	Says   string
	Detail string // what the engine or the network said, which may name a host
}

func (e *Early) Error() string {
	if e.Detail == "" {
		return e.Says
	}
	return e.Says + " (" + e.Detail + ")"
}

// Play plays a load until it has its pairs, or the time is over, and adds them to what is played.
// before is the load before it. It fails where going on makes no sense: the context ended, or
// requests are not answered.
func (p *Player) Play(ctx context.Context, to, before *Played) error {
	within, cancel := context.WithTimeout(ctx, lasts(p.Each, p.Bound))
	defer cancel()
	err := p.pairs(within, to, before)
	switch {
	case err == nil || ctx.Err() != nil || within.Err() == nil:
		return err
	case len(to.Pairs) < 2:
		return &Early{Says: fmt.Sprintf("%s: after %v there are %d pairs of blocks; "+
			"look whether the engine is that slow, or give it more time with --each", to.Name, lasts(p.Each, p.Bound), len(to.Pairs))}
	}
	to.Cut = true
	return nil
}

// pairs plays the pairs of a load.
func (p *Player) pairs(ctx context.Context, to, before *Played) error {
	l, rate := to.Load, 0.0
	if l.Open() {
		rate = before.Served() * l.Share
		to.Rate, to.Requests = rate, before.Requests
	} else {
		for _, way := range []Way{Ours, Straight} { // evenkeel learns, and the engine compiles and captures
			b, err := p.block(ctx, l, way, math.MaxUint32, perWarmUp*l.InFlight, 0, max(p.Bound, p.Each))
			if err != nil {
				return err
			}
			rate = b.Requests
		}
		to.Requests = max(perPlace*l.InFlight, int(rate*p.Each.Seconds()/float64(p.Pairs)))
	}
	pairs := max(p.Least, min(p.Pairs, int(rate*p.Each.Seconds()/float64(to.Requests))))
	bound := max(p.Bound, 2*mostTimes*p.Each/time.Duration(pairs))
	for i := range pairs {
		pair := Pair{First: Straight}
		order := []Way{Straight, Ours}
		if i%2 == 1 { // so that what drifts evenly is even
			pair.First, order = Ours, []Way{Ours, Straight}
		}
		for _, way := range order {
			b, err := p.block(ctx, l, way, uint64(i), to.Requests, to.Rate, bound)
			if err != nil {
				return err
			}
			if way == Straight {
				pair.Engine = b
				continue
			}
			pair.Evenkeel = b
			if l := p.Learned(); l != nil {
				to.Learned = l
			}
		}
		if !pair.counts() {
			to.Dropped++
		}
		to.Pairs = append(to.Pairs, pair)
	}
	return nil
}

// Served is how many requests per second the engine's own balancing was served.
func (p *Played) Served() float64 {
	sum, n := 0.0, 0
	for i := range p.Pairs {
		if p.Pairs[i].counts() {
			sum, n = sum+p.Pairs[i].Engine.Requests, n+1
		}
	}
	return sum / float64(max(1, n))
}

func (p *Pair) counts() bool { return p.Engine.whole() && p.Evenkeel.whole() }

// block plays a list one way. The same number draws the same list.
func (p *Player) block(ctx context.Context, l *Load, way Way, number uint64, n int, rate float64, bound time.Duration,
) (b Block, err error) {
	what := fmt.Sprintf("%s, through evenkeel", l.Name)
	if way == Straight {
		what = fmt.Sprintf("%s, straight to the engine", l.Name)
	}
	r, err := p.run(ctx, way, l.draw(1+number, n, rate), l.InFlight, bound, what)
	switch {
	case err != nil:
		return b, err
	case ctx.Err() != nil:
		return b, ctx.Err()
	}
	b = blockOf(way, r)
	switch {
	case b.Stopped > 0:
		return b, &Early{Says: fmt.Sprintf("%s: %d of %d requests had no whole answer after %v; "+
			"see whether the engine is down or stands still", what, n-b.OK, n, bound)}
	case 2*b.Failed > b.Sent:
		return b, &Early{fmt.Sprintf("%s: %d of %d requests failed; look into the engine's log", what, b.Failed, b.Sent), whyOf(r)}
	}
	return b, nil
}

// run sends a list and waits for the answers, no longer than the bound.
func (p *Player) run(ctx context.Context, way Way, list []trace.Request, inFlight int, bound time.Duration, what string,
) (*load.Result, error) {
	for i := range list {
		list[i].Prompt = max(2, int(float64(list[i].Prompt)/p.Engine.Tokens))
	}
	p.seed++
	within, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	return load.Run(within, load.Config{
		URLs: []string{p.URLs[way]}, APIKey: p.APIKey, Model: p.Engine.Asks, Requests: list, Concurrency: inFlight,
		Stream: 1, Usage: 1, Seed: p.seed, Timeout: 2 * bound, Check: load.CheckShape, Backoff: time.Second,
		OnProgress: func(now load.Progress) { p.Told(now, what) },
	})
}

// blockOf takes what is told of a block from what a run showed.
func blockOf(way Way, r *load.Result) Block {
	w := r.Window
	if w == nil || w.Requests == 0 {
		w = &r.All
	}
	return Block{
		Way: way, Seconds: r.All.Seconds, Window: w.Seconds,
		Sent: r.Sent, OK: r.OK, Failed: r.Failed, Stopped: r.Stopped, Kinds: maps.Clone(r.Kinds),
		Requests: w.RequestsPerS, Tokens: w.TokensPerS, TTFT: w.TTFT.Mean, TTFT95: w.TTFT.P95, TPOT95: w.TPOT.P95, Late: r.Lag.P99,
		PromptTokens: r.ReportedPromptTokens, OutputTokens: r.All.OutputTokens,
	}
}

// whyOf says how requests failed, and what the first one was told.
func whyOf(r *load.Result) string {
	var all []string
	for _, kind := range slices.Sorted(maps.Keys(r.Kinds)) {
		if kind != load.OK {
			all = append(all, fmt.Sprintf("%d %s", r.Kinds[kind], kind))
		}
	}
	if len(r.Failures) > 0 {
		all = append(all, "the first: "+r.Failures[0].Detail)
	}
	return strings.Join(all, ", ")
}
