package survey

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"evenkeel/internal/stats"
)

// Finding is what a survey found of a group.
type Finding struct {
	*Group
	Seconds  float64 // that were watched and counted
	InFlight float64 // requests in the engines, in the mean
	Running  float64 // of those, that do not wait
	ComingMs float64 // for which a request has its rank before it is prefilled; 0: it gets its rank then, or nobody knows
	Closed   bool    // their number hardly moves: a request follows each that ends
	Tokens   float64 // of answers, a second
	GapMs    float64 // between two tokens of an answer, in the mean

	KVExcess      float64 // by how much the fullest rank's KV is above the mean, as a share of the mean
	RequestExcess float64 // likewise of requests
	KVFull        float64 // mean share of the KV room that is in use; NaN: not told
	Prompts       float64 // tokens of prompts that are computed, a second
	Prefilling    Prefilling

	Law     fitted
	Budget  *Budget // of ranks that prefill and decode; nil: not told
	Nearest *Near   // of the table; nil: it has no law of as many ranks, or nothing tells how long steps are
	KVShare float64 // of a step, that reading KV takes on the fullest rank
	WaitMs  float64 // for which a rank waits for the others in a step, in the mean, by the law
	// that could be gained: on decode ranks if all were always as full as the mean and no slot stood
	// empty; where ranks prefill, if prompts cost nothing
	Most    Span
	Changes []Change
	Assumed []string
	Why     error // nothing is foretold

	mostRunning float64 // requests that were seen on a rank
	coming      float64 // requests that have a rank and are not prefilled yet; NaN: not told
}

// Prefilling is what is known of steps with prompts.
type Prefilling struct {
	Known bool
	Share float64 // of the steps hold a prompt at least
	Ranks float64 // that have one in those, in the mean
}

// Span is where a figure lies, with the middle of all that fits.
type Span struct{ Low, Middle, High float64 }

// Change is what a change of policy is worth.
type Change struct {
	What   string
	Gain   Span // as a share of tokens/s, or of those of each answer where requests come as they come
	Narrow bool // it is narrow enough to decide by
}

// narrow is how wide an interval may be to be told: so many points, or half the gain.
const narrow = 0.06

func change(what string, gain Span) Change {
	return Change{What: what, Gain: gain, Narrow: gain.High-gain.Low <= max(narrow, math.Abs(gain.Middle)/2)}
}

// Judge says what was found of each group.
func Judge(ctx context.Context, all []*Series, given Given, progress func(done, of int)) (out []*Finding) {
	for _, g := range groups(all) {
		f := &Finding{Group: g}
		f.Why = f.judge(ctx, given, progress)
		out = append(out, f)
	}
	return out
}

var errAlone = errors.New("one rank waits for no other")

// judge says why nothing is foretold.
func (f *Finding) judge(ctx context.Context, given Given, progress func(done, of int)) error {
	f.see()
	switch {
	case f.Kind == untold:
		known := "vLLM 0.32"
		if f.SGLang {
			known = "SGLang 0.5.23"
		}
		return fmt.Errorf("requests ran, but the pages lack %s, which counts the tokens of answers; %s has it, and other "+
			"versions may not, so take another version", f.Lacks, known)
	case f.Kind == idle:
		return errors.New("nothing was answered meanwhile; survey again while clients send requests")
	case f.Kind == prefills:
		return errors.New("these ranks only prefill; name the addresses of those that decode, too")
	case len(f.Ranks) == 1:
		return errAlone
	}
	engine := "vllm"
	if f.SGLang {
		engine = "sglang"
	}
	f.Nearest = Nearest(engine, f.Model, len(f.Ranks), f.seen(given.chunk(f.Group)))
	points := f.points(max(1, leastSteps*f.GapMs/1000), given.chunk(f.Group))
	if f.Kind == both {
		f.prefilling(points)
		f.Budget = f.tryBudgets(ctx, given)
		return f.withoutPrompts(points, given)
	}
	if math.IsNaN(f.KVExcess) {
		lacking := "vllm:cache_config_info with vllm:kv_cache_usage_perc"
		if f.SGLang {
			lacking = used.names[0]
		}
		return fmt.Errorf("the pages do not tell how many KV tokens ranks hold: they lack %s, or it is no number, or less than one "+
			"request may need; vLLM 0.32 and SGLang 0.5.23 have it, so take another version", lacking)
	}
	if f.Law = fit(points, surely); !f.Law.ok {
		return fmt.Errorf("the length of steps follows nothing that the pages tell, in %d windows; "+
			"watch for longer, and while the load changes", len(points))
	}
	steps := 0.0
	for i := range points {
		p := &points[i]
		f.KVShare += f.Law.C1Ms * p.kv / p.ms / float64(len(points))
		f.WaitMs, steps = f.WaitMs+p.steps*(f.Law.C1Ms*(p.kv-p.meanKV)+f.Law.RequestMs*(p.running-p.meanRunning)), steps+p.steps
	}
	f.WaitMs /= steps
	l, err := newTraffic(f, given)
	if err != nil {
		return err
	}
	f.Most = f.levelling(points, becomes{running: l.atMost()})
	f.Most.Low = max(0, f.Most.Low)
	f.assume(l, given)
	return f.decode(ctx, l, points, progress)
}

