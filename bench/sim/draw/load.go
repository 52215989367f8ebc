// Package draw draws loads at random: how long answers and prompts are, how requests come, and the
// fleet that serves them.
package draw

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/sim/decode"
	"evenkeel/bench/tools/page"
	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/step"
)

// Load is one that was drawn: how long answers and prompts are, how requests come, and
// the fleet that serves them.
type Load struct {
	Number  int
	answers answers
	prompts prompts
	Ranks   int
	Slots   int // of a rank
	uneven  uneven
	full    float64 // KV capacity of a rank, as a share of what its slots hold in the mean; 0: unlimited
	Groups  int
	Rho     float64 // open loop; 0: closed
	pool    int     // closed loop: requests beyond the slots
	C0, C1  float64 // ms
	Request float64 // ms
	Of      string  // the deployment whose law this is; empty: it is from published ranges
	law     *step.Law
	stale   int // steps
	lag     int // steps from an admission to the first token

	seed   uint64  // of its requests
	Tokens float64 // that are generated, where that many steps or requests are not enough
	// at least, if steps take as long as where nothing is read; but for no more requests and tokens
	// than can be simulated in a minute or two
	Lasts time.Duration
	stays float64 // of a request, at least
}

// Lag is how many steps there are from an admission to the first token.
func (l *Load) Lag() int { return l.lag }

// Even says whether all ranks are alike.
func (l *Load) Even() bool { return l.uneven == evenRanks }

// Class is a kind of loads.
type Class struct {
	Name string
	Has  func(l *Load) bool
}

// Classes are those that gains are told for. Each load is in several.
func Classes() []Class {
	all := []Class{
		{"closed loops", func(l *Load) bool { return l.Rho == 0 }},
		{"open loops", func(l *Load) bool { return l.Rho > 0 }},
	}
	for kind, k := range promptKinds {
		all = append(all, Class{"prompts: " + k.name, func(l *Load) bool { return l.prompts.kind == kind }})
	}
	const whole = "%.0f"
	halves := func(what string, from, to float64, format string, of func(l *Load) float64) {
		middle := math.Sqrt(from * to)
		if format == whole {
			middle = math.Ceil(middle)
		}
		at := fmt.Sprintf(format, middle)
		all = append(all,
			Class{what + " below " + at, func(l *Load) bool { return of(l) < middle }},
			Class{what + " from " + at, func(l *Load) bool { return of(l) >= middle }})
	}
	halves("ranks", ranksFrom, ranksTo, whole, func(l *Load) float64 { return float64(l.Ranks) })
	halves("slots", slotsFrom, slotsTo, whole, func(l *Load) float64 { return float64(l.Slots) })
	halves("c1", c1From*1000, c1To*1000, "%.3f µs", func(l *Load) float64 { return l.C1 * 1000 })
	halves("a request", requestFrom, requestTo, "%.2f ms", func(l *Load) float64 { return l.Request })
	return append(all,
		Class{"KV is limited", func(l *Load) bool { return l.full > 0 }},
		Class{"KV is unlimited", func(l *Load) bool { return l.full == 0 }})
}

// uneven says in what ranks differ.
type uneven int

const (
	evenRanks uneven = iota
	unevenSlots
	unevenCosts
	unevenKinds
)

// New draws the load of a number. Each property has its own draws, whatever the others
// are, and none is drawn again.
func New(seed uint64, number int) *Load {
	r := rand.New(rand.NewPCG(seed, uint64(number)))
	l := &Load{Number: number}
	l.answers.draw(r)
	l.prompts.draw(r)
	l.Ranks = int(math.Round(logUniform(r, ranksFrom, ranksTo)))
	l.Slots = int(math.Round(logUniform(r, slotsFrom, slotsTo)))
	l.uneven = uneven(r.IntN(int(unevenKinds)))
	full, binds := uniform(r, fullFrom, fullTo), r.IntN(2) == 1
	if binds {
		l.full = full
	}
	l.Groups = 1 + r.IntN(groupsTo)
	rho, pool, open := uniform(r, rhoFrom, rhoTo), logUniform(r, poolFrom, poolTo), r.IntN(2) == 1
	if open {
		l.Rho = rho
	} else {
		l.pool = max(1, int(math.Round(pool*float64(l.Ranks*l.Slots))))
	}
	l.C0, l.C1 = logUniform(r, c0From, c0To), logUniform(r, c1From, c1To)
	l.Request = logUniform(r, requestFrom, requestTo)
	l.stale, l.lag = r.IntN(stepsTo+1), r.IntN(stepsTo+1)
	l.seed, l.Tokens, l.Lasts = r.Uint64(), tokens, lasts
	return l
}

