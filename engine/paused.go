package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"
)

// The reasons that an engine gives if it is alive but takes no requests.
var (
	// ErrReforming is the answer of vLLM while it changes the number of its ranks. vLLM sends it before it reads the request, so the
	// request may be repeated (ScalingMiddleware in entrypoints/serve/elastic_ep/middleware.py, 0.32 and 0.33).
	ErrReforming = errors.New("its group re-forms, because vLLM changes the number of its ranks (elastic EP)")
	// ErrPaused is the answer of vLLM 0.33 and later to a request that comes while it is paused. The core has run nothing of the
	// request (_reject_add_while_paused in v1/engine/core.py). Older versions do not send this answer. An engine that was paused with
	// mode=keep does not send it either: its requests wait until it is resumed.
	ErrPaused = errors.New("it is paused, and POST /resume ends that (vLLM)")
	// ErrRetired is the answer of the API server of a rank that vLLM has removed from its group. The other ranks
	// continue without it (entrypoints/serve/elastic_ep/middleware.py, 0.33).
	ErrRetired = errors.New("vLLM has taken this rank out of its group (elastic EP) and waits for its process to be ended; take it out of " +
		"the config, too")
)

// errDead says that vLLM itself reports that its core cannot recover.
var errDead = errors.New("one of its workers has died, and vLLM (--enable-fault-tolerance) will end the engine soon")

// errScaleFailed says that vLLM (0.33 and later) failed to change the number of its ranks. From then on its API server
// refuses all requests.
var errScaleFailed = errors.New("vLLM could not change the number of its ranks, and takes no requests until all of them are restarted")

// LongestHalt is how long requests wait for an engine that is halted (see Status.Halt). After this time the engine counts as down.
const LongestHalt = 10 * time.Minute

// RankError says that an engine refused a request, because it does not have the requested rank any more, or not yet.
type RankError struct{ Rank, Ranks int }

func (e *RankError) Error() string {
	return fmt.Sprintf("it has only %d ranks now, so there is no rank %d", e.Ranks, e.Rank)
}

// Messages of vLLM's refusals: the first is from its core, the others from its middleware.
const (
	saysPaused  = "Generation is paused. Please retry after it resumes."
	saysScaling = "The model is currently scaling. Please try again later."
	saysRetired = "This data-parallel rank has been retired and is awaiting shutdown."
)

