package selftest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"evenkeel/mooncake"
)

const (
	mostPairs = 4096 // pairs that are tried at most
	pairsOnce = 16   // pairs that are tried at the same time; no engine is in two of them
	mostFails = 3    // pairs of an engine that may fail before one passes; then it is not tried any more
)

// partners gives every rank a partner with a common model, and spreads the partners evenly. Each pair is a round of
// its own.
func partners(prefills, decodes []testedRank) (rounds [][]pair) {
	partner := func(s testedRank, others []testedRank, i int) (testedRank, bool) {
		for k := range others {
			if o := others[(i+k)%len(others)]; fits(s, o) {
				return o, true
			}
		}
		return testedRank{}, false
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

// everyPair pairs each engine of one side with each engine of the other side that it can work with. No engine is in
// two pairs of a round. The ranks of an engine take turns from pair to pair. A rank that got no turn gets a partner
// in a round of its own. left is how many pairs are left out because there are more than mostPairs.
func everyPair(prefills, decodes []testedRank) (rounds [][]pair, left int) {
	sides := [2][][]testedRank{ofEngines(prefills), ofEngines(decodes)}
	few, many := 0, 1
	if len(sides[0]) > len(sides[1]) {
		few, many = 1, 0
	}
	pairsOf, tried := map[string]int{}, 0
	turn := func(ranks []testedRank) testedRank {
		name := ranks[0].name
		pairsOf[name]++
		s := ranks[(pairsOf[name]-1)%len(ranks)]
		pairsOf[s.name+" itself"]++
		return s
	}
	for r := range sides[many] {
		var round []pair
		for i, engine := range sides[few] {
			other := sides[many][(i+r)%len(sides[many])]
			switch {
			case !fits(engine[0], other[0]):
				continue
			case tried == mostPairs:
				left++
				continue
			}
			tried++
			ranks := [2]testedRank{}
			ranks[few], ranks[many] = turn(engine), turn(other)
			round = append(round, pair{ranks[0], ranks[1]})
		}
		rounds = append(rounds, round)
	}
	for _, round := range partners(prefills, decodes) {
		if p := round[0]; pairsOf[p.prefill.name+" itself"] == 0 || pairsOf[p.decode.name+" itself"] == 0 {
			rounds = append(rounds, round)
		}
	}
	return rounds, left
}

// ofEngines groups ranks by their engines. The ranks of an engine must follow each other, the first one first.
func ofEngines(ranks []testedRank) (engines [][]testedRank) {
	for _, s := range ranks {
		if s.target.Rank <= 0 {
			engines = append(engines, nil)
		}
		engines[len(engines)-1] = append(engines[len(engines)-1], s)
	}
	return engines
}

// fits says whether a request could go through both engines, whichever of them prefills.
func fits(a, b testedRank) bool {
	_, same := common(a, b)
	_, ever := meets(a, b)
	return same && ever
}

// eachAlone returns rounds in which every rank that prefills and decodes answers alone. No engine is in two pairs of
// a round.
func eachAlone(ranks []testedRank) (rounds [][]pair) {
	for _, ranks := range ofEngines(ranks) {
		for i, s := range ranks {
			if i == len(rounds) {
				rounds = append(rounds, nil)
			}
			rounds[i] = append(rounds[i], pair{decode: s})
		}
	}
	return rounds
}

// try sends one request through each pair, one round after the other. The pairs of a round are tried at the same time, up to pairsOnce of
// them. Pairs of a rank that only fails are left out.
func (t *tester) try(ctx context.Context, rounds [][]pair) {
	for _, round := range rounds {
		var all sync.WaitGroup
		free := make(chan struct{}, pairsOnce)
		for _, p := range round {
			if ctx.Err() != nil || t.givenUp(p.prefill) || t.givenUp(p.decode) {
				continue
			}
			id := fmt.Sprintf("%s-%d", t.id(), t.pairs) // in the prompt and in the hand-off's id, so that these differ from all others
			t.pairs++
			free <- struct{}{}
			all.Go(func() {
				defer func() { <-free }()
				t.pair(ctx, p, id)
			})
		}
		all.Wait()
	}
}

// pair sends one request through a pair.
func (t *tester) pair(ctx context.Context, pair pair, id string) {
	p, d := &pair.prefill, &pair.decode
	if t.seat != nil {
		var err error
		switch d.seat, err = t.seat(ctx, d.fleet, promptTokens); {
		case errors.Is(err, ErrNotOurs):
			return
		case err != nil:
			t.report(d.name, OK, "was not tried: %v", err)
			return
		}
		if d.seat.Leave != nil {
			defer d.seat.Leave()
		}
	}
	if p.profile == nil {
		t.recordResult(t.alone(ctx, *d, id), d)
		return
	}
	model, _ := common(*p, *d)
	q, err := ask(mooncake.Completions, model, id)
	if err != nil {
		t.report(p.name, Bad, "%v", err)
		return
	}
	got, prefill, decode := t.through(ctx, *p, *d, q, id)
	together, _ := meets(*p, *d)
	received := "hand-off"
	switch {
	case together:
		if received = "KV"; prefill == nil && decode == nil {
			t.report(p.name, OK, "prefilled %d tokens for a decode engine that was there before", got.PromptTokens)
			t.checkCached(*p, got.CachedTokens)
		}
	case prefill == nil:
		t.report(p.name, OK, "a probe of %d tokens returned a usable hand-off", got.PromptTokens)
		t.checkCached(*p, got.CachedTokens)
	}
	if prefill == nil && decode != nil {
		t.recordResult(fmt.Errorf("with the %s of %s: %w", received, p.name, decode), d, p)
		return
	}
	t.recordResult(prefill, p, d)
}

// promptTokens is a bound above the tokens of prompt and answer together.
const promptTokens = 512

// recordResult records the result of a pair. err is the error of the first rank in sides; nil: the pair passed. The first
// failures of a rank are reported one by one, the others are only counted.
func (t *tester) recordResult(err error, sides ...*testedRank) {
	t.mu.Lock()
	for _, s := range sides {
		r := t.recordOf(*s)
		if r.passed = r.passed || err == nil; err != nil {
			r.failed++
		}
	}
	record := t.recordOf(*sides[0])
	if err != nil {
		record.blamed++
	}
	reportIt := record.blamed <= mostFails
	t.mu.Unlock()
	if err != nil && reportIt {
		t.report(sides[0].name, Bad, "%v", err)
	}
}

// recordOf returns the record of a rank, and makes it if there is none. It is called with t.mu held.
func (t *tester) recordOf(s testedRank) *record {
	r := t.records[s.name]
	if r == nil {
		r = &record{}
		t.records[s.name] = r
	}
	return r
}

// givenUp says whether a rank has failed so often, and never passed, that it is not tried again.
func (t *tester) givenUp(s testedRank) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.recordOf(s)
	if r.passed || r.failed < mostFails {
		return false
	}
	r.skipped++
	return true
}

// reportUnreported reports the failures of a rank that were not reported pair by pair, and the pairs that were not tried.
func (t *tester) reportUnreported(s testedRank) {
	r := t.recordOf(s)
	if more := r.blamed - mostFails; more > 0 {
		t.report(s.name, Bad, "it fails with %d more engines of the other side", more)
	}
	if r.skipped > 0 {
		t.report(s.name, Warn, "its first %d pairs failed, so %d others were not tried; mend it, and run the check again", r.failed, r.skipped)
	}
}

// through sends a request through a pair: through one engine after the other, or through both at the same time if
// their connector works so. It returns the error of each side.
func (t *tester) through(ctx context.Context, p, d testedRank, q *query, id string) (got pairAnswer, prefill, decode error) {
	if together, _ := meets(p, d); together {
		return t.throughAtOnce(ctx, p, d, q, id)
	}
	if got.ProbeAnswer, prefill = t.prefill(ctx, p, q, id); prefill == nil {
		got.decoded, decode = t.decode(ctx, d, q, got.ProbeAnswer, id)
	}
	return got, prefill, decode
}

// alone makes one rank compute a prompt and answer it.
func (t *tester) alone(ctx context.Context, s testedRank, id string) error {
	q, err := ask(mooncake.Completions, s.models[0], id)
	if err == nil {
		_, err = t.answer(ctx, s, q, id, s.profile.DecodeBody(&q.body, q.endpoint, nil, nil, "", true, nil))
	}
	return err
}