// Stays of a request that a load is played for where policies are judged: so that its start and its
// end do not decide.
const Stays = 30

// Judged draws the load that policies are judged by. Those of even numbers are served by a
// deployment. All are played for Stays, with fewer slots where that would take longer than can be
// simulated in a minute or so.
func Judged(seed uint64, number int) *Load {
	l := New(seed, number)
	if number%2 == 0 {
		l.servedBy(&deployments()[rand.New(rand.NewPCG(seed, uint64(number)+1<<32)).IntN(len(deployments()))])
	}
	return l.judged()
}

// Served draws the load of a number as Judged does, but it is served by this deployment.
func Served(seed uint64, number int, e *laws.Entry) *Load {
	l := New(seed, number)
	l.servedBy(e)
	return l.judged()
}

// servedBy has the ranks of a deployment serve the load.
func (l *Load) servedBy(e *laws.Entry) {
	law := e.Law()
	l.OnRanks(e.Ranks, law.Level())
	l.Of, l.law = e.Name(), &law
}

func (l *Load) judged() *Load {
	l.stays = Stays
	each := Stays * float64(l.Ranks) // stays for each slot of a rank
	slots := min(l.Slots, max(slotsFrom, int(min(staysTokens/l.answers.mean, mostRequests)/each)))
	l.pool = max(min(1, l.pool), l.pool*slots/l.Slots)
	l.Slots = slots
	return l
}

// deployments are those whose laws are drawn.
var deployments = sync.OnceValue(func() []laws.Entry {
	return slices.DeleteFunc(laws.All(), func(e laws.Entry) bool { return !e.Graphs })
})

// OnRanks has the load served by one group of so many equal ranks, whose steps take that if they
// are level.
func (l *Load) OnRanks(ranks int, level step.Model) {
	l.pool = max(min(1, l.pool), l.pool*ranks/l.Ranks)
	l.Ranks, l.Groups, l.uneven = ranks, 1, evenRanks
	l.C0, l.C1, l.Request = level.C0Ms, level.C1Ms, level.RequestMs
}

// The ranges that properties are drawn from. What spans a decade is drawn by its logarithm. Those
// of a step's law and of the slots are what docs/results/laws.md found published.
const (
	ranksFrom, ranksTo = 4, 144
	slotsFrom, slotsTo = 8, 256
	fullFrom, fullTo   = 0.4, 1.2
	groupsTo           = 3
	rhoFrom, rhoTo     = 0.5, 1.05
	poolFrom, poolTo   = 0.05, 1      // of the slots
	c0From, c0To       = 8, 60        // ms
	c1From, c1To       = 5e-6, 2.5e-4 // ms

	requestFrom, requestTo = 0.02, 0.6 // ms
	stepsTo                = 5
	meanFrom, meanTo       = 10, 3000
	unevenFrom             = 0.5 // of the slots that others have
	costFrom, costTo       = 0.8, 1.25
)

