package step

import (
	"math"
	"math/rand/v2"
	"time"
)

// world is a group whose requests come and go, and the law of its steps.
type world struct {
	law      Model
	padded   bool // the most requests count, of whichever rank
	rng      *rand.Rand
	noise    float64 // share of a step
	drift    float64 // share of c0 that comes and goes within hundreds of steps
	open     bool    // requests come at random, else one comes for each that ends
	output   float64 // tokens, in the mean
	prompt   float64 // likewise
	slots    int     // of a rank
	byKV     bool    // a request goes to the rank that holds least, else to the one with fewest requests
	computes bool    // ranks compute the prompts themselves
	budget   float64 // tokens of a rank in a step

	ranks  []serves
	clock  float64
	weight []float64 // that was in use, after each window
}

type serves struct{ running, waiting []*request }

type request struct{ kv, left, compute float64 }

func drawn(seed uint64) *world {
	r := rand.New(rand.NewPCG(seed, 7))
	between := func(a, b float64) float64 { return math.Exp(math.Log(a) + math.Log(b/a)*r.Float64()) }
	w := &world{
		rng: r, noise: between(0.003, 0.05), open: r.IntN(2) == 0, output: between(30, 1000), prompt: between(200, 5000),
		ranks: make([]serves, int(between(2, 13))), slots: int(between(8, 33)), byKV: r.IntN(3) > 0, budget: 2048,
	}
	w.law = Model{C0Ms: between(10, 60), C1Ms: between(2e-5, 3e-4)}
	if r.IntN(2) == 0 {
		w.drift = between(0.005, 0.05)
	}
	for range w.meant() {
		w.come(true)
	}
	return w
}

// costly has a request cost something.
func (w *world) costly() { w.law.RequestMs = 0.05 * math.Exp(math.Log(8)*w.rng.Float64()) }

// prefills has ranks compute prompts.
func (w *world) prefills() {
	token, shared := 0.08+0.08*w.rng.Float64(), 0.55+0.35*w.rng.Float64()
	w.law.OwnPromptMs, w.law.SharedPromptMs, w.law.PrefillMs = token*(1-shared), token*shared, 20*w.rng.Float64()
	w.computes = true
}

// meant is how many requests there are to be.
func (w *world) meant() int { return 7 * w.slots * len(w.ranks) / 10 }

func (r *serves) inside() int { return len(r.running) + len(r.waiting) }

func (w *world) come(before bool) {
	best, least := -1, 0.0
	for i := range w.ranks {
		r := &w.ranks[i]
		has := float64(r.inside())
		if w.byKV {
			for _, q := range r.running {
				has += q.kv
			}
			for _, q := range r.waiting {
				has += q.kv
			}
		}
		if r.inside() < w.slots && (best < 0 || has < least) {
			best, least = i, has
		}
	}
	if best < 0 {
		return
	}
	p := math.Ceil(min(60_000, w.prompt*math.Exp(w.rng.NormFloat64())))
	q, r := &request{kv: p, left: 1 + w.rng.ExpFloat64()*w.output, compute: p}, &w.ranks[best]
	if before || !w.computes {
		q.compute = 0
		r.running = append(r.running, q)
		return
	}
	r.waiting = append(r.waiting, q)
}

// step is what the ranks do in the next one.
func (w *world) step() []Rank {
	if w.open {
		for x := w.rng.ExpFloat64(); x < float64(w.meant())/w.output; x += w.rng.ExpFloat64() {
			w.come(false)
		}
	} else {
		n := w.meant()
		for i := range w.ranks {
			n -= w.ranks[i].inside()
		}
		for range n {
			w.come(false)
		}
	}
	all := make([]Rank, len(w.ranks))
	for i := range w.ranks {
		all[i] = w.ranks[i].step(w.budget)
	}
	return all
}

func (r *serves) step(budget float64) (does Rank) {
	kept := r.running[:0]
	for _, q := range r.running {
		does.Requests++
		does.KV += q.kv
		q.kv++
		if q.left--; q.left > 0 {
			kept = append(kept, q)
		}
	}
	r.running = kept
	for budget -= does.Requests; len(r.waiting) > 0 && budget > 0; {
		q := r.waiting[0]
		take := min(budget, q.compute)
		q.compute, budget, does.Prompt = q.compute-take, budget-take, does.Prompt+take
		if q.compute == 0 {
			r.running, r.waiting = append(r.running, q), r.waiting[1:]
		}
	}
	return does
}

// lasts is how long a step takes, with what is not in the law. One of two hundred is an outlier.
func (w *world) lasts(ranks []Rank) time.Duration {
	w.clock += w.rng.NormFloat64()*math.Sqrt(2./300) - w.clock/300
	ms := w.ms(ranks)*(1+w.noise*w.rng.NormFloat64()) + w.drift*w.clock*w.law.C0Ms
	if w.rng.IntN(200) == 0 {
		ms *= 1 + 9*w.rng.Float64()
	}
	return time.Duration(max(0.1, ms) * float64(time.Millisecond))
}

// ms is how long a step takes by the law.
func (w *world) ms(ranks []Rank) float64 {
	if !w.padded {
		return w.law.Ms(ranks)
	}
	most := requestWeight{}.slowestOf(ranks)
	return w.law.Ms([]Rank{most})
}

// teach so many steps.
func (w *world) teach(s *Times, steps int) {
	for range steps {
		ranks := w.step()
		length := w.lasts(ranks)
		s.Add(length)
		s.Learn(Sample{Ranks: ranks, Tokens: 1, Length: length})
		if s.weights.window.n == 0 {
			w.weight = append(w.weight, s.Weight())
		}
	}
}

// off is by how much a law is off from this one over so many steps, as a share of them.
func (w *world) off(m *Model, steps int, of func(ranks []Rank) bool) (share float64) {
	is, should := 0.0, 0.0
	for range steps {
		if ranks := w.step(); of(ranks) {
			is, should = is+math.Abs(m.Ms(ranks)-w.law.Ms(ranks)), should+w.law.Ms(ranks)
		}
	}
	return is / max(1, should)
}
