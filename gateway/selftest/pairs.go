package selftest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"evenkeel/mooncake"
)

const (
	mostPairs = 4096 // so many are tried
	pairsOnce = 16   // so many are tried at the same time, and no engine is in two of them
	mostFails = 3    // so many pairs of an engine may fail before one passes; then it is tried no more
)

// partners gives every rank a partner with a common model, and spreads partners. Each pair is a round of its own.
func partners(prefills, decodes []subject) (rounds [][]pair) {
	partner := func(s subject, others []subject, i int) (subject, bool) {
		for k := range others {
			if o := others[(i+k)%len(others)]; fits(s, o) {
				return o, true
			}
		}
		return subject{}, false
	}
	met := map[string]bool{}
	for i, p := range prefills {
		if d, ok := partner(p, decodes, i); ok {
			met[d.name] = true
			rounds = append(rounds, []pair{{p, d}})
		}
	}
	for i, d := range decodes {
		if p, ok := partner(d, prefills, i); ok && !met[d.name] {
			rounds = append(rounds, []pair{{p, d}})
		}
	}
	return rounds
}

// everyPair makes a pair of each engine of one side with each engine of the other side that it can work with. No engine is
// in two pairs of a round. The ranks of an engine take turns from pair to pair. A rank whose turn has not come by the end
// gets a partner in a round of its own. left is how many pairs are left out because there are more than mostPairs.
func everyPair(prefills, decodes []subject) (rounds [][]pair, left int) {
	sides := [2][][]subject{ofEngines(prefills), ofEngines(decodes)}
	few, many := 0, 1
	if len(sides[0]) > len(sides[1]) {
		few, many = 1, 0
	}
	met, tried := map[string]int{}, 0
	turn := func(ranks []subject) subject {
		name := ranks[0].name
		met[name]++
		s := ranks[(met[name]-1)%len(ranks)]
		met[s.name+" itself"]++
		return s
	}
	for r := range sides[many] {
		var round []pair
		for i, one := range sides[few] {
			other := sides[many][(i+r)%len(sides[many])]
			switch {
			case !fits(one[0], other[0]):
				continue
			case tried == mostPairs:
				left++
				continue
			}
			tried++
			both := [2]subject{}
			both[few], both[many] = turn(one), turn(other)
			round = append(round, pair{both[0], both[1]})
		}
		rounds = append(rounds, round)
	}
	for _, round := range partners(prefills, decodes) {
		if p := round[0]; met[p.prefill.name+" itself"] == 0 || met[p.decode.name+" itself"] == 0 {
			rounds = append(rounds, round)
		}
	}
	return rounds, left
}

func ofEngines(ranks []subject) (engines [][]subject) {
	for _, s := range ranks {
		if s.target.Rank <= 0 {
			engines = append(engines, nil)
		}
		engines[len(engines)-1] = append(engines[len(engines)-1], s)
	}
	return engines
}

// fits says whether a request could go through both, whichever of them prefills.
func fits(a, b subject) bool {
	_, same := common(a, b)
	_, ever := meets(a, b)
	return same && ever
}

// try sends one request through each pair, a round after the other.
func (t *tester) try(ctx context.Context, rounds [][]pair) {
	n := 0
	for _, round := range rounds {
		var all sync.WaitGroup
		free := make(chan struct{}, pairsOnce)
		for _, p := range round {
			if ctx.Err() != nil || t.givenUp(p.prefill) || t.givenUp(p.decode) {
				continue
			}
			number := n
			n++
			free <- struct{}{}
			all.Go(func() {
				defer func() { <-free }()
				t.pair(ctx, p.prefill, p.decode, number)
			})
		}
		all.Wait()
	}
}

// score notes the result of a pair. blamed is the side that failed; nil: the pair passed.
func (t *tester) score(p, d subject, blamed *subject) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range []subject{p, d} {
		r := t.recordOf(s)
		switch {
		case blamed == nil:
			r.passed = true
		case blamed.name == s.name:
			r.failed++
			r.blamed++
		default:
			r.failed++
		}
	}
}

// recordOf is called with t.mu held.
func (t *tester) recordOf(s subject) *record {
	r := t.records[s.name]
	if r == nil {
		r = &record{}
		t.records[s.name] = r
	}
	return r
}