// noRankMessage matches the message by which engines say that they do not have a rank: vLLM in v1/engine/input_processor.py, SGLang in
// managers/tokenizer_manager.py. It matches only whole messages, because a message with another meaning may quote a client's text.
var noRankMessage = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(?:data_parallel_rank (\d{1,6}) is|routed_dp_rank=(\d{1,6})) out of range \[0, (\d{1,6})\)\.?$`)
})

// ParseRefusal finds out whether an answer is a refusal for a reason that lies in the engine, not in the request. It returns ErrReforming,
// ErrPaused, ErrRetired or a RankError; nil: it is another answer. t is the target of the request.
func ParseRefusal(status int, body []byte, t *Target) error {
	switch status {
	case http.StatusServiceUnavailable:
		return refusalOfAll(body)
	case http.StatusBadRequest:
		return refusalOfRank(body, t)
	}
	return nil
}

// refusalOfAll reads a 503 by which vLLM refuses all requests; nil: the body says something else. Its member error is an object if
// the core refuses, and a text if the middleware does.
func refusalOfAll(body []byte) error {
	var answer struct {
		Error json.RawMessage `json:"error"`
	}
	_ = json.Unmarshal(body, &answer) // without a member error, both attempts to read it fail, and the result is nil
	var core struct {
		Message string `json:"message"`
	}
	if json.Unmarshal(answer.Error, &core) == nil && SaysPaused(http.StatusServiceUnavailable, core.Message) {
		return ErrPaused
	}
	var middleware string
	_ = json.Unmarshal(answer.Error, &middleware)
	switch middleware {
	case saysScaling:
		return ErrReforming
	case saysRetired:
		return ErrRetired
	}
	return nil
}

// refusalOfRank reads a 400 by which an engine says that it does not have the rank of the target t; nil: the body says something else. The
// message numbers ranks as the rank header does: the engine's first rank has the number t.First. If t.First is 4, "data_parallel_rank 6 is
// out of range [0, 6)" means that the engine has two ranks, 4 and 5, and lacks the one that evenkeel calls rank 2.
func refusalOfRank(body []byte, t *Target) error {
	var answer struct {
		Message string `json:"message"` // where SGLang and old vLLM put the message
		Error   struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	_ = json.Unmarshal(body, &answer) // a body that cannot be read has no message
	found := noRankMessage().FindStringSubmatch(answer.Message + answer.Error.Message)
	if found == nil {
		return nil
	}
	number, _ := strconv.Atoi(found[1] + found[2]) // one of the groups is empty; the pattern allows only a few digits, so Atoi does not fail
	end, _ := strconv.Atoi(found[3])               // the engine's ranks have numbers below end
	rank, ranks := number-t.First, end-t.First     // evenkeel numbers the engine's ranks from 0, the engine from t.First
	plausible := ranks > 0 && ranks <= rank        // else the engine would say that it lacks a rank that it has
	asked := t.Rank < 0 || t.Rank == rank          // below 0: the request named its rank in the body, which is not known here
	if !plausible || !asked {
		return nil
	}
	return &RankError{Rank: rank, Ranks: ranks}
}

// SaysPaused says whether an error, from an answer or from an event of a stream, is the refusal of a paused core.
func SaysPaused(status int, message string) bool {
	return status == http.StatusServiceUnavailable && message == saysPaused
}

// IsRefusal says whether an error is one that ParseRefusal returns, so that the engine or the rank, not the request, is the reason.
func IsRefusal(err error) bool {
	return errors.Is(err, ErrReforming) || errors.Is(err, ErrPaused) || errors.Is(err, ErrRetired) || errors.As(err, new(*RankError))
}

// Lacks says whether the engine has said that it does not have this rank. An only rank is rank 0,
// or NoRank.
func (s Status) Lacks(rank int) bool { return s.RankCount > 0 && rank >= s.RankCount }

// LostRanks returns an error that says which ranks are lost; nil: none is lost.
func (s Status) LostRanks() error {
	if s.RankCount == 0 {
		return nil
	}
	return fmt.Errorf("rank %d and those above it are lost: the engine has only %[1]d ranks now (elastic EP)", s.RankCount)
}

// halt is why an engine takes no requests for now.
type halt struct {
	why       error // nil: it may get requests
	since     time.Time
	confirmed bool // a check has seen the reason; false: only answers to requests gave it
}

// recordRefusal records the reason with which an engine refused a request (see ParseRefusal), and
// makes a check due. If it refuses all requests, the good result of a check that is under way is out
// of date. If it only lacks a rank, that result stays right, because the other ranks get requests.
func (h *health) recordRefusal(why error, now time.Time) {
	if h.in.Held != nil { // an operator has stopped requests to the engine, so the reason is known
		return
	}
	h.askCheck(dueNow)
	const confirmed = false // no check has seen this reason
	var rank *RankError
	switch {
	case errors.Is(why, ErrReforming):
		h.reports++
		h.setHalt(ErrReforming, confirmed, now)
	case errors.Is(why, ErrPaused): // another program paused the engine, or this proxy did so before the proxy was restarted
		h.reports++
		h.setHalt(ErrPaused, confirmed, now)
	case errors.As(why, &rank):
		// No page of vLLM gives this number, so the ranks are lost only until the facts are read
		// next: then a request finds out whether they are back.
		if rank.Ranks < h.in.Ranks { // else the request named a rank that the config does not have
			h.rankCount, h.lastCount = rank.Ranks, rank.Ranks
		}
	case errors.Is(why, ErrRetired):
		h.reports++
		h.Up, h.Err = false, ErrRetired
	}
}

// setHalt stops new requests to the engine for the reason why; nil: it may get them again. confirmed says that a check has seen the
// reason. A halt that ends before any check has seen its reason counts as a failure of the engine: it has refused a request, and its
// health checks did not show why. An engine without canaries is left alone.
func (h *health) setHalt(why error, confirmed bool, now time.Time) {
	old := h.halt
	h.halt = halt{why, old.since, why != nil && (confirmed || old.confirmed)}
	switch {
	case old.why == nil:
		h.halt.since = now
	case why != nil: // it goes on
	case old.confirmed: // it may have caused failures, and the number of ranks may be another one now
		h.suspicion, h.rankCount, h.lastCount = suspicion{}, 0, 0
	case len(h.in.Canaries) > 0 && h.circuit.Fail(canaryID, now): // during an outage it counts only if a canary is the trial
		h.takeOut(outFailures, fmt.Errorf("it refuses requests again and again, although its health checks do not say so: %w", old.why))
	}
}

// downReason returns why a halted engine counts as down: it cannot recover, or its halt has lasted for LongestHalt; nil: it does not count
// as down.
func (h halt) downReason(now time.Time) error {
	switch {
	case errors.Is(h.why, errDead), errors.Is(h.why, errScaleFailed):
		return h.why
	case h.why != nil && now.Sub(h.since) >= LongestHalt:
		return fmt.Errorf("it has taken no requests for %.0f minutes: %w", LongestHalt.Minutes(), h.why)
	}
	return nil
}

// reportedFault returns the fault for which the engine is halted; nil: it is not halted, or for a reason that watch.readFault does not
// report.
func (h halt) reportedFault() error {
	if errors.Is(h.why, ErrReforming) || errors.Is(h.why, ErrPaused) || errors.Is(h.why, errScaleFailed) {
		return nil
	}
	return h.why
}

// readHalt asks an engine that is alive for what its health check does not show: whether
// it is paused or waits for recovery. It returns why the engine may get no new requests; nil: it
// may get them. silentCore says why the core has not answered whether it is paused. While vLLM
// shuts down, its core answers no such question, and GET /health may still be answered well
// (0.33.0, _reject_utility_in_shutdown in v1/engine/core.py).
func (w *watch) readHalt(ctx context.Context, f *facts) (halt, silentCore error) {
	h := w.known()
	wasPaused := errors.Is(h.halt.why, ErrPaused)
	mayReport := f.reportsPause || wasPaused
	if mayReport && h.in.Held == nil { // an engine that an operator holds gets no requests anyway
		paused, err := w.readPaused(ctx)
		if err != nil { // without an answer the last known state stays valid, unless the engine lacks the path
			paused = wasPaused && !isMissingFeature(err)
			if !isMissingFeature(err) {
				silentCore = err
			}
		}
		if paused {
			return ErrPaused, silentCore
		}
	}
	if !f.reportsFaults {
		return nil, silentCore
	}
	fault, err := w.readFault(ctx, w.m.cfg.Timeout)
	if err != nil { // without an answer, the last reported fault stays valid
		fault = h.halt.reportedFault()
	}
	return fault, silentCore
}

// readScaling asks a vLLM that changes the number of its ranks whether this change goes on or has failed. It returns ErrReforming or, if
// the change failed, errScaleFailed, each with details. From 0.33 on, vLLM answers with the phase of the change, the requested number and
// the reason of a failure, even if each rank has an API server of its own (entrypoints/serve/elastic_ep/api_router.py).
func (w *watch) readScaling(ctx context.Context) error {
	ctx, stop := context.WithTimeout(ctx, min(w.m.cfg.Timeout, time.Second))
	defer stop()
	status, body, err := w.m.cfg.Client.NewCall(w.in.Target).Repeat().ask(ctx, http.MethodPost, "/is_scaling_elastic_ep", answerLimit)
	var answer struct {
		Phase string `json:"phase"`
		Error string `json:"error"`
		Ranks Number `json:"requested_data_parallel_size"`
	}
	if err != nil || status != http.StatusOK || json.Unmarshal(body, &answer) != nil { // older versions do not have this path
		return ErrReforming
	}
	ranks, err := answer.Ranks.Whole("requested_data_parallel_size", MostRanks)
	if err != nil {
		return fmt.Errorf("%w; %w", ErrReforming, err)
	}
	switch {
	case answer.Phase == "failed":
		return fmt.Errorf("%w; it was to have %d, and says: %.200q", errScaleFailed, ranks, answer.Error)
	case ranks > 0:
		return fmt.Errorf("%w; it is to have %d", ErrReforming, ranks)
	}
	return ErrReforming
}

// readFault asks vLLM whether its core has met a fault and waits for recovery. halt is the fault, for which requests must wait; nil: there
// is none. err says why there is no answer. Only a vLLM that was started with --enable-fault-tolerance answers
// (entrypoints/serve/fault_tolerance/api_router.py of 0.33). While it waits, GET /health answers 200, and new requests wait in the engine.
// vLLM's status is unhealthy while recovery is possible, and dead if a worker has died.
func (w *watch) readFault(ctx context.Context, timeout time.Duration) (halt, err error) {
	body, err := w.get(ctx, "/fault_tolerance/status", timeout, answerLimit)
	var answer struct {
		Schema  int `json:"schema_version"`
		Engines []struct {
			Status string `json:"status"`
			Fault  string `json:"fault_info"`
		} `json:"engines"`
	}
	switch {
	case err != nil:
		return nil, err
	case json.Unmarshal(body, &answer) != nil || answer.Schema == 0: // this server is not vLLM, or sends another format
		return nil, errNoFaultReport
	}
	for _, e := range answer.Engines {
		switch e.Status {
		case "healthy":
		case "dead":
			return errDead, nil
		default: // the status unhealthy: recovery is possible
			return fmt.Errorf("it has met a fault (%.64q) and waits for its recovery (vLLM, POST /fault_tolerance/apply)", e.Fault), nil
		}
	}
	return nil, nil
}

// readPaused asks vLLM whether its core is paused. vLLM has the paths to ask and to pause only with
// VLLM_SERVER_DEV_MODE=1 (entrypoints/rl/online/api_router.py and entrypoints/launchers/api_server/routers.py of 0.32
// and 0.33).
func (w *watch) readPaused(ctx context.Context) (paused bool, err error) {
	body, err := w.get(ctx, "/is_paused", min(w.m.cfg.Timeout, time.Second), answerLimit)
	if err != nil {
		return false, err
	}
	var answer struct {
		Paused bool `json:"is_paused"`
	}
	err = json.Unmarshal(body, &answer)
	return answer.Paused, err
}

var errNoFaultReport = errors.New("it does not say whether it has met a fault")

// isMissingFeature says whether an error means that the engine does not have the path or the feature at all, so that asking again is
// useless: by a status such as 404, or by an answer that is no report of faults.
func isMissingFeature(err error) bool {
	var answered *StatusError
	if errors.As(err, &answered) {
		return slices.Contains([]int{http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented}, answered.Status)
	}
	return errors.Is(err, errNoFaultReport)
}
