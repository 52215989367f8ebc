package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"
)

// How a canary went, as a label.
const (
	canaryPassed  = "passed"
	canaryFailed  = "failed"
	canaryVouched = "vouched" // it ran into its deadline while streams of the instance went on
)

// canary asks each of the ranks for a completion of one token, for an engine that no
// longer computes still answers GET /health. A refusal of the
// request itself, 4xx, passes: it says nothing about the engine. It is bounded
// by limit and asks nothing of other engines: no hand-off is involved.
func (w *watch) canary(ctx context.Context, ranks []*Target, ask question, limit time.Duration) error {
	ctx, stop := context.WithTimeout(ctx, limit)
	defer stop()
	failures := make(chan error, len(ranks))
	for _, t := range ranks {
		w.traffic.Sends(canaryTokens)
		go func() {
			asked := time.Now()
			computed, err := oneToken(ctx, w.m.cfg.Client, t, ask)
			if computed { // after it was asked, by the core of this rank
				w.traffic.Signs(t.Rank).Seen(asked)
			}
			if errors.As(err, new(*RankError)) { // it refuses the rank, and nothing else
				err = nil
			}
			failures <- err
		}()
	}
	var all []error
	for range ranks {
		all = append(all, <-failures)
		w.traffic.Settles(canaryTokens, canaryTokens)
	}
	return errors.Join(all...)
}

// canaryTokens is more tokens than a canary's prompt has.
const canaryTokens = 16

// question returns the request with which a rank is tried, and the target that it is sent to.
type question func(t *Target) (to *Target, body []byte)

// asks returns the question for the engine's ranks. It needs m.mu.
func (w *watch) asks(model string) question {
	if own := w.in.Canary; own != nil {
		return func(t *Target) (*Target, []byte) { return t.Unranked(), own(model, t.Rank) }
	}
	return func(t *Target) (*Target, []byte) {
		// text and numbers always marshal
		body, _ := json.Marshal(map[string]any{"model": model, "prompt": "a", "max_tokens": 1, "temperature": 0, "stream": false})
		return t, body
	}
}

// oneToken has a rank compute a token. computed says that it did: a refusal comes from before the core, and passes, unless the rank is
// lost.
func oneToken(ctx context.Context, c *Client, t *Target, ask question) (computed bool, err error) {
	to, asked := ask(t)
	call := c.NewCall(to).Fresh() // one that was kept alive may lead to another process
	defer context.AfterFunc(ctx, call.Abort)()
	id := Header{"X-Request-Id", fmt.Sprintf("ek-canary-%016x", rand.Uint64())}
	resp, err := call.Do(http.MethodPost, completionsPath, []Header{{"Content-Type", "application/json"}, id}, [][]byte{asked}, Deadlines{})
	var body []byte
	if err == nil {
		defer resp.Close()
		body, err = resp.ReadAll(answerLimit)
	}
	var answer struct {
		Choices []json.RawMessage `json:"choices"`
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return false, fmt.Errorf("engine %s: no completion of one token: %w", t.ID, ctx.Err())
	case err != nil:
		return false, fmt.Errorf("completion of one token: %w", err)
	case resp.StatusCode()/100 == 4:
		return false, Withheld(resp.StatusCode(), body, to)
	case resp.StatusCode() != http.StatusOK:
		return false, &StatusError{Target: t.ID, Method: http.MethodPost, Path: completionsPath, Status: resp.StatusCode(),
			Why: Withheld(resp.StatusCode(), body, to)}
	case json.Unmarshal(body, &answer) != nil || len(answer.Choices) == 0:
		return false, fmt.Errorf("engine %s: its answer to a request of one token is no completion", t.ID)
	}
	return true, nil
}

const completionsPath = "/v1/completions"

// baseModel is the one a canary asks for; empty: none is known.
func (s Status) baseModel() string {
	for _, m := range s.Models {
		if m.Parent == "" {
			return m.ID
		}
	}
	return ""
}