// leastSteps is how many steps a window has at least, about.
const leastSteps = 15

// withoutPrompts says what could be gained at most where ranks prefill: all that prompts cost, so
// that a step takes as long as where hardly any are computed. How much of that rounds would gain
// depends on what a prompt costs other ranks, which no page tells.
func (f *Finding) withoutPrompts(points []point, given Given) error {
	if given.Budget == 0 {
		f.Assumed = append(f.Assumed,
			fmt.Sprintf("a step computes at most %d tokens of prompts on a rank (--token-budget says another number)", assumedBudget))
	}
	f.Assumed = append(f.Assumed, "the steps in which a rank computes prompts do not depend on those of other ranks")
	few := len(points) / 10
	if few < leastFew {
		return fmt.Errorf("%d windows are too few, and %d are needed; watch for longer", len(points), 10*leastFew)
	}
	slices.SortFunc(points, func(a, b point) int { return cmp.Compare(a.meanPrompt, b.meanPrompt) })
	mean := func(of []point, x func(p *point) float64) (m float64) {
		steps := 0.0
		for i := range of {
			m, steps = m+of[i].steps*x(&of[i]), steps+of[i].steps
		}
		return m / steps
	}
	tokens := func(p *point) float64 { return p.meanPrompt }
	switch all := mean(points, tokens); {
	case all == 0:
		return errors.New("no window shows that a prompt was computed; survey again while clients send new prompts")
	case mean(points[:few], tokens) > hardly*all:
		return errors.New("prompts were computed in all windows, so no page tells what steps take without them; " + measureIt)
	}
	lengths := func(p *point) float64 { return p.ms }
	gain := func(few []point) float64 { return max(0, mean(points, lengths)/mean(few, lengths)-1) }
	low, high := stats.Bootstrap(few, 0.95, func(drawn []int) float64 {
		of := make([]point, few)
		for i, d := range drawn {
			of[i] = points[d]
		}
		return gain(of)
	})
	f.Most = Span{low, gain(points[:few]), high}
	return nil
}

// measureIt is what is left where pages do not tell.
const measureIt = "to measure the gain, play a trial on one address that nobody else uses: evenkeel survey --trial --engines ADDR " +
	"(docs/trial.md)"

// The windows with the fewest tokens of prompts are a tenth of all, and so many at least. In a step
// of theirs there is that share of the mean at most.
const (
	leastFew = 5
	hardly   = 0.1
)

// prefilling says in what share of the steps ranks compute prompts, if each step of a rank that
// does has as many tokens as it can, and ranks do not wait for each other.
func (f *Finding) prefilling(points []point) {
	var steps, some, ranks float64
	for i := range points {
		p := &points[i]
		steps, some, ranks = steps+p.steps, some+p.steps*p.prompting, ranks+p.steps*p.computing
	}
	if some > 0 {
		f.Prefilling = Prefilling{Known: true, Share: some / steps, Ranks: ranks / some}
	}
}

// chunk is how many tokens of a prompt a step computes in the mean, if each has as many as are left
// and as the budget allows.
func (given Given) chunk(g *Group) float64 {
	budget := float64(cmp.Or(given.Budget, assumedBudget))
	t, ok := newTexts(g.prompts, g.outputs)
	if !ok {
		return budget
	}
	tokens, chunks, r := 0.0, 0.0, rand.New(rand.NewPCG(1, 3))
	for range 5000 {
		n := float64(t.next(r).Prompt)
		tokens, chunks = tokens+n, chunks+math.Ceil(n/budget)
	}
	return tokens / chunks
}

