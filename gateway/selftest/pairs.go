package selftest

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"

	"evenkeel/mooncake"
)

const (
	maxPairs    = 4096 // limit of the pairs that are tried
	pairsAtOnce = 16   // pairs that are tried at the same time; no engine is in two of them
	maxFailures = 3    // failed pairs after which an engine is not tried any more, if no pair of it has passed
)

// partners gives every rank a partner with a common model, and uses the ranks of the other side
// evenly. Each pair is a round of its own.
func partners(prefills, decodes []testedRank) (rounds [][]pair) {
	partner := func(s testedRank, others []testedRank, i int) (testedRank, bool) {
		for k := range others { // rank i begins its search at i, so that not all ranks get the same partner
			if other := others[(i+k)%len(others)]; canPair(s, other) {
				return other, true
			}
		}
		return testedRank{}, false
	}
	hasPartner := map[string]bool{} // names of the decode ranks that have a partner already
	for i, p := range prefills {
		if d, ok := partner(p, decodes, i); ok {
			hasPartner[d.name] = true
			rounds = append(rounds, []pair{{p, d}})
		}
	}
	for i, d := range decodes {
		if p, ok := partner(d, prefills, i); ok && !hasPartner[d.name] {
			rounds = append(rounds, []pair{{p, d}})
		}
	}
	return rounds
}

// everyPair pairs each engine of one side with each engine of the other side that it can work with.
// In a round, each engine is in at most one pair. From pair to pair, the next rank of an engine is
// used, and a rank that is in no pair gets a partner in an extra round. leftOut is how many pairs
// are left out because there are more than maxPairs.
func everyPair(prefills, decodes []testedRank) (rounds [][]pair, leftOut int) {
	sides := [2][][]testedRank{ofEngines(prefills), ofEngines(decodes)}
	few, many := 0, 1 // indexes of the side with fewer engines and of the other side
	if len(sides[0]) > len(sides[1]) {
		few, many = 1, 0
	}
	turns := map[string]int{} // number of pairs that an engine is in so far, by the name of its first rank
	paired := map[string]bool{}
	pairCount := 0
	nextRank := func(ranks []testedRank) testedRank { // of one engine: the rank whose turn it is
		engine := ranks[0].name
		s := ranks[turns[engine]%len(ranks)]
		turns[engine]++
		paired[s.name] = true
		return s
	}
	for r := range sides[many] { // in each round, every engine of the smaller side moves on by one engine of the other side
		var round []pair
		for i, engine := range sides[few] {
			other := sides[many][(i+r)%len(sides[many])] // each i gets another engine, so that no engine is in two pairs of the round
			switch {
			case !canPair(engine[0], other[0]):
				continue
			case pairCount == maxPairs:
				leftOut++
				continue
			}
			pairCount++
			ranks := [2]testedRank{}
			ranks[few], ranks[many] = nextRank(engine), nextRank(other)
			round = append(round, pair{ranks[0], ranks[1]})
		}
		rounds = append(rounds, round)
	}
	for _, round := range partners(prefills, decodes) { // the extra rounds for ranks that are in no pair yet
		if p := round[0]; !paired[p.prefill.name] || !paired[p.decode.name] {
			rounds = append(rounds, round)
		}
	}
	return rounds, leftOut
}

// ofEngines groups ranks by their engines. In ranks, the ranks of one engine must follow each other
// in the order of their numbers.
func ofEngines(ranks []testedRank) (engines [][]testedRank) {
	for _, s := range ranks {
		if s.target.Rank <= 0 { // the first rank of the next engine
			engines = append(engines, nil)
		}
		engines[len(engines)-1] = append(engines[len(engines)-1], s)
	}
	return engines
}

// canPair says whether a request could go through both engines, whichever of them prefills.
func canPair(a, b testedRank) bool {
	_, sameModel := commonModel(a, b)
	_, compatible := compatibility(a, b)
	return sameModel && compatible
}

// eachAlone returns rounds in which every rank that prefills and decodes answers alone. In a round,
// each engine is in at most one pair.
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

// tryRounds sends one request through each pair, one round after the other, and up to pairsAtOnce
// pairs of a round at the same time. It leaves out pairs with a rank that has only failed so far.
// When ctx is done, it only counts the pairs that are left.
func (t *tester) tryRounds(ctx context.Context, rounds [][]pair) {
	for _, round := range rounds {
		var all sync.WaitGroup
		running := make(chan struct{}, pairsAtOnce) // has an element for each pair that is being tried
		for _, p := range round {
			if ctx.Err() != nil {
				t.leftOut++
				continue
			}
			if t.skipFailing(p.prefill) || t.skipFailing(p.decode) {
				continue
			}
			id := fmt.Sprintf("%s-%d", t.id(), t.pairs) // part of the prompt and of the hand-off's id, so that no two tests share these
			t.pairs++
			running <- struct{}{}
			all.Go(func() {
				defer func() { <-running }()
				t.tryPair(ctx, p, id)
			})
		}
		all.Wait()
	}
}

