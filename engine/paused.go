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

// Reasons that an engine gives if it is alive but takes no requests.
var (
	// ErrReforming is the answer of vLLM while it changes the number of its ranks. vLLM sends it
	// before it reads the request, so the request may be repeated (ScalingMiddleware in
	// entrypoints/serve/elastic_ep/middleware.py, 0.32 and 0.33).
	ErrReforming = errors.New("its group re-forms, because vLLM changes the number of its ranks (elastic EP)")
	// ErrPaused is the answer of vLLM 0.33 and later while it is paused. The core has run nothing of
	// the request (_reject_add_while_paused in v1/engine/core.py). Older versions do not send it, nor
	// does an engine that was paused with mode=keep: there requests wait.
	ErrPaused = errors.New("it is paused, and POST /resume ends that (vLLM)")
	// ErrRetired is the answer of the API server of a rank that vLLM has removed from its group; the
	// others continue (entrypoints/serve/elastic_ep/middleware.py, 0.33).
	ErrRetired = errors.New("vLLM has taken this rank out of its group (elastic EP) and waits for its process to be ended; take it out of " +
		"the config, too")
)

// errDead says that vLLM itself reports that its core cannot recover.
var errDead = errors.New("one of its workers has died, and vLLM (--enable-fault-tolerance) will end the engine soon")

// errScaleFailed is of vLLM 0.33 and later, whose API server then refuses all requests.
var errScaleFailed = errors.New("vLLM could not change the number of its ranks, and takes no requests until all of them are restarted")

// LongestHalt is how long requests wait for a halted engine; then it counts as down.
const LongestHalt = 10 * time.Minute

// RankError says that the engine does not have the requested rank any more, or not yet.
type RankError struct{ Rank, Ranks int }

func (e *RankError) Error() string {
	return fmt.Sprintf("it has only %d ranks now, so there is no rank %d", e.Ranks, e.Rank)
}

// vLLM's refusals: the first is from its core, the others from its middleware.
const (
	saysPaused  = "Generation is paused. Please retry after it resumes."
	saysScaling = "The model is currently scaling. Please try again later."
	saysRetired = "This data-parallel rank has been retired and is awaiting shutdown."
)

// noRankMessage matches the refusal of a rank: vLLM in v1/engine/input_processor.py, SGLang in
// managers/tokenizer_manager.py. It matches only whole messages, because another message may quote
// a client's text.
var noRankMessage = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(?:data_parallel_rank (\d{1,6}) is|routed_dp_rank=(\d{1,6})) out of range \[0, (\d{1,6})\)\.?$`)
})

// ParseRefusal returns ErrReforming, ErrPaused, ErrRetired or a RankError if the reason lies in the
// engine, not in the request; nil: it is another answer.
func ParseRefusal(status int, body []byte, t *Target) error {
	switch status {
	case http.StatusServiceUnavailable:
		return refusalOfAll(body)
	case http.StatusBadRequest:
		return refusalOfRank(body, t)
	}
	return nil
}

// refusalOfAll: vLLM's member error is an object if the core refuses, a text if the middleware
// does.
func refusalOfAll(body []byte) error {
	var answer struct {
		Error json.RawMessage `json:"error"`
	}
	_ = json.Unmarshal(body, &answer)
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

// refusalOfRank: the message numbers ranks as the rank header does, from t.First. If t.First is 4,
// "data_parallel_rank 6 is out of range [0, 6)" means that the engine has two ranks, 4 and 5, and
// lacks evenkeel's rank 2.
func refusalOfRank(body []byte, t *Target) error {
	var answer struct {
		Message string `json:"message"` // SGLang and old vLLM
		Error   struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	_ = json.Unmarshal(body, &answer)
	found := noRankMessage().FindStringSubmatch(answer.Message + answer.Error.Message)
	if found == nil {
		return nil
	}
	number, _ := strconv.Atoi(found[1] + found[2]) // one group is empty; Atoi cannot fail
	end, _ := strconv.Atoi(found[3])
	rank, ranks := number-t.First, end-t.First
	plausible := ranks > 0 && ranks <= rank
	asked := t.Rank < 0 || t.Rank == rank // below 0: the body named the rank, unknown here
	if !plausible || !asked {
		return nil
	}
	return &RankError{Rank: rank, Ranks: ranks}
}

// SaysPaused takes an answer or an event of a stream.
func SaysPaused(status int, message string) bool {
	return status == http.StatusServiceUnavailable && message == saysPaused
}

// IsRefusal matches what ParseRefusal returns.
func IsRefusal(err error) bool {
	return errors.Is(err, ErrReforming) || errors.Is(err, ErrPaused) || errors.Is(err, ErrRetired) || errors.As(err, new(*RankError))
}

type halt struct {
	why       error // nil: it may get requests
	since     time.Time
	confirmed bool // by a check, not only by answers to requests
}

func (h halt) downReason(now time.Time) error {
	switch {
	case errors.Is(h.why, errDead), errors.Is(h.why, errScaleFailed):
		return h.why
	case h.why != nil && now.Sub(h.since) >= LongestHalt:
		return fmt.Errorf("it has taken no requests for %.0f minutes: %w", LongestHalt.Minutes(), h.why)
	}
	return nil
}

// reportedFault returns the fault of the halt that watch.readFault reports, or nil.
func (h halt) reportedFault() error {
	if errors.Is(h.why, ErrReforming) || errors.Is(h.why, ErrPaused) || errors.Is(h.why, errScaleFailed) {
		return nil
	}
	return h.why
}