// see sums up what the pages tell without any law.
func (f *Finding) see() {
	var steps, kv, requests, full, output, weighed, prompts, squares, coming float64
	for i := range f.windows {
		w := &f.windows[i]
		f.Seconds += w.seconds
		output += w.output
		if !math.IsNaN(w.stepMs) {
			weighed += w.output * w.stepMs
		}
		var sumKV, sumRunning, sumWaiting, sumFull float64
		for k := range w.ranks {
			r := &w.ranks[k]
			sumKV, sumRunning, sumWaiting = sumKV+r.kv, sumRunning+r.running, sumWaiting+r.waiting
			sumFull += r.full
			prompts += r.computed
			coming += r.coming * w.seconds
		}
		in := sumRunning + sumWaiting
		f.InFlight, f.Running, squares = f.InFlight+in*w.seconds, f.Running+sumRunning*w.seconds, squares+in*in*w.seconds
		f.mostRunning = max(f.mostRunning, w.most.running)
		if n := float64(len(w.ranks)); sumKV > 0 && sumRunning > 0 {
			steps++
			kv, requests = kv+w.most.kv*n/sumKV-1, requests+w.most.running*n/sumRunning-1
			full += sumFull / n
		}
	}
	f.KVExcess, f.RequestExcess, f.KVFull = kv/steps, requests/steps, full/steps
	f.InFlight, f.Running = f.InFlight/f.Seconds, f.Running/f.Seconds
	f.Closed = squares/f.Seconds-f.InFlight*f.InFlight < steady*f.InFlight
	f.coming = coming / f.Seconds
	if ended := f.outputs.total(); f.early() && f.coming > 0 && ended > 0 { // as many are there as come in the time for which each stays
		f.ComingMs = 1000 * f.coming * f.Seconds / ended
	}
	f.Tokens, f.GapMs, f.Prompts = output/f.Seconds, weighed/output, prompts/f.Seconds
}

// unasked says whether SGLang could count how long these ranks wait for each other, and does not.
func (f *Finding) unasked() bool {
	return f.SGLang && len(f.Ranks) > 1 && f.Tokens > 0 && f.barrier.Steps == 0
}

// early says whether ranks are chosen before the prefill: SGLang's are, where others prefill. Of
// other engines no page tells it.
func (f *Finding) early() bool { return f.SGLang && f.Kind == decodes }

// ready are the requests in the engines that are prefilled: they run, or wait for a slot.
func (f *Finding) ready() float64 {
	if f.coming > 0 {
		return f.InFlight - f.coming
	}
	return f.InFlight
}

// becomes is what a policy would make of a group, as far as a simulation tells: how much of the
// excess of its fullest rank over the mean would be left, and how many requests would run. Each has
// a standard error.
type becomes struct {
	excess, excessError   float64
	running, runningError float64
}

// levelling is what it is worth if that becomes of a group. The windows are drawn anew in blocks,
// since neighbours are alike, with a law for each draw. A block lasts as long as an answer at
// least: until then the same requests run.
func (f *Finding) levelling(points []point, to becomes) Span {
	steps, answer := 0.0, f.outputs.mean() // of all windows, and of an answer
	for i := range points {
		steps += points[i].steps
	}
	blocks := min(len(points), 30)
	if answer > 0 {
		blocks = min(blocks, int(steps/answer))
	}
	blocks = max(2, blocks)
	length := (len(points) + blocks - 1) / blocks
	r := rand.New(rand.NewPCG(uint64(len(points)), 7))
	low, high := stats.Bootstrap(blocks, 0.95, func([]int) float64 {
		var of []point
		for range blocks {
			from := r.IntN(len(points))
			for i := range length {
				of = append(of, points[(from+i)%len(points)])
			}
		}
		law := fit(of, 0) // what is not sure is uncertain, and not nothing
		if !law.ok {
			law = f.Law
		}
		excess := max(0, to.excess+to.excessError*r.NormFloat64())
		running := to.running + to.runningError*r.NormFloat64()
		return f.worth(&law, of, excess, running) + unseen*r.NormFloat64()
	})
	middle, few := f.worth(&f.Law, points, to.excess, to.running), fewer(blocks)
	return Span{Low: min(low, middle, middle+few*(low-middle)), Middle: middle, High: max(high, middle, middle+few*(high-middle))}
}

// fewer is how many times as wide an interval is that so few blocks tell, about as Student's
// distribution has it. Two tell hardly anything.
func fewer(blocks int) float64 {
	if blocks < 3 {
		return 9
	}
	n := float64(blocks - 1)
	return 1 + 1.2/n + 2/(n*n)
}

