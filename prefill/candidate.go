package prefill

import (
	"math"
	"time"

	"evenkeel/engine"
	"evenkeel/engine/circuit"
	"evenkeel/mooncake"
	"evenkeel/prefill/cache"
	"evenkeel/prefill/policy"
)

// Candidate is one place a prompt can be prefilled: a DP rank of a prefill
// instance, or the whole instance where ranks cannot be pinned.
type Candidate struct {
	ID             string // "<instance>/<rank>"; whoever keeps it keeps its accounts
	Instance       string // what fails together; a retry goes to another one first
	Target         *engine.Target
	Profile        *mooncake.Profile
	Models         []string      // base models and LoRA names; empty: not known yet, so not eligible
	Hardware       string        // candidates of one model and label share a line of prefill times
	CapacityTokens int64         // KV tokens it can hold; 0: what the scrape says
	BlockTokens    int           // of a KV block; 0: what the scrape says, else 16
	RTT            time.Duration // to its engine, until a scrape says what was measured; 0 inside one site
	Region         string        // of its engine; empty: ours
	Board          string        // of the decode ranks that take its hand-offs
	Live           bool
	Late           bool // not live, but only because its engine's answers do not come just now: its requests wait
	Decodes        bool // its engine also decodes, so that not all it runs is prefill
	Limit          int  // unanswered probes it may have while it is fresh in service; 0: any number
	Events         EventSource
}

// phase is where a prompt's KV blocks are in their life on the prefiller.
type phase uint8

const (
	probing    phase = iota // the probe is not answered yet
	pooled                  // answered, waits for a decode rank
	dispatched              // a decode rank was asked, no data event yet
	orphaned                // nobody will fetch it; the engine frees it at its timeout
	phases
	ended = phases // no longer charged
)

var phaseNames = [phases]string{"probing", "pooled", "dispatched", "orphan"}

// charge is what one prompt weighs.
type charge struct {
	tokens int64 // of the prompt
	work   int64 // vllm-ascend's weight of it, in millionths

	// What its prefill computes; the candidate has it only while probing.
	newTokens   int64
	predictedUs int64
	attention   int64 // twice policy.Attention
}

// account is what a candidate is charged with. Every number is an integer, so
// that what was added can be taken away without a rest.
type account struct {
	leases [phases]int
	tokens [phases]int64
	work   [phases]int64

	newTokens, predictedUs, attention int64
}

func (a *account) add(p phase, c charge) { a.book(p, c, 1) }

func (a *account) remove(p phase, c charge) { a.book(p, c, -1) }

func (a *account) book(p phase, c charge, times int64) {
	a.leases[p] += int(times)
	a.tokens[p] += times * c.tokens
	a.work[p] += times * c.work
	if p == probing {
		a.newTokens += times * c.newTokens
		a.predictedUs += times * c.predictedUs
		a.attention += times * c.attention
	}
}

// queue adds a prompt that waits for the candidate; clear takes all such away.
func (a *account) queue(c charge) {
	a.leases[probing]++
	a.newTokens += c.newTokens
	a.predictedUs += c.predictedUs
	a.attention += c.attention
}

// live counts the prompts whose KV somebody will still fetch.
func (a *account) live() int { return a.leases[probing] + a.leases[pooled] + a.leases[dispatched] }

func (a *account) held() int { return a.live() + a.leases[orphaned] }

// kvTokens is all that the prefiller's KV cache holds for us: it is given
// back at the first decode event, never at the probe's answer.
func (a *account) kvTokens() int64 { return sum(a.tokens) }

func (a *account) kvWork() int64 { return sum(a.work) }

func sum(v [phases]int64) (s int64) {
	for _, x := range v {
		s += x
	}
	return s
}

// candidate is a Candidate with everything the tier knows about it. It
// outlives its removal until the last charge ended.
type candidate struct {
	Candidate
	order      int  // position in the configuration
	configured bool // false: removed, kept for its charges
	account    account
	held       account // what waits for it, while one round of decisions runs
	shared     Share   // of other dispatchers
	oldest     *Lease  // unanswered probes in the order in which they were sent
	newest     *Lease
	answeredAt time.Time // the last of ours
	ring       []uint64
	cache      cache.Holdings
	gate       gate
	circuit    circuit.Circuit

	// From the scrape loop.
	usage        float64 // scraped KV usage, NaN: none
	capacity     int64   // scraped KV tokens
	foreign      float64 // requests there that are not ours
	foreignQueue float64 // of them, those that certainly wait
	waits        float64 // at the last scrape, ours too
	queued       float64 // requests the engine holds back and runs, ours that
	running      float64 // came and went since the scrape included
	sends        int     // of ours, ever
	answers      int
	startTime    float64
	misses       int           // failed scrapes in a row
	missed       uint64        // failed scrapes, ever
	asked        time.Time     // when the scrape under way was sent; zero: none is
	took         time.Duration // by the last scrape, failed or not
	unbounded    bool          // said that its capacity is not known
	block        int           // scraped tokens of a KV block, 0: not told
	rtt          time.Duration
	sampleSent   time.Time // when the last good scrape was sent
	idle         idle
}

// idle is where a candidate's accounts stood when a scrape found nobody waiting.
type idle struct {
	ran            float64
	sends, answers int
}

func newCandidate(id string, known *cache.Cache) *candidate {
	return &candidate{usage: math.NaN(), ring: policy.Vnodes(id), cache: known.Holdings(id)}
}

// stale says that so many scrapes in a row failed that the gauges are no longer
// believed. The engine may be too busy to tell them, so it stays in service by our
// own accounts, but engines that tell their gauges are preferred.
func (c *candidate) stale(misses int) bool { return misses > 0 && c.misses >= misses }

// toldUsage is the engine's own KV usage, NaN where it does not tell it any more.
func (c *candidate) toldUsage(misses int) float64 {
	if c.stale(misses) {
		return math.NaN()
	}
	return c.usage
}

// current says whether the last sample still speaks of others' requests: for
// three intervals, each as long as a scrape really takes.
func (c *candidate) current(now time.Time, interval time.Duration) bool {
	each := max(interval, c.took)
	if !c.asked.IsZero() {
		each = max(each, now.Sub(c.asked))
	}
	return now.Sub(c.sampleSent) <= 3*each
}

// own is the share of the KV cache that dispatchers' accounts say is taken; 0 while
// the capacity is unknown, so that then only the scraped share closes the gate.
func (c *candidate) own() float64 {
	if capacity := c.capacityTokens(); capacity > 0 {
		return float64(c.account.kvTokens()+c.shared.KVTokens) / float64(capacity)
	}
	return 0
}

func (c *candidate) capacityTokens() int64 {
	if c.CapacityTokens > 0 {
		return c.CapacityTokens
	}
	return c.capacity
}

// state is the candidate's one word for metrics and status.
func (c *candidate) state(now time.Time) string {
	switch {
	case !c.configured:
		return "removed"
	case !c.Live:
		return "down"
	case len(c.Models) == 0:
		return "unknown"
	case !c.circuit.Allows(now):
		return "out"
	case c.gate.closed:
		return "closed"
	default:
		return "open"
	}
}

var candidateStates = []string{"open", "closed", "out", "unknown", "down", "removed"}
