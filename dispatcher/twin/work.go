package twin

import (
	"math/rand/v2"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
)

// Replay is one model's part of a window under one policy. Requests come as they came, whatever became of
// those before: clients who wait for an answer before they ask again would have come at other times.
type Replay struct {
	*virtual.Driver
	engines engines
	mixed   bool // its ranks prefill, too
	fates   *fates
	came    arrivals
	quits   []quit // those that leave at their own time, whatever they got by then, the next first
	fleet   []fleet
	jobs    []job
	unused  []int32          // of these
	live    map[uint64]int32 // jobs that wait, by id
	begins  float64          // ms; steps before are not measured
	newly   [2]float64       // ms; the part between them is fresh
	ends    float64          // ms
	all     steps            // that are measured
	fresh   steps            // of these, of what is fresh
	spec    string
	begun   *Begun     // where it began; nil: with the real boards
	marks   []float64  // ms at which is kept how far it is, the next first
	Marked  []*Begun   // that
	chance  *rand.Rand // how unsteady steps are
	work    work
	owed    float64   // sum over the looks so far
	looks   []float64 // ms at which it is looked how much work is owed, the next first
	n       int       // of these in all
	still   int       // turns in which no time passed
	over    bool
	failed  error
}

// work is what tokens cost on level ranks: their share of a step, and of what is read for them. So much is owed to
// the requests that are inside: a policy that serves them sooner owes less, and none gains by putting the dear
// ones off.
type work struct {
	ranks        int
	token, perKV float64 // ms of a rank, the sum over all of them
	prompt       float64 // likewise, of a prompt token that is yet to be computed
}

func (w *work) add(law board.StepModel, ranks []board.Worker) {
	for i := range ranks {
		w.ranks++
		w.token += law.C0Ms/float64(max(1, ranks[i].Slots)) + law.RequestMs
		w.perKV += law.C1Ms
		w.prompt += law.OwnMs + law.SharedMs
	}
}

// of so many tokens of a request that holds so many before the first of them, of which so many are to be computed yet; 0 where
// nobody knows how many tokens it gets.
func (w *work) of(tokens, holds, compute int32) float64 {
	if tokens >= endless/2 || w.ranks == 0 {
		return 0
	}
	n := float64(tokens)
	return (n*w.token + (n*float64(holds)+n*(n+1)/2)*w.perKV + float64(compute)*w.prompt) / float64(w.ranks)
}

// look is a moment of the window at which it is looked how much work is owed, and the boards as they were.
type look struct {
	at     time.Time
	boards *board.Boards
}

// looks are those after the run-in of which boards were kept.
func (w *Window) looks() (all []look) {
	for _, s := range w.Stretches {
		if s.From.After(w.Measured().From) {
			all = append(all, look{s.From, s.Boards})
		}
	}
	return append(all, look{w.To(), w.End})
}

// owed is how much work was owed to a model's requests in the mean of the looks.
func (w *Window) owed(model string, k work) float64 {
	f, looks, sum := w.fates(model), w.looks(), 0.0
	for _, l := range looks {
		for _, c := range l.boards.Charges(model) {
			sum += k.of(f.rest(c.ID, c.Age+c.Generated), c.Prompt+c.Generated, c.Left)
		}
		for _, e := range l.boards.Waiting(model) {
			sum += k.of(f.rest(e.ID, int32(e.Age)), int32(e.Prompt), waits(e))
		}
	}
	return sum / float64(len(looks))
}

// owes is how much work is owed now.
func (r *Replay) owes() (sum float64) {
	r.engines.each(func(_, left, holds, compute int32) { sum += r.work.of(left, holds, compute) })
	for _, at := range r.live {
		j := &r.jobs[at]
		sum += r.work.of(j.left, j.prompt, waits(j.entry))
	}
	return sum
}

// waits is how much of its prompt is to be computed of a request that waits.
func waits(e *board.Entry) int32 {
	if e == nil || !e.Mixed {
		return 0
	}
	return int32(e.Prompt)
}

// Owed is how much work was owed in the mean of the looks, in ms of a rank.
func (r *Replay) Owed() float64 { return r.owed / float64(max(1, r.n-len(r.looks))) }
