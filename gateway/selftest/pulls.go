package selftest

import (
	"context"
	"time"

	"evenkeel/engine"
	"evenkeel/mooncake"
)

// longPull is about how many tokens the longer prompt of timePulls has.
const longPull = 4096

// timePulls reports, for each decode engine, how long the longest prompt takes until its KV is
// pulled. A short and a longer prompt are timed: both decode as many tokens, so the difference is
// that of their KV. A hand-off may be sent at its deadline, so the time from there until its KV may
// be another prompt's must suffice.
func (t *tester) timePulls(ctx context.Context, prefills, decodes []testedRank) {
	for id, p := range t.healthyPairs(ctx, prefills, decodes, "t") {
		longest := engine.LongestContext(p.decode.listed)
		budget, err := p.prefill.profile.HoldBudget()
		if longest == 0 || err != nil || !p.prefill.profile.HasHandoff() {
			continue
		}
		allowed := p.prefill.profile.PulledWithin() - budget
		short, err := t.timePull(ctx, p, shortPrompt, id+"-s")
		if err != nil { // the pair has passed before, so it is not reported as unfit
			continue
		}
		long, err := t.timePull(ctx, p, min(longPull, longest/2)/tokensOfText, id+"-l")
		if err != nil || long.tokens <= short.tokens {
			continue
		}
		whole := short.takenFor(longest, long)
		if whole > allowed {
			t.report(p.decode.name, Warn, "began to answer a prompt of %d tokens %v after the hand-off, and one of "+
				"%d tokens after %v: one of max_model_len (%d tokens) takes about %v, and kv_hold_timeout leaves it "+
				"%v. Raise the time for which the prefill engine keeps KV, and kv_hold_timeout with it",
				short.tokens, roundTime(short.took), long.tokens, roundTime(long.took), longest, roundTime(whole), allowed)
			continue
		}
		t.report(p.decode.name, OK,
			"pulls a prompt of max_model_len (%d tokens) in about %v, and kv_hold_timeout leaves it %v",
			longest, roundTime(whole), allowed)
	}
}

// timedPull is how long a decode engine took to answer a hand-off.
type timedPull struct {
	tokens int // of the prompt
	took   time.Duration
}

// takenFor returns how long a prompt of so many tokens takes, if the time grows evenly with them.
func (short timedPull) takenFor(tokens int, long timedPull) time.Duration {
	perToken := max(0, float64(long.took-short.took)) / float64(long.tokens-short.tokens)
	return short.took + time.Duration(perToken*float64(tokens-short.tokens))
}

// timePull times the answer to a hand-off of a prompt with the text of the test, repeated so often.
func (t *tester) timePull(ctx context.Context, p pair, texts int, id string) (timedPull, error) {
	model, _ := commonModel(p.prefill, p.decode)
	q := newQuery(mooncake.Completions, model, id, texts)
	a, err := t.prefill(ctx, p.prefill, q, id)
	if err != nil {
		return timedPull{}, err
	}
	began := time.Now()
	_, err = t.decode(ctx, p.decode, q, a, id)
	return timedPull{a.PromptTokens, time.Since(began)}, err
}

// roundTime leaves out what differs each time.
func roundTime(d time.Duration) time.Duration {
	if d > time.Second {
		return d.Round(100 * time.Millisecond)
	}
	return d.Round(time.Millisecond)
}
