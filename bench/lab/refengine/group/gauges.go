package group

import (
	"slices"
	"sync/atomic"
	"time"
)

// Gauges are what /metrics and /stats read.
type Gauges struct {
	Running, Waiting, Deferred, KVBlocks, Most, Generated, Stranded atomic.Int64

	Queries, Hits atomic.Int64 // tokens of prompts of mixed ranks, and those that the prefix cache had

	Prompt, Pulled   atomic.Int64 // tokens of prompts of those that have their first token, and those whose KV came from a prefill engine
	Begun            atomic.Int64 // tokens of answers that came first
	Gaps, GapNanos   atomic.Int64 // between two tokens of an answer: how many, and their sum
	Prompts, Answers Lengths      // of those that have ended

	Steps, WaitNanos  atomic.Int64 // of the ranks together, and for how long this one has waited for the others in them
	Pairs, FewerPairs atomic.Int64 // KV tokens that it read in those, and those that the fullest rank read beyond them
}

// LengthBounds are those of vLLM's histograms of lengths, in tokens.
var LengthBounds = [...]int64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000}

// Lengths is a histogram of lengths.
type Lengths struct {
	Counts [len(LengthBounds) + 1]atomic.Int64 // up to each bound and above the one before; the last is of those above all
	Sum    atomic.Int64
}

func (l *Lengths) observe(tokens int64) {
	at, _ := slices.BinarySearch(LengthBounds[:], tokens)
	l.Counts[at].Add(1)
	l.Sum.Add(tokens)
}

// given notes that a request gets so many tokens now.
func (g *Gauges) given(j *Job, tokens int, now time.Time) {
	g.Generated.Add(int64(tokens))
	if j.last.IsZero() {
		g.Prompt.Add(int64(j.prompt))
		g.Begun.Add(int64(tokens))
		if j.remote && !j.local {
			g.Pulled.Add(int64(j.prompt))
		}
	} else {
		g.Gaps.Add(1)
		g.GapNanos.Add(now.Sub(j.last).Nanoseconds())
	}
	j.last = now
}

// ended notes that a request has its last token.
func (g *Gauges) ended(j *Job, tokens int) {
	g.Prompts.observe(int64(j.prompt))
	g.Answers.observe(int64(tokens))
}

// Prefilled notes a request that is answered with its prefill: the hand-off comes with so many
// tokens.
func (g *Gauges) Prefilled(prompt, tokens int) {
	g.Prompt.Add(int64(prompt))
	g.Generated.Add(int64(tokens))
	g.Begun.Add(int64(tokens))
	g.Prompts.observe(int64(prompt))
	g.Answers.observe(int64(tokens))
}
