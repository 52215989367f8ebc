package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"time"

	"go.uber.org/zap"
)

// runCanaries sends the canaries of the instance at the times that nextCanary returns, until ctx
// ends. A send to canaryWake makes it ask nextCanary again, because a canary may be needed now.
func (w *watch) runCanaries(ctx context.Context) {
	timer := time.NewTimer(time.Hour) // the loop sets or stops it before it waits
	defer timer.Stop()
	for {
		h := w.known()
		next, isScheduled := h.nextCanary()
		if isScheduled {
			timer.Reset(time.Until(next))
		} else {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
			return
		case <-w.canaryWake:
		case <-timer.C:
			w.checkByCanaries(ctx)
		}
	}
}

// checkByCanaries sends a canary to all ranks that are not lost, and records its outcome.
func (w *watch) checkByCanaries(ctx context.Context) {
	w.m.mu.Lock()
	w.sendCanary(time.Now())
	h := w.health
	w.m.mu.Unlock()
	events := w.traffic.events.Load()
	model := h.baseModel()
	outcome, err := canaryNotSent, error(nil)
	if limit := w.m.cfg.Canary; limit > 0 && model != "" {
		ranks := slices.DeleteFunc(slices.Clone(h.in.Canaries), func(t *Target) bool { return h.Lacks(t.Rank) })
		outcome, err = canaryPassed, w.sendCanaries(ctx, ranks, h.in.canaryRequestFor(model), limit)
	}
	if ctx.Err() != nil { // the watch was stopped, which may be the cause of failures
		return
	}
	switch {
	case err == nil:
	case IsRefusal(err):
		outcome = canaryRefused
	case isOwnFault(err):
		outcome = canaryNotMade
	case errors.Is(err, context.DeadlineExceeded) && w.traffic.events.Load() != events:
		outcome = canaryVouched
	default:
		outcome = canaryFailed
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	wasOut := w.outage != nil
	w.move(func(h *health, now time.Time) {
		if slices.Contains(canaryOutcomes, outcome) {
			w.m.metrics.canaries.WithLabelValues(w.in.ID, outcome).Inc()
		}
		h.endCanary(outcome, err, w.traffic.maxSilenceShare(now) > 1, now)
	})
	if wasOut && w.outage == nil {
		w.log.Info("an engine is back in service", zap.String("canary", outcome))
	}
}

// sendCanaries asks all ranks at the same time for a completion of one token, because an engine
// that no longer computes still answers GET /health. It returns the errors of the ranks that did
// not give it within limit; nil: no canary failed. A refusal of the request (4xx) is no failure,
// because it does not show whether the engine computes. The requests have no hand-off, so they do
// not depend on another engine.
func (w *watch) sendCanaries(ctx context.Context, ranks []*Target, ask canaryRequest, limit time.Duration) error {
	ctx, stop := context.WithTimeout(ctx, limit)
	defer stop()
	// crossCheck compares the engine's gauges with what this proxy knows of its own requests, so
	// canaries are counted here, too. A canary does not wait for a free slot, so each rank may run one
	// request more than it has slots.
	w.traffic.AddSentWithoutSlot(1)
	defer w.traffic.AddSentWithoutSlot(-1)
	results := make(chan error, len(ranks)) // for each rank why its canary failed; nil: it did not
	for _, rank := range ranks {
		// A canary has no hand-off, so the engine computes its whole prompt.
		w.traffic.ExpectComputed(canaryTokens)
		go func() {
			sentAt := time.Now()
			computed, err := oneToken(ctx, w.m.cfg.Client, rank, ask)
			if computed { // the answer shows that this rank's core was alive after sentAt
				w.traffic.Liveness(rank.Rank).RecordSign(sentAt)
			}
			if errors.As(err, new(*RankError)) { // the engine lacks only this rank, so it may still compute
				err = nil
			}
			results <- err
		}()
	}
	var errs []error
	for range ranks {
		errs = append(errs, <-results)
		// Even a canary that failed counts as computed, because the engine may have computed it. Without
		// this count, crossCheck could report its tokens as KV that the engine should have pulled from a
		// prefill engine.
		const expected, computed = canaryTokens, canaryTokens
		w.traffic.SettleComputed(expected, computed)
	}
	return errors.Join(errs...)
}

// canaryTokens is an upper bound of the tokens in a canary's prompt.
const canaryTokens = 16

// A canaryRequest makes the body of a canary for a rank, and returns the target to which it is
// sent.
type canaryRequest func(t *Target) (to *Target, body []byte)

// canaryRequestFor returns the canaryRequest for the engine's ranks: the instance's own Canary,
// whose body names the rank, or else a plain completion, where a header names the rank.
func (in Instance) canaryRequestFor(model string) canaryRequest {
	if custom := in.Canary; custom != nil {
		return func(t *Target) (*Target, []byte) { return t.Unranked(), custom(model, t.Rank) }
	}
	return func(t *Target) (*Target, []byte) {
		// no error is possible: text and numbers always marshal
		body, _ := json.Marshal(map[string]any{"model": model, "prompt": "a", "max_tokens": 1, "temperature": 0, "stream": false})
		return t, body
	}
}

// oneToken asks a rank for one token. computed says that the rank's core computed it. An answer
// with status 4xx comes before the core sees the request. It is an error only if its message says
// that the engine does not have this rank.
func oneToken(ctx context.Context, c *Client, rank *Target, ask canaryRequest) (computed bool, err error) {
	// The target has no rank if the body of the request names it.
	target, request := ask(rank)
	// An idle connection may lead to another process, which ran at this address before.
	call := c.NewCall(target).Fresh()
	defer context.AfterFunc(ctx, call.Abort)()
	id := Header{"X-Request-Id", fmt.Sprintf("ek-canary-%016x", rand.Uint64())}
	resp, err := call.Do(http.MethodPost, completionsPath, []Header{{"Content-Type", "application/json"}, id},
		[][]byte{request}, Deadlines{})
	var body []byte
	if err == nil {
		defer resp.Close()
		body, err = resp.ReadAll(answerLimit)
	}
	var answer struct {
		Choices []json.RawMessage `json:"choices"`
	}
	switch {
	case err != nil && ctx.Err() != nil: // err only says that the call was aborted
		return false, fmt.Errorf("engine %s: no completion of one token: %w", rank.ID, ctx.Err())
	case err != nil:
		return false, fmt.Errorf("completion of one token: %w", err)
	case resp.StatusCode()/100 == 4:
		// It is nil if the engine refused the request for another reason.
		return false, ParseRefusal(resp.StatusCode(), body, target)
	case resp.StatusCode() != http.StatusOK:
		return false, &StatusError{Target: rank.ID, Method: http.MethodPost, Path: completionsPath, Status: resp.StatusCode(),
			// A 503 may say why the engine refuses all requests.
			Why: ParseRefusal(resp.StatusCode(), body, target)}
	case json.Unmarshal(body, &answer) != nil || len(answer.Choices) == 0:
		return false, fmt.Errorf("engine %s: its answer to a request of one token is no completion", rank.ID)
	}
	return true, nil
}

const completionsPath = "/v1/completions"