// tryPair sends one request through a pair, and records the result for both ranks.
func (t *tester) tryPair(ctx context.Context, pair pair, id string) {
	p, d := &pair.prefill, &pair.decode
	if t.takeSlot != nil {
		var err error
		d.slot, err = t.takeSlot(ctx, d.rosterName, promptTokens)
		switch {
		case errors.Is(err, ErrNotOwned): // another proxy sends requests to the rank, not this one
			return
		case err != nil: // a busy rank is no fault of the engine
			t.report(d.name, OK, "was not tried: %v", err)
			return
		}
		defer d.slot.Release()
	}
	if p.profile == nil { // a rank that prefills and decodes has no partner
		t.recordResult(t.tryAlone(ctx, *d, id), d)
		return
	}
	model, _ := commonModel(*p, *d)
	q := newQuery(mooncake.Completions, model, id, shortPrompt)
	got, prefillErr, decodeErr := t.sendThroughPair(ctx, *p, *d, q, id)
	concurrent, _ := compatibility(*p, *d)
	received := "hand-off"
	switch {
	case concurrent:
		received = "KV"
		if prefillErr == nil && decodeErr == nil {
			t.report(p.name, OK, "prefilled %d tokens for a decode engine that was there before", got.PromptTokens)
			t.checkCached(*p, got.CachedTokens)
		}
	case prefillErr == nil:
		t.report(p.name, OK, "a probe of %d tokens returned a usable hand-off", got.PromptTokens)
		t.checkCached(*p, got.CachedTokens)
	}
	if prefillErr == nil && decodeErr != nil { // the failure is reported as the decode engine's, and counts for both
		t.recordResult(fmt.Errorf("with the %s of %s: %w", received, p.name, decodeErr), d, p)
		return
	}
	t.recordResult(prefillErr, p, d) // after an error of the prefill engine, the decode engine is not to blame
}

// promptTokens is more than the tokens of prompt and answer of a test together.
const promptTokens = 512

// recordResult records the result of a pair. err is the error of the first rank in sides; nil: the
// pair passed. It reports the first maxFailures failures of a rank one by one, and only counts the
// rest.
func (t *tester) recordResult(err error, sides ...*testedRank) {
	t.mu.Lock()
	for _, s := range sides {
		r := t.resultsOf(*s)
		r.passed = r.passed || err == nil
		if err != nil {
			r.failed++
		}
	}
	first := t.resultsOf(*sides[0])
	if err != nil {
		first.blamed++
	}
	reportAlone := first.blamed <= maxFailures // reportUnreported reports the others together
	t.mu.Unlock()
	if err != nil && reportAlone { // report locks t.mu itself
		t.report(sides[0].name, Bad, "%v", err)
	}
}

// resultsOf returns the results of a rank, and creates them if there are none. It is called with
// t.mu held, or when tryRounds has returned.
func (t *tester) resultsOf(s testedRank) *pairResults {
	r := t.results[s.name]
	if r == nil {
		r = &pairResults{}
		t.results[s.name] = r
	}
	return r
}

// skipFailing says whether a rank has failed maxFailures times and never passed, so that it is not
// tried again. If so, it counts a pair that is left out for this reason.
func (t *tester) skipFailing(s testedRank) (skip bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.resultsOf(s)
	if r.passed || r.failed < maxFailures {
		return false
	}
	r.skipped++
	return true
}

// healthyPairs gives each engine a partner, and yields the pairs in which no rank has failed so
// far. Each pair comes with an id for its requests, which begins with kind.
func (t *tester) healthyPairs(ctx context.Context, prefills, decodes []testedRank, kind string) iter.Seq2[string, pair] {
	return func(yield func(id string, p pair) bool) {
		for i, round := range partners(firstRanks(prefills), firstRanks(decodes)) {
			p := round[0] // partners returns rounds of one pair
			hasFailed := t.resultsOf(p.prefill).failed > 0 || t.resultsOf(p.decode).failed > 0
			if ctx.Err() != nil || hasFailed {
				continue
			}
			if !yield(fmt.Sprintf("%s-%s%d", t.id(), kind, i), p) {
				return
			}
		}
	}
}

// reportUnreported reports the failures of a rank that were not reported pair by pair, and the
// pairs that were not tried.
func (t *tester) reportUnreported(s testedRank) {
	r := t.resultsOf(s)
	if more := r.blamed - maxFailures; more > 0 {
		t.report(s.name, Bad, "it fails with %d more engines of the other side", more)
	}
	if r.skipped > 0 {
		t.report(s.name, Warn, "its first %d pairs failed, so %d others were not tried; mend it, and run the check again", r.failed, r.skipped)
	}
}

// sendThroughPair sends a request through a pair: first through the prefill engine and then through
// the decode engine, or through both at the same time if their connector needs it. It returns the
// error of each side. After an error of the prefill engine, the decode engine at most frees the KV
// of a hand-off, and decodeErr is nil.
func (t *tester) sendThroughPair(ctx context.Context, p, d testedRank, q *query, id string) (got pairAnswer, prefillErr, decodeErr error) {
	if concurrent, _ := compatibility(p, d); concurrent {
		return t.sendConcurrently(ctx, p, d, q, id)
	}
	got.ProbeAnswer, prefillErr = t.prefill(ctx, p, q, id)
	var other *otherConnectorError
	switch {
	case prefillErr == nil:
		got.decodeCount, decodeErr = t.decode(ctx, d, q, got.ProbeAnswer, id)
	case errors.As(prefillErr, &other):
		t.discard(ctx, d, q, got.ProbeAnswer, id, other)
	}
	return got, prefillErr, decodeErr
}

// tryAlone makes one rank compute a prompt and answer it.
func (t *tester) tryAlone(ctx context.Context, s testedRank, id string) error {
	q := newQuery(mooncake.Completions, s.models[0], id, shortPrompt)
	_, err := t.answer(ctx, s, q, id, s.profile.DecodeBody(&q.body, q.endpoint, nil, nil, "", true, nil))
	return err
}