// Ranges is the table of them.
func Ranges() string {
	t := page.Markdown{Head: []string{"property", "drawn from"}, Text: 1}
	t.Add("length of answers", "bimodal (long ones 4 to 100 times the short, 5 to 50 % of all), heavy-tailed (Pareto, exponent 1.1 to 2.5, "+
		"cut at 50 times the least), geometric, uniform "+
		"(±20 to ±100 %), recurrent (50 to 95 % from 100 prompts, each with its own length), drifting (the mean changes 2 to 10 times over the "+
		"run, up or down): each as often")
	t.Add("mean answer", fmt.Sprintf("%d to %s tokens", meanFrom, report.Grouped(meanTo, 0)))
	t.Add("prompts", "short (log-normal, median 50 to 500 tokens), chat (500 to 3,000), long (4,000 to 30,000), chat with 2 to 20 % huge "+
		"ones (40,000 to 120,000): each as often")
	t.Add("law of a step", fmt.Sprintf("loads of even numbers: that of one of %d deployments of [the table](laws.md), in its own form, "+
		"with as many ranks, which are alike; the others: from the ranges below", len(deployments())))
	t.Add("ranks", fmt.Sprintf("%d to %d", ranksFrom, ranksTo))
	t.Add("slots of a rank", fmt.Sprintf("%d to %d, but fewer where %d stays of a request would be more than %d million tokens or %s requests",
		slotsFrom, slotsTo, Stays, int(staysTokens/1e6), report.Grouped(mostRequests, 0)))
	t.Add("ranks differ",
		fmt.Sprintf("not, in slots (each has %g to 1 of that), in what a token costs (%g to %g): each as often", unevenFrom, costFrom, costTo))
	t.Add("KV capacity",
		fmt.Sprintf("unlimited, or %g to %g of what the slots of a rank hold in the mean, at least the longest request: each as often", fullFrom,
			fullTo))
	t.Add("groups", fmt.Sprintf("1 to %d", groupsTo))
	t.Add("arrivals", fmt.Sprintf("closed loop with %g to %g waiting requests a slot, or open loop (Poisson) at %g to %g of what level ranks "+
		"could serve: each as often", poolFrom, float64(poolTo), rhoFrom, rhoTo))
	t.Add("c0", fmt.Sprintf("%d to %d ms", c0From, c0To))
	t.Add("c1", fmt.Sprintf("%g to %g ms for 1,000 tokens", 1000*c1From, 1000*c1To))
	t.Add("a request in a step", fmt.Sprintf("%g to %g ms", requestFrom, requestTo))
	t.Add("progress is seen late by", fmt.Sprintf("0 to %d steps", stepsTo))
	t.Add("first token after an admission", fmt.Sprintf("0 to %d steps", stepsTo))
	return t.String()
}

func uniform(r *rand.Rand, from, to float64) float64 { return from + (to-from)*r.Float64() }

func logUniform(r *rand.Rand, from, to float64) float64 {
	return math.Exp(uniform(r, math.Log(from), math.Log(to)))
}

// within rounds to tokens of a range.
func within(x float64, least, most int) int {
	return int(math.Round(min(float64(most), max(float64(least), x))))
}

func (l *Load) String() string {
	w := report.Words{Text: fmt.Sprintf("%d: ", l.Number)}
	w.Add(l.Of != "", "%s, ", l.Of)
	w.Add(true, "answers %s, prompts %s, %d x %d", l.answers.text(), l.prompts.text(), l.Ranks, l.Slots)
	w.Before = ", "
	w.Add(l.uneven == unevenSlots, "slots differ")
	w.Add(l.uneven == unevenCosts, "costs differ")
	w.Add(l.full > 0, "KV for %.2f of the slots", l.full)
	w.Add(l.Groups > 1, "%d groups", l.Groups)
	w.Add(l.Rho > 0, "rho %.2f", l.Rho)
	w.Add(l.Rho == 0, "closed with %d waiting", l.pool)
	w.Add(true, "c0 %.0f, c1 %.6f, %.2f a request", l.C0, l.C1, l.Request)
	w.Add(l.stale > 0, "%d steps late", l.stale)
	w.Add(l.lag > 0, "transfer %d", l.lag)
	return w.Text
}

// How much of a load is replayed. Steps or requests of the measured part, whichever are there
// first; where that is little work, so many tokens.
const (
	leastSteps    = 2000
	leastRequests = 20_000
	tokens        = 12e6
	history       = 2000

	staysTokens = 20e6

	// At least so long, because guards, learned laws and queues need their time; but not for more
	// requests and tokens.
	lasts        = 2 * time.Minute
	mostRequests = 60_000
	mostTokens   = 30e6
)

