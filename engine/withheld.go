package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
)

// The reasons that an engine which is alive gives for taking no requests.
var (
	// ErrReforming is the answer of vLLM while it changes the number of its ranks. The ScalingMiddleware of
	// entrypoints/serve/elastic_ep/middleware.py (0.32, 0.33) answers before anything reads the request.
	ErrReforming = errors.New("its group re-forms, because vLLM changes the number of its ranks (elastic EP)")
	// ErrPaused is the answer of vLLM from 0.33 on to a request that comes while it is paused, unless by mode=keep:
	// the core has run nothing of the request (_reject_add_while_paused in v1/engine/core.py). Before 0.33, and with
	// mode=keep, requests wait in the engine until it goes on.
	ErrPaused = errors.New("it is paused, and POST /resume ends that (vLLM)")
	// ErrRetired is the answer of the API server of a rank that was taken out of its group, so that the other ranks
	// go on without it (entrypoints/serve/elastic_ep/middleware.py, 0.33).
	ErrRetired = errors.New("vLLM has taken this rank out of its group (elastic EP) and waits for its process to be ended; take it out of " +
		"the config, too")
)

// errDead is the state of a core that will not come back, by vLLM's own answer.
var errDead = errors.New("one of its workers has died, and vLLM (--enable-fault-tolerance) will end the engine soon")

// errScaleFailed is the state of vLLM, from 0.33 on, after a change of its ranks that failed for good: its API server
// refuses everything from then on.
var errScaleFailed = errors.New("vLLM could not change the number of its ranks, and takes no requests until all of them are restarted")

// LongestHalt is how long requests wait for an engine that is halted. An engine that is halted for longer counts as
// down.
const LongestHalt = 10 * time.Minute

// RankError is the refusal of a request for a rank that the engine does not have any more, or not yet.
type RankError struct{ Rank, Ranks int }

func (e *RankError) Error() string {
	return fmt.Sprintf("it has only %d ranks now, so there is no rank %d", e.Ranks, e.Rank)
}

// These are the messages with which vLLM refuses: of its core while that is paused, and two of its middleware.
const (
	saysPaused  = "Generation is paused. Please retry after it resumes."
	saysScaling = "The model is currently scaling. Please try again later."
	saysRetired = "This data-parallel rank has been retired and is awaiting shutdown."
)