// worth is what is gained if so much of the excess is left, and so many requests run.
func (f *Finding) worth(law *fitted, of []point, excess, running float64) float64 {
	var ran, now, fixed, loads float64
	for i := range of {
		p := &of[i]
		ran, now = ran+p.steps*p.ms*p.meanRunning*float64(len(f.Ranks)), now+p.steps*p.ms
		kv, requests := p.meanKV+excess*(p.kv-p.meanKV), p.meanRunning+excess*(p.running-p.meanRunning)
		same := p.steps * (law.C1Ms*(p.kv-kv) + law.RequestMs*(p.running-requests)) // what is saved if as many run
		all := p.steps * (law.C1Ms*kv + law.RequestMs*requests)
		fixed, loads = fixed+p.steps*p.ms-same-all, loads+all
	}
	if fixed <= now/10 {
		return noLaw
	}
	if f.Closed {
		more := running * now / ran
		return more*now/(fixed+loads*more) - 1
	}
	// Requests come as they came, so that fewer are there at once if steps are shorter.
	return (now-loads)/fixed - 1
}

// noLaw is the gain where a step would be nothing but its loads.
const noLaw = 9

// decode says what levelling is worth on ranks that decode.
func (f *Finding) decode(ctx context.Context, l *traffic, points []point, progress func(done, of int)) error {
	all := make([][]levels, simulated) // of each policy
	for seed := range all {
		progress(seed, simulated)
		of, err := l.decodeLevels(ctx, uint64(seed))
		if err != nil {
			return fmt.Errorf("the simulation did not end: %w; survey again and wait for it", err)
		}
		all[seed] = of
	}
	progress(simulated, simulated)
	var excesses, weights, runs []float64
	for _, of := range all { // which router serves the group, nobody knows: those count most that fill ranks as those that were seen
		ours := of[len(of)-1]
		for _, router := range of[:len(of)-1] {
			excess := 1.0 // of what is level there is none to lower
			if router.load > 0 {
				excess = min(1, ours.load/router.load)
			}
			u := router.unlike(f.KVExcess, f.RequestExcess)
			excesses, weights = append(excesses, excess), append(weights, 1/(u*u))
		}
		running, least := l.ready(), l.Running
		if l.saturated() {
			running = ours.running
			if f.early() { // slots stand empty during a prefill
				least = 0
			}
		}
		runs = append(runs, min(l.atMost(), max(least, running)))
	}
	to := becomes{running: stats.Mean(runs), runningError: stats.Deviation(runs)}
	to.excess, to.excessError = weighed(excesses, weights)
	to.excessError = math.Hypot(to.excessError, spare*to.excess)
	f.Changes = append(f.Changes, change(levelled, f.levelling(points, to)))
	return nil
}

// weighed is the mean of values that have weights, and their deviation from it.
func weighed(values, weights []float64) (mean, deviation float64) {
	var all, squares float64
	for i, v := range values {
		all, mean, squares = all+weights[i], mean+weights[i]*v, squares+weights[i]*v*v
	}
	mean /= all
	return mean, math.Sqrt(max(0, squares/all-mean*mean))
}

// levelled is the default policy on ranks that decode.
const levelled = "ranks levelled by evenkeel"

// How often the policies are simulated on a group, and the standard error of what they make of it,
// as a share: their requests only resemble the real ones.
const (
	simulated = 5
	spare     = 0.1
)

// unseen is the standard error of a gain for what nobody can foretell: requests that were not seen
// are others.
const unseen = 0.005

// assume says what no page told.
func (f *Finding) assume(l *traffic, given Given) {
	add := func(format string, args ...any) { f.Assumed = append(f.Assumed, fmt.Sprintf(format, args...)) }
	if len(f.Ranks) > 1 && !strings.Contains(f.Ranks[0], "/") {
		add("the ranks of these addresses step together, because they have a model and do the same: %s", strings.Join(f.Ranks, ", "))
	}
	if given.Slots == 0 {
		add("a rank runs at most %d requests at once, the most that was seen (--slots says another number)", l.slots)
	}
	switch {
	case !f.early():
		add("evenkeel chooses ranks after the prefill, so not with ascend-layerwise")
	case math.IsNaN(f.coming):
		add("a prefill takes no time, because the pages lack %s; with SGLang, a slot stands empty for that time", transfer.names[0])
	default:
		add("a slot stands empty for the %.0f ms of a prefill, because SGLang needs the rank before it, "+
			"and bind.ahead is 0, its default", f.ComingMs)
	}
	if f.Closed {
		add("as many requests stay in the engines as there were: whoever gets an answer sooner asks again sooner")
	} else {
		add("requests come as they came, however fast they are answered")
	}
}