// Plan makes the requests and the fleet. Shifted, the same requests begin elsewhere.
func (l *Load) Plan(policies []string, shift float64) decode.Plan {
	r := rand.New(rand.NewPCG(l.seed, 1))
	slots := float64(l.Ranks * l.Slots)
	if l.Rho > 0 {
		slots *= min(1, l.Rho)
	}
	if l.full > 0 {
		slots *= min(1, l.full)
	}
	perStep := slots / l.answers.mean // requests done in a step, about
	steps := min(leastSteps, leastRequests/perStep)
	steps = max(steps*1.1, min(l.Tokens/slots, 2*leastRequests/perStep))
	long := min(l.Lasts.Seconds()*1000/l.C0, mostRequests/perStep, mostTokens/slots)
	steps = max(steps, long, 1.1*l.stays*l.answers.mean)
	warm := max(0.5*slots, steps*perStep/10)
	running, waiting := int(slots), l.pool
	total := running + waiting + int(warm+steps*perStep)

	next := l.requests(r, history+total)
	all := make([]trace.Request, history+total)
	for i := range all {
		at := (i + int(shift*float64(len(all)))) % len(all)
		all[at] = next(at)
	}
	at := time.Duration(0)
	for i := range all { // At is the gap before it so far
		at += all[i].At
		all[i].At = at
	}
	d := &decode.Drawn{Before: all[:history], Requests: all[history:], Warm: int(warm)}
	l.underway(r, d, running)
	p := decode.Plan{Source: decode.Source{Drawn: d}, Policies: policies, Seeds: 1, Window: board.DefaultWindow,
		Load: decode.Load{Rho: l.Rho, Pool: l.pool}, Fleet: l.fleet(r, d)}
	return p
}

// underway has the first requests be there from the start, as a look at a fleet that has served
// such requests for ever would find them: the longer an answer, the likelier it is seen, at any of
// its tokens.
func (l *Load) underway(r *rand.Rand, d *decode.Drawn, n int) {
	sum, sums := 0, make([]int, len(d.Requests))
	for i := range d.Requests {
		sum += d.Requests[i].Output
		sums[i] = sum
	}
	seen := make([]trace.Request, n)
	d.Ages = make([]int, n)
	for i := range seen {
		at := r.IntN(sum)
		low, high := 0, len(sums)-1
		for low < high {
			if mid := (low + high) / 2; sums[mid] <= at {
				low = mid + 1
			} else {
				high = mid
			}
		}
		seen[i] = d.Requests[low]
		d.Ages[i] = sums[low] - at - 1
	}
	copy(d.Requests, seen)
}

func (l *Load) fleet(r *rand.Rand, d *decode.Drawn) decode.Fleet {
	longest := 0
	for _, q := range d.Requests {
		longest = max(longest, q.Prompt+q.Output)
	}
	capacity := int64(0)
	if l.full > 0 {
		capacity = int64(max(1.06*float64(longest), l.full*float64(l.Slots)*trace.Resident(d.Requests[len(d.Ages):])))
	}
	f := decode.Fleet{Stale: l.stale, Transfer: l.lag}
	for g := range l.Groups {
		group := decode.Group{Name: fmt.Sprint(g), C0Ms: l.C0, C1Ms: l.C1, RequestMs: l.Request, Law: l.law}
		for range l.Ranks*(g+1)/l.Groups - l.Ranks*g/l.Groups {
			rank := decode.Rank{Slots: l.Slots, Capacity: capacity, Cost: 1}
			switch share, cost := uniform(r, unevenFrom, 1), uniform(r, costFrom, costTo); l.uneven {
			case unevenSlots:
				rank.Slots = max(1, int(math.Round(share*float64(l.Slots))))
			case unevenCosts:
				rank.Cost = cost
			case evenRanks, unevenKinds:
			}
			group.Ranks = append(group.Ranks, rank)
		}
		f.Groups = append(f.Groups, group)
	}
	return f
}