// noRank matches the whole message with which engines refuse a rank: vLLM in v1/engine/input_processor.py, SGLang in
// managers/tokenizer_manager.py. Only a whole message counts, because other messages may quote a client.
var noRank = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(?:data_parallel_rank (\d{1,6}) is|routed_dp_rank=(\d{1,6})) out of range \[0, (\d{1,6})\)\.?$`)
})

// Withheld reads a refusal that is about the engine and not about the request. It returns ErrReforming, ErrPaused,
// ErrRetired or a RankError; nil: it is another refusal. If the target has a rank, the request named it in a header.
// The engine counts its ranks as the header does.
func Withheld(status int, body []byte, t *Target) error {
	switch status {
	case http.StatusServiceUnavailable:
		var told struct {
			Error json.RawMessage `json:"error"`
		}
		var says string
		var why struct {
			Message string `json:"message"`
		}
		_ = json.Unmarshal(body, &told) // else it is another refusal, which stays unread
		_ = json.Unmarshal(told.Error, &says)
		if json.Unmarshal(told.Error, &why) == nil && SaysPaused(status, why.Message) {
			return ErrPaused
		}
		switch says {
		case saysScaling:
			return ErrReforming
		case saysRetired:
			return ErrRetired
		}
	case http.StatusBadRequest:
		var told struct {
			Message string `json:"message"` // SGLang and old vLLM
			Error   struct {
				Message string `json:"message"`
			} `json:"error"`
		}
		_ = json.Unmarshal(body, &told) // else it is another refusal
		found := noRank().FindStringSubmatch(told.Message + told.Error.Message)
		if found == nil {
			return nil
		}
		e := &RankError{}
		e.Rank, _ = strconv.Atoi(found[1] + found[2]) // the pattern allows only a few digits, so Atoi does not fail
		e.Ranks, _ = strconv.Atoi(found[3])
		e.Rank, e.Ranks = e.Rank-t.First, e.Ranks-t.First
		if e.Ranks > 0 && e.Ranks <= e.Rank && (t.Rank < 0 || t.Rank == e.Rank) {
			return e
		}
	}
	return nil
}

// SaysPaused says whether a refusal, which may be an event of a stream, comes from a core that is paused.
func SaysPaused(status int, message string) bool {
	return status == http.StatusServiceUnavailable && message == saysPaused
}

// IsWithheld says whether an error is one that Withheld returns.
func IsWithheld(err error) bool {
	return errors.Is(err, ErrReforming) || errors.Is(err, ErrPaused) || errors.Is(err, ErrRetired) || errors.As(err, new(*RankError))
}

// absent has the ranks of an engine that is up which get no requests, and why the whole engine gets none. It is a
// value.
type absent struct {
	halt      error         // why nothing new goes there; requests for it wait; nil: it is not halted
	since     time.Time     // begin of the halt
	confirmed bool          // a check has seen the halt, too, and not only a request
	ranks     int           // how many ranks the engine has, by its refusal of a rank; 0: all
	triedAt   time.Time     // when a try last asked whether it has more ranks again
	rest      time.Duration // least time before the next try, if requests of clients are the tries
	silent    map[int]bool
	reports   loads
}

// lost is the reason of each rank that is out of its group, by rank; of is how many ranks the engine has by the config.
func (a *absent) lost(of int) map[int]string {
	if a.ranks == 0 && len(a.silent) == 0 {
		return nil
	}
	all := map[int]string{}
	for r := range a.silent {
		all[r] = "its scheduler says nothing while those of other ranks do, so SGLang goes on without it (elastic EP)"
	}
	for r := a.ranks; a.ranks > 0 && r < of; r++ {
		all[r] = fmt.Sprintf("the engine has only %d ranks now (elastic EP)", a.ranks)
	}
	return all
}

// Halted says that no new requests go to an engine that is up, and that requests wait for it.
func (s Status) Halted() bool { return s.Up && s.Halt != nil }

// LostRanks says in a sentence which ranks are lost, and why; nil: none is.
func (s Status) LostRanks() error {
	if len(s.Lost) == 0 {
		return nil
	}
	parts := make([]string, 0, len(s.Lost))
	ranks := slices.Sorted(maps.Keys(s.Lost))
	for from := 0; from < len(ranks); {
		to := from + 1
		for to < len(ranks) && ranks[to] == ranks[to-1]+1 && s.Lost[ranks[to]] == s.Lost[ranks[from]] {
			to++
		}
		which := fmt.Sprintf("rank %d is", ranks[from])
		if to-from > 1 {
			which = fmt.Sprintf("ranks %d to %d are", ranks[from], ranks[to-1])
		}
		parts = append(parts, fmt.Sprintf("%s lost: %s", which, s.Lost[ranks[from]]))
		from = to
	}
	return errors.New(strings.Join(parts, "; "))
}

// quietChecks is how many check intervals the scheduler of a rank may send no load while other ranks do. Each
// scheduler sends its load after its batches, and after every turn without one.
const quietChecks = 5

// loads has the time at which each rank of a server of SGLang last sent its load. It is a value.
type loads struct {
	stamps map[int]float64
	at     map[int]time.Time // when the entry of told last changed
}

// see takes in the answer of GET /v1/loads: for each rank, the time stamp of the last load that it sent. It returns the
// ranks that have sent no new load for the time quiet, while others have.
func (l *loads) see(told map[int]float64, quiet time.Duration, now time.Time) map[int]bool {
	if l.stamps == nil {
		l.stamps, l.at = map[int]float64{}, map[int]time.Time{}
	}
	var newest time.Time
	for r, stamp := range told {
		if was, known := l.stamps[r]; !known || was != stamp {
			l.stamps[r], l.at[r] = stamp, now
		}
		if l.at[r].After(newest) {
			newest = l.at[r]
		}
	}
	silent := map[int]bool{}
	for r := range told {
		if newest.Sub(l.at[r]) >= quiet {
			silent[r] = true
		}
	}
	return silent
}

// withheld takes in the reason that an engine gave in place of an answer, and has the engine checked at once. It
// needs m.mu.
func (w *watch) withheld(why error) {
	if w.in.Held != nil { // the pause of the operator is the reason
		return
	}
	w.checkNow()
	var rank *RankError
	switch {
	case errors.Is(why, ErrReforming):
		w.reports++ // a check that began before this cannot end the halt
		w.halt(ErrReforming, false)
	case errors.Is(why, ErrPaused): // by a call that did not come through this proxy, or that this proxy does not remember
		w.reports++
		w.halt(ErrPaused, false)
	case errors.As(why, &rank):
		if w.absent.ranks != rank.Ranks { // else other requests were refused in the same way before
			w.absent.rest = min(2*w.absent.rest, longestRest)
		}
		w.absent.ranks, w.absent.triedAt = rank.Ranks, time.Now()
		w.publish(w.status)
	case errors.Is(why, ErrRetired):
		w.reports++
		next := w.status
		next.Up, next.Err = false, ErrRetired
		w.setStatus(next)
	}
}

// halt stops new requests to the engine for the reason why; nil: they may go there again. confirmed says that a check has
// seen the reason, too. If an engine gives the reason only to requests, and no check sees it, the halt counts as a
// failure once it ends. It needs m.mu.
func (w *watch) halt(why error, confirmed bool) {
	before, confirmedBefore := w.absent.halt, w.absent.confirmed
	w.absent.halt, w.absent.confirmed = why, why != nil && (confirmed || confirmedBefore)
	if before == nil {
		w.absent.since = time.Now()
	}
	switch {
	case why == nil && confirmedBefore:
		w.forgive()                                      // failures during the halt say nothing
		w.absent.triedAt, w.absent.rest = time.Time{}, 0 // the engine may have more ranks now
		w.m.cfg.Log.Info("an engine takes requests again", zap.String("engine", w.in.ID))
	case why == nil && before != nil && len(w.in.Canaries) > 0:
		if w.suspect.circuit.Fail(theCanary, time.Now()) { // the request that was refused may be the canary
			w.takeOut(outFailures, fmt.Errorf("it refuses requests again and again, although its health checks do not say so: %w", before))
		}
	case w.absent.confirmed && !confirmedBefore:
		w.m.cfg.Log.Warn("an engine takes no requests for now, and its requests wait", zap.String("engine", w.in.ID), zap.Error(why))
	}
	w.publish(w.status)
}

// hold sets why an operator stops requests to the engine. Nothing counts against the engine while it is held, and
// what counted before is forgotten when the hold ends. It needs m.mu.
func (w *watch) hold(why *Held) {
	was := w.in.Held
	if w.in.Held = why; was == why || was != nil && why != nil && *was == *why {
		return
	}
	if why == nil {
		w.forgive()
		w.failed = 0
		w.checkNow()
	}
	if w.m.watches[w.in.ID] == w { // else the watch is new, and its status was not published yet
		w.publish(w.status)
	}
}

// holdsBack says that an error does not count, because the engine is held. Only an unreachable engine counts as a
// failure then.
func (w *watch) holdsBack(err error) bool { return w.in.Held != nil && err != nil && !unreachable(err) }

// hopeless is the reason why a halted engine counts as down; nil: it does not.
func (a *absent) hopeless(now time.Time) error {
	switch {
	case errors.Is(a.halt, errDead), errors.Is(a.halt, errScaleFailed):
		return a.halt
	case a.halt != nil && now.Sub(a.since) >= LongestHalt:
		return fmt.Errorf("it has taken no requests for %.0f minutes: %w", LongestHalt.Minutes(), a.halt)
	}
	return nil
}

// publish completes a status by what is absent, and makes it the current one. It logs which ranks are lost or back. It
// needs m.mu.
func (w *watch) publish(next Status) {
	w.fill(&next)
	before := w.status.LostRanks()
	w.setStatus(next)
	switch now := next.LostRanks(); {
	case text(now) == text(before):
	case now != nil:
		w.m.cfg.Log.Warn("an engine has lost ranks, which get no requests", zap.String("engine", w.in.ID), zap.Error(now))
	default:
		w.m.cfg.Log.Info("an engine has all its ranks again", zap.String("engine", w.in.ID))
	}
}

// fill sets Halt, Lost and Accused of a status. It needs m.mu.
func (w *watch) fill(next *Status) {
	next.Halt, next.Lost = w.absent.halt, w.absent.lost(w.in.Ranks)
	if w.in.Held != nil && (next.Halt == nil || errors.Is(next.Halt, ErrPaused)) {
		next.Halt = w.in.Held
	}
	if next.Halt == nil {
		next.Accused = w.suspect.accusation()
	}
}

// lookForRanks asks an engine that is alive for what its health check does not show: whether it waits for its
// recovery, and which of its ranks are silent. It returns the reason why nothing new may go there.
func (w *watch) lookForRanks(ctx context.Context) (halt error) {
	w.m.mu.Lock()
	held, was := w.in.Held != nil, errors.Is(w.absent.halt, ErrPaused)
	w.m.mu.Unlock()
	if !held && (w.facts.pauses || was) {
		paused, err := w.isPaused(ctx)
		if err != nil { // if the question fails, the last answer counts
			paused = was && !lacks(err)
		}
		if paused {
			return ErrPaused
		}
	}
	switch {
	case w.facts.tolerant:
		var err error
		if halt, err = w.fault(ctx, w.m.cfg.Timeout); err != nil { // if the question fails, the last answer counts
			w.m.mu.Lock()
			if halt = w.absent.halt; errors.Is(halt, ErrReforming) || errors.Is(halt, ErrPaused) || errors.Is(halt, errScaleFailed) {
				halt = nil
			}
			w.m.mu.Unlock()
		}
	case w.facts.elastic && w.in.Ranks > 1:
		if told, err := w.loads(ctx); err == nil {
			silent := w.absent.reports.see(told, quietChecks*w.m.cfg.HealthInterval, time.Now())
			w.m.mu.Lock()
			w.absent.silent = silent
			w.m.mu.Unlock()
		}
	}
	return halt
}

// reforming asks vLLM how far a change of the number of its ranks is, while it refuses requests because of that
// change. From 0.33 on vLLM answers with the phase, the requested number and why it failed, also where each rank has
// an API server of its own (entrypoints/serve/elastic_ep/api_router.py). Before the commit, in the phase preparing,
// it takes requests. After a change that failed it never does.
func (w *watch) reforming(ctx context.Context) error {
	ctx, stop := context.WithTimeout(ctx, min(w.m.cfg.Timeout, time.Second))
	defer stop()
	status, body, err := w.m.cfg.Client.NewCall(w.in.Target).Repeat().ask(ctx, http.MethodPost, "/is_scaling_elastic_ep", answerLimit)
	var told struct {
		Phase string `json:"phase"`
		Error string `json:"error"`
		Ranks Number `json:"requested_data_parallel_size"`
	}
	if err != nil || status != http.StatusOK || json.Unmarshal(body, &told) != nil { // older versions do not answer this
		return ErrReforming
	}
	ranks, err := told.Ranks.Whole("requested_data_parallel_size", MostRanks)
	if err != nil {
		return fmt.Errorf("%w; %w", ErrReforming, err)
	}
	switch {
	case told.Phase == "failed":
		return fmt.Errorf("%w; it was to have %d, and says: %.200q", errScaleFailed, ranks, told.Error)
	case ranks > 0:
		return fmt.Errorf("%w; it is to have %d", ErrReforming, ranks)
	}
	return ErrReforming
}

// rankDue says that it is time to try whether an engine has more ranks again. It needs m.mu.
func (w *watch) rankDue() bool {
	a := &w.absent
	return w.status.Up && a.ranks > 0 && a.halt == nil && time.Since(a.triedAt) >= max(a.rest, w.m.cfg.FactsInterval)
}

// lookForMore starts a try of the first lost rank when it is due. If requests of one token are not allowed, only that
// rank is used again, and the next request of a client is the try. It needs m.mu.
func (w *watch) lookForMore() {
	switch a := &w.absent; {
	case !w.rankDue():
	case w.m.cfg.Canary > 0 && slices.ContainsFunc(w.in.Canaries, func(t *Target) bool { return t.Rank == a.ranks }):
		select {
		case w.canaryDue <- struct{}{}:
		default: // a wake-up is pending already
		}
	default:
		a.triedAt, a.rest = time.Now(), max(a.rest, w.m.cfg.FactsInterval)
		if a.ranks++; a.ranks >= w.in.Ranks {
			a.ranks = 0
		}
		w.publish(w.status)
	}
}

// longestRest bounds the time between two tries of a rank whose requests are refused.
const longestRest = 5 * time.Minute

// tryLost asks whether an engine has more ranks again, with a request of one token for the first lost rank. An engine
// that does not have the rank refuses before it computes anything.
func (w *watch) tryLost(ctx context.Context) {
	w.m.mu.Lock()
	lowest, model := w.absent.ranks, w.status.baseModel()
	at := slices.IndexFunc(w.in.Canaries, func(t *Target) bool { return t.Rank == lowest })
	due, ask := w.rankDue() && at >= 0 && model != "", w.questionFor(model)
	w.m.mu.Unlock()
	if !due {
		return
	}
	bounded, stop := context.WithTimeout(ctx, min(w.m.cfg.Canary, w.m.cfg.Timeout))
	computed, err := oneToken(bounded, w.m.cfg.Client, w.in.Canaries[at], ask)
	stop()
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.gone || w.absent.ranks != lowest {
		return
	}
	w.absent.triedAt = time.Now()
	var rank *RankError
	switch {
	case errors.As(err, &rank):
		w.absent.ranks = rank.Ranks
	case computed:
		w.absent.ranks = 0
	}
	w.publish(w.status)
}

// fault asks vLLM whether its core has met a fault and waits for its recovery. It returns an error unless vLLM was
// started with --enable-fault-tolerance (entrypoints/serve/fault_tolerance/api_router.py of 0.33). GET /health
// answers 200 meanwhile, and requests that come wait in the engine. The status is unhealthy while a recovery is
// possible, and dead if a worker has died.
func (w *watch) fault(ctx context.Context, patience time.Duration) (halt, err error) {
	body, err := w.get(ctx, "/fault_tolerance/status", patience, answerLimit)
	var told struct {
		Schema  int `json:"schema_version"`
		Engines []struct {
			Status string `json:"status"`
			Fault  string `json:"fault_info"`
		} `json:"engines"`
	}
	switch {
	case err != nil:
		return nil, err
	case json.Unmarshal(body, &told) != nil || told.Schema == 0:
		return nil, errNoFaults
	}
	for _, e := range told.Engines {
		switch e.Status {
		case "healthy":
		case "dead":
			return errDead, nil
		default:
			return fmt.Errorf("it has met a fault (%.64q) and waits for its recovery (vLLM, POST /fault_tolerance/apply)", e.Fault), nil
		}
	}
	return nil, nil
}

// isPaused asks vLLM whether its core is paused. vLLM has this path, and the one that pauses it, only with
// VLLM_SERVER_DEV_MODE=1 (entrypoints/rl/online/api_router.py and entrypoints/launchers/api_server/routers.py of 0.32
// and 0.33).
func (w *watch) isPaused(ctx context.Context) (bool, error) {
	body, err := w.get(ctx, "/is_paused", min(w.m.cfg.Timeout, time.Second), answerLimit)
	if err != nil {
		return false, err
	}
	var told struct {
		Paused bool `json:"is_paused"`
	}
	return told.Paused, json.Unmarshal(body, &told)
}

var errNoFaults = errors.New("it does not say whether it has met a fault")

// lacks says that an engine's error means that it does not have what was asked for, and will not have it.
func lacks(err error) bool {
	var answered *StatusError
	if errors.As(err, &answered) {
		return slices.Contains([]int{http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented}, answered.Status)
	}
	return errors.Is(err, errNoFaults)
}

// loads asks a server of SGLang when each rank's scheduler last sent its load. Nothing is sent to the schedulers for
// that (entrypoints/v1_loads.py of 0.5.23). GET /server_info does ask them, and waits for the answer of lost ranks, too.
func (w *watch) loads(ctx context.Context) (map[int]float64, error) {
	body, err := w.get(ctx, "/v1/loads?include=core", w.m.cfg.Timeout, versionLimit)
	if err != nil {
		return nil, err
	}
	var told struct {
		Loads []struct {
			Rank int     `json:"dp_rank"`
			At   float64 `json:"timestamp"`
		} `json:"loads"`
	}
	if err := json.Unmarshal(body, &told); err != nil {
		return nil, err
	}
	all := make(map[int]float64, len(told.Loads))
	for _, l := range told.Loads {
		if l.Rank >= 0 && l.Rank < w.in.Ranks {
			all[l.Rank] = l.At
		}
	}
	return all, nil
}
