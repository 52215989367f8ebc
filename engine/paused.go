package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
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

// halt is why an engine takes no requests for now.
type halt struct {
	why       error // nil: it may get requests
	since     time.Time
	confirmed bool // a check has seen the reason; false: only answers to requests gave it
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

// reportedFault returns the fault for which the engine is halted; nil: it is not halted, or for a
// reason that watch.readFault does not report.
func (h halt) reportedFault() error {
	if errors.Is(h.why, ErrReforming) || errors.Is(h.why, ErrPaused) || errors.Is(h.why, errScaleFailed) {
		return nil
	}
	return h.why
}