// givenUp says whether a rank has failed so often, and never passed, that it is not tried again.
func (t *tester) givenUp(s subject) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.recordOf(s)
	if r.passed || r.failed < mostFails {
		return false
	}
	r.skipped++
	return true
}

// sum reports the failures of each rank that were not reported pair by pair.
func (t *tester) sum(ranks []subject) {
	for _, s := range ranks {
		r := t.records[s.name]
		if r == nil {
			continue
		}
		if more := r.blamed - mostFails; more > 0 {
			t.report(s.name, Bad, "it fails with %d more engines of the other side", more)
		}
		if r.skipped > 0 {
			t.report(s.name, Warn, "its first %d pairs failed, so %d others were not tried; mend it, and run the check again", r.failed, r.skipped)
		}
	}
}

// pair sends one request through a pair. id makes its prompt and its hand-off unlike any other's.
func (t *tester) pair(ctx context.Context, p, d subject, n int) {
	model, _ := common(p, d)
	id := fmt.Sprintf("ek-%s-%d", t.run, n)
	q, err := prompt(model, id)
	if err != nil {
		t.report(p.name, Bad, "%v", err)
		return
	}
	if !t.sits(ctx, &d) {
		return
	}
	defer d.seat.leave()
	got, prefill, decode := t.through(ctx, p, d, q, id)
	with := "with the hand-off of %s: %v"
	switch together, _ := meets(p, d); {
	case together:
		if with = "with the KV of %s: %v"; prefill == nil && decode == nil {
			t.report(p.name, OK, "prefilled %d tokens for a decode engine that was there before", got.PromptTokens)
			t.counts(p, got.CachedTokens)
		}
	case prefill == nil:
		t.report(p.name, OK, "a probe of %d tokens returned a usable hand-off", got.PromptTokens)
		t.counts(p, got.CachedTokens)
	}
	switch {
	case prefill != nil:
		t.blame(p, d, &p, "%v", prefill)
	case decode != nil:
		t.blame(p, d, &d, with, p.name, decode)
	default:
		t.score(p, d, nil)
	}
}

// sits takes a slot of a rank, where slots are taken; false: there is none for a test, which is reported.
func (t *tester) sits(ctx context.Context, d *subject) bool {
	if t.seat == nil {
		return true
	}
	var err error
	switch d.seat, err = t.seat(ctx, d.fleet, promptTokens); {
	case errors.Is(err, ErrNotOurs):
		return false
	case err != nil:
		t.report(d.name, OK, "was not tried: %v", err)
		return false
	}
	return true
}

func (s *Seat) leave() {
	if s.Leave != nil {
		s.Leave()
	}
}

// promptTokens is more than the tokens of the prompt and of the answer together.
const promptTokens = 512

// blame reports a failure of one side of a pair. The first failures of a rank are told one by one, the others are counted.
func (t *tester) blame(p, d subject, of *subject, format string, args ...any) {
	t.score(p, d, of)
	t.mu.Lock()
	told := t.recordOf(*of).blamed <= mostFails
	t.mu.Unlock()
	if told {
		t.report(of.name, Bad, format, args...)
	}
}

// counts warns of an engine that does not tell what its prefix cache had of a prompt: cached is -1.
func (t *tester) counts(p subject, cached int) {
	flag := "--enable-prompt-tokens-details"
	if p.profile.Connector == mooncake.SGLang {
		flag = "--enable-cache-report"
	}
	if cached < 0 {
		t.report(p.name, Warn, "cached_tokens are not reported; start it with %s", flag)
	}
}

// through sends a request through a pair: one engine after the other, or both at the same time if they do so. It says which side failed.
func (t *tester) through(ctx context.Context, p, d subject, q *query, id string) (got pairAnswer, prefill, decode error) {
	if together, _ := meets(p, d); together {
		return t.bound(ctx, p, d, q, id)
	}
	if got.ProbeAnswer, prefill = t.prefill(ctx, p, q, id); prefill == nil {
		got.decoded, decode = t.decode(ctx, d, q, got.ProbeAnswer, id)
	}
	return got, prefill, decode
}
