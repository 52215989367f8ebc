package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"strings"

	"evenkeel/bench/rigs/asked"
	"evenkeel/mooncake"
)

// nearly is how far log probabilities may be apart if engines compute them in batches of other
// sizes. Two tokens that are nearer to each other than this may change their places.
const nearly = 1e-3

// judge is judge. Where no engine of the rows is like the plain one, because ranks share the
// experts, answers may also be off by what rounding does.
func (w *site) judge(ctx context.Context, q question, again, got map[string]any) outcome {
	o := judge(q.want, again, got)
	if o.verdict != fail || w.connector != mooncake.None {
		return o
	}
	different, fields := compare(q.want, got)
	left, near := beyondRounding(different)
	if len(left) == 0 {
		return passed("%d fields, of which %d log probabilities are within %v", fields, near, nearly)
	}
	gap, err := w.undecided(ctx, q, got)
	if err != nil {
		return failed("%s; %v", o.seen, err)
	}
	return passed("%d fields, the same until the plain engine was undecided: the two tokens there were %.1g apart", fields, gap)
}

var logprob = regexp.MustCompile(`logprob`)

// beyondRounding are the differences that rounding does not explain.
func beyondRounding(different []difference) (left []difference, near int) {
	for _, d := range different {
		a, isA := number(d.Plain)
		b, isB := number(d.Got)
		if isA && isB && logprob.MatchString(d.Path) && math.Abs(a-b) <= nearly {
			near++
			continue
		}
		left = append(left, d)
	}
	return left, near
}

// undecided looks for the tokens from which two answers part, and fails unless the plain engine was
// undecided at each. It returns how far the two tokens were apart there at most. Answers without
// token ids are asked for once more, with them.
func (w *site) undecided(ctx context.Context, q question, got map[string]any) (most float64, err error) {
	want := q.want
	if prompt, _ := choice(want, 0); prompt == nil {
		if want, got, err = w.withTokens(ctx, q, got); err != nil {
			return 0, err
		}
	}
	parted := 0
	for i := 0; ; i++ {
		prompt, a := choice(want, i)
		_, b := choice(got, i)
		if (a == nil) != (b == nil) {
			return 0, fmt.Errorf("answer %d: one of both has no token ids", i)
		}
		if a == nil {
			break
		}
		at := 0
		for at < min(len(a), len(b)) && a[at] == b[at] {
			at++
		}
		if at == len(a) && at == len(b) {
			continue
		}
		if parted++; at == min(len(a), len(b)) {
			return 0, fmt.Errorf("answer %d ends after %d tokens, and goes on with the other engine", i, at)
		}
		gap, err := w.lead(ctx, append(append([]json.Number{}, prompt...), a[:at]...), a[at], b[at])
		if err != nil {
			return 0, err
		}
		if gap > nearly {
			return 0, fmt.Errorf("answer %d parts after %d tokens, where the plain engine's token leads by %.2g", i, at, gap)
		}
		most = max(most, gap)
	}
	if parted == 0 {
		return 0, fmt.Errorf("the tokens are the same")
	}
	return most, nil
}

// choice is the token ids of a choice: of its prompt, and of its answer. They are nil where the
// document has none.
func choice(doc map[string]any, i int) (prompt, answer []json.Number) {
	b, _ := doc["body"].(map[string]any)
	list, _ := b["choices"].([]any)
	if i >= len(list) {
		return nil, nil
	}
	one, _ := list[i].(map[string]any)
	numbers := func(v any) (ids []json.Number) {
		all, _ := v.([]any)
		for _, x := range all {
			if n, ok := x.(json.Number); ok {
				ids = append(ids, n)
			}
		}
		return ids
	}
	if prompt = numbers(one["prompt_token_ids"]); prompt == nil {
		prompt = numbers(b["prompt_token_ids"]) // a chat has one prompt for all choices
	}
	return prompt, numbers(one["token_ids"])
}

// asks is how often evenkeel is asked for an answer again that parted from the plain engine's: it
// may come from an engine that gives the plain one.
const asks = 16

// withTokens asks for both answers once more, with their token ids. That of evenkeel must differ as
// the first one did.
func (w *site) withTokens(ctx context.Context, q question, got map[string]any) (want, again map[string]any, err error) {
	b := q.body.With(body{"return_token_ids": true, "stream": false})
	delete(b, "stream_options")
	if want, err = documentOf(ask(ctx, "POST", w.engines["plain"].url()+q.path, b)); err != nil {
		return nil, nil, err
	}
	different, _ := compare(q.want, got)
	left, _ := beyondRounding(different)
	for range asks {
		if again, err = documentOf(ask(ctx, "POST", w.proxy.URL()+q.path, b)); err != nil {
			return nil, nil, err
		}
		if asked.Leaves(again)[left[0].Path] == left[0].Got {
			return want, again, nil
		}
	}
	return nil, nil, fmt.Errorf("it came once, and not in %d answers after that", asks)
}

// lead is by how much one next token leads before another one, with the plain engine. A grammar may
// have ruled out others that are likelier than both.
func (w *site) lead(ctx context.Context, tokens []json.Number, first, second json.Number) (float64, error) {
	of := func(token json.Number) (float64, error) {
		var said struct {
			Choices []struct {
				Logprobs struct {
					Of []float64 `json:"token_logprobs"`
				}
			}
		}
		next := greedy.With(body{"prompt": tokens, "max_tokens": 1, "logprobs": 1, "allowed_token_ids": []json.Number{token}})
		a := ask(ctx, "POST", w.engines["plain"].url()+completions, next)
		if err := json.Unmarshal(a.Body, &said); err != nil || len(said.Choices) != 1 || len(said.Choices[0].Logprobs.Of) != 1 {
			return 0, fmt.Errorf("the plain engine tells no log probabilities: %s", strings.TrimSpace(a.String()))
		}
		return said.Choices[0].Logprobs.Of[0], nil
	}
	a, err := of(first)
	if err != nil {
		return 0, err
	}
	b, err := of(second)
	return math.Abs(a - b), err
}
