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

// The reasons that an engine gives if it is alive but takes no requests.
var (
	// ErrReforming is the answer of vLLM while it changes the number of its ranks. It comes before the request is read, so the request
	// may be repeated (ScalingMiddleware in entrypoints/serve/elastic_ep/middleware.py, 0.32 and 0.33).
	ErrReforming = errors.New("its group re-forms, because vLLM changes the number of its ranks (elastic EP)")
	// ErrPaused is the answer of vLLM 0.33 and later to a request that comes while it is paused. The core has run nothing of the request
	// (_reject_add_while_paused in v1/engine/core.py). Older versions do not answer so, nor does an engine that was paused with
	// mode=keep: there requests wait until the engine is resumed.
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

// LongestHalt is how long requests wait for an engine that is halted (see Status.Halt). After this time it counts as
// down.
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

// noRank matches the message by which engines say that they do not have a rank: vLLM in v1/engine/input_processor.py, SGLang in
// managers/tokenizer_manager.py. It matches only whole messages, because a message with another meaning may quote a client's text.
var noRank = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(?:data_parallel_rank (\d{1,6}) is|routed_dp_rank=(\d{1,6})) out of range \[0, (\d{1,6})\)\.?$`)
})

// PausedBy finds out whether an answer is a refusal for a reason that lies in the engine, not in the request. It returns ErrReforming,
// ErrPaused, ErrRetired or a RankError; nil: it is another answer. t is the target of the request.
func EngineRefusal(status int, body []byte, t *Target) error {
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
	_ = json.Unmarshal(body, &answer) // without an error in it, the two below fail
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

// refusalOfRank reads a 400 by which an engine says that it does not have the rank of the target t; nil: the body says something
// else. The numbers in the message count ranks as the rank header does, from t.First on.
func refusalOfRank(body []byte, t *Target) error {
	var answer struct {
		Message string `json:"message"` // SGLang and old vLLM
		Error   struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	_ = json.Unmarshal(body, &answer) // a body that cannot be read has no message
	found := noRank().FindStringSubmatch(answer.Message + answer.Error.Message)
	if found == nil {
		return nil
	}
	rank, _ := strconv.Atoi(found[1] + found[2]) // one of them is empty; the pattern allows only a few digits, so Atoi does not fail
	ranks, _ := strconv.Atoi(found[3])
	rank, ranks = rank-t.First, ranks-t.First
	plausible := ranks > 0 && ranks <= rank
	asked := t.Rank < 0 || t.Rank == rank // below 0: the request named its rank in the body, which is not known here
	if !plausible || !asked {
		return nil
	}
	return &RankError{Rank: rank, Ranks: ranks}
}

// SaysPaused says whether an error, from an answer or from an event of a stream, is the refusal of a paused core.
func SaysPaused(status int, message string) bool {
	return status == http.StatusServiceUnavailable && message == saysPaused
}

// IsWithheld says whether an error is one that PausedBy returns.
func IsWithheld(err error) bool {
	return errors.Is(err, ErrReforming) || errors.Is(err, ErrPaused) || errors.Is(err, ErrRetired) || errors.As(err, new(*RankError))
}

// absent says which ranks of an engine get no requests although the engine is up, or why the whole engine gets none.
type absent struct {
	halt      error         // see Status.Halt; nil: the engine is not halted
	since     time.Time     // when the halt began
	confirmed bool          // a check has seen the reason; false: only answers to requests gave it
	ranks     int           // how many ranks the engine has, by its RankError; 0: all
	triedAt   time.Time     // when a request last showed how many ranks the engine has
	rest      time.Duration // least time between two tries of a lost rank by clients' requests; it doubles when one is refused
	silent    map[int]bool  // ranks of SGLang that do not report their load
	reports   loads
}

// lost returns the reason for each lost rank, by rank. configured is how many ranks the engine has in the config.
func (a *absent) lost(configured int) map[int]string {
	if a.ranks == 0 && len(a.silent) == 0 {
		return nil
	}
	all := map[int]string{}
	for r := range a.silent {
		all[r] = "its scheduler says nothing while those of other ranks do, so SGLang goes on without it (elastic EP)"
	}
	if a.ranks > 0 {
		for r := a.ranks; r < configured; r++ {
			all[r] = fmt.Sprintf("the engine has only %d ranks now (elastic EP)", a.ranks)
		}
	}
	return all
}

// Halted says that the engine is up, but that it gets no new requests for now, and that requests wait for it.
func (s Status) Halted() bool { return s.Up && s.Halt != nil }

// LostRanks returns an error that says which ranks are lost, and why; nil: none is lost.
func (s Status) LostRanks() error {
	if len(s.Lost) == 0 {
		return nil
	}
	parts := make([]string, 0, len(s.Lost))
	ranks := slices.Sorted(maps.Keys(s.Lost))
	for from := 0; from < len(ranks); { // each turn describes ranks[from:to], successive ranks that are lost for the same reason
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

// quietChecks is for how many check intervals the scheduler of a rank may report no load while other ranks do. A working
// scheduler reports its load after each batch, and regularly while it has none.
const quietChecks = 5

// loads records when each rank of an SGLang server last reported its load.
type loads struct {
	stamps map[int]float64   // the last time stamp of each rank, by SGLang's clock
	at     map[int]time.Time // when this time stamp was first seen
}

// see records an answer of GET /v1/loads, which has the time stamp of each rank's last report. It returns the ranks whose last
// report is older than the newest one of all ranks by the time quiet or more.
func (l *loads) see(reported map[int]float64, quiet time.Duration, now time.Time) map[int]bool {
	if l.stamps == nil {
		l.stamps, l.at = map[int]float64{}, map[int]time.Time{}
	}
	var newest time.Time
	for r, stamp := range reported {
		if old, known := l.stamps[r]; !known || old != stamp {
			l.stamps[r], l.at[r] = stamp, now
		}
		if l.at[r].After(newest) {
			newest = l.at[r]
		}
	}
	silent := map[int]bool{}
	for r := range reported {
		if newest.Sub(l.at[r]) >= quiet {
			silent[r] = true
		}
	}
	return silent
}

// withheld records the reason with which an engine refused a request (see PausedBy), and makes run check the engine at once. The
// caller holds m.mu.
func (w *watch) withheld(why error) {
	if w.in.Held != nil { // an operator has stopped requests to the engine, so the reason is known
		return
	}
	w.checkNow()
	var rank *RankError
	switch {
	case errors.Is(why, ErrReforming):
		w.reports++ // so that a check which began before this does not end the halt
		w.halt(ErrReforming, false)
	case errors.Is(why, ErrPaused): // another program paused the engine, or this proxy did so before a restart
		w.reports++
		w.halt(ErrPaused, false)
	case errors.As(why, &rank):
		if w.absent.ranks != rank.Ranks { // the refused request may have been a try by lookForMore: wait longer before the next one
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

// halt stops new requests to the engine for the reason why; nil: it may get them again. confirmed says that a check has seen the
// reason. A halt that ends before any check has seen its reason counts as a failure of the engine. The caller holds m.mu.
func (w *watch) halt(why error, confirmed bool) {
	before, confirmedBefore := w.absent.halt, w.absent.confirmed
	w.absent.halt = why
	w.absent.confirmed = why != nil && (confirmed || confirmedBefore)
	if before == nil {
		w.absent.since = time.Now()
	}
	switch {
	case why == nil && confirmedBefore: // the halt has ended
		w.forgive()                                      // failures during the halt do not count
		w.absent.triedAt, w.absent.rest = time.Time{}, 0 // the engine may have more ranks now
		w.m.cfg.Log.Info("an engine takes requests again", zap.String("engine", w.in.ID))
	case why == nil && before != nil && len(w.in.Canaries) > 0: // requests were refused, but the check found no reason for it
		if w.suspect.circuit.Fail(theCanary, time.Now()) { // with the id of the canary, because the refused request may have been one
			w.takeOut(outFailures, fmt.Errorf("it refuses requests again and again, although its health checks do not say so: %w", before))
		}
	case w.absent.confirmed && !confirmedBefore:
		w.m.cfg.Log.Warn("an engine takes no requests for now, and its requests wait", zap.String("engine", w.in.ID), zap.Error(why))
	}
	w.publish(w.status)
}

// hold sets in.Held: why an operator has stopped requests to the engine; nil: the engine gets requests. Failures while it is held do
// not count. The end of the hold clears all earlier failures and makes run check the engine at once. The caller holds m.mu.
func (w *watch) hold(why *Held) {
	old := w.in.Held
	w.in.Held = why
	sameReason := old != nil && why != nil && *old == *why
	if old == why || sameReason {
		return
	}
	if why == nil {
		w.forgive()
		w.failed = 0
		w.checkNow()
	}
	if w.m.watches[w.in.ID] == w { // not a new watch, whose first check will publish its status
		w.publish(w.status)
	}
}

// holdsBack says that the error of a check does not count, because an operator holds the engine. Meanwhile only a failure to
// connect counts.
func (w *watch) holdsBack(err error) bool { return w.in.Held != nil && err != nil && !unreachable(err) }

// hopeless returns why a halted engine counts as down: it cannot recover, or its halt lasts too long; nil: it does not.
func (a *absent) hopeless(now time.Time) error {
	switch {
	case errors.Is(a.halt, errDead), errors.Is(a.halt, errScaleFailed):
		return a.halt
	case a.halt != nil && now.Sub(a.since) >= LongestHalt:
		return fmt.Errorf("it has taken no requests for %.0f minutes: %w", LongestHalt.Minutes(), a.halt)
	}
	return nil
}

// publish sets Halt, Lost and Accused in a status and makes it the current one. It logs which ranks are lost or back. The
// caller holds m.mu.
func (w *watch) publish(next Status) {
	w.fill(&next)
	lostBefore := w.status.LostRanks()
	w.setStatus(next)
	switch lost := next.LostRanks(); {
	case text(lost) == text(lostBefore):
	case lost != nil:
		w.m.cfg.Log.Warn("an engine has lost ranks, which get no requests", zap.String("engine", w.in.ID), zap.Error(lost))
	default:
		w.m.cfg.Log.Info("an engine has all its ranks again", zap.String("engine", w.in.ID))
	}
}

// fill sets Halt, Lost and Accused of a status. The caller holds m.mu.
func (w *watch) fill(next *Status) {
	next.Halt, next.Lost = w.absent.halt, w.absent.lost(w.in.Ranks)
	switch {
	case w.in.Held == nil:
	case next.Halt == nil, errors.Is(next.Halt, ErrPaused): // the operator may also have paused the engine, and Held has the reason
		next.Halt = w.in.Held
	}
	if next.Halt == nil { // a halted engine gets no new requests anyway
		next.Accused = w.suspect.accusation()
	}
}

// lookForRanks asks an engine that is alive for what its health check does not show: whether it is paused or waits for recovery, and
// which of its ranks are silent. It stores the silent ranks, and returns why the engine may get no new requests; nil: it may get them.
func (w *watch) lookForRanks(ctx context.Context) (halt error) {
	w.m.mu.Lock()
	held, wasPaused := w.in.Held != nil, errors.Is(w.absent.halt, ErrPaused)
	w.m.mu.Unlock()
	mayTell := w.facts.pauses || wasPaused
	if mayTell && !held { // a held engine gets no requests anyway
		paused, err := w.isPaused(ctx)
		if err != nil { // without an answer the last one stays valid, unless the engine lacks the path
			paused = wasPaused && !lacks(err)
		}
		if paused {
			return ErrPaused
		}
	}
	switch {
	case w.facts.tolerant:
		fault, err := w.fault(ctx, w.m.cfg.Timeout)
		if err != nil { // without an answer, the last one stays valid
			w.m.mu.Lock()
			fault = w.absent.fault()
			w.m.mu.Unlock()
		}
		return fault
	case w.facts.elastic && w.in.Ranks > 1: // a single rank could not be compared with others
		if reported, err := w.loads(ctx); err == nil {
			silent := w.absent.reports.see(reported, quietChecks*w.m.cfg.HealthInterval, time.Now())
			w.m.mu.Lock()
			w.absent.silent = silent
			w.m.mu.Unlock()
		}
	}
	return nil
}

// fault returns the fault for which the engine is halted; nil: it is not halted, or for a reason that watch.fault does not report.
func (a *absent) fault() error {
	if errors.Is(a.halt, ErrReforming) || errors.Is(a.halt, ErrPaused) || errors.Is(a.halt, errScaleFailed) {
		return nil
	}
	return a.halt
}

// reforming asks a vLLM that changes the number of its ranks how far the change has come. It returns ErrReforming or, if the change
// failed, errScaleFailed, each with details. From 0.33 on, vLLM answers with the phase of the change, the requested number and the
// reason of a failure, even if each rank has an API server of its own (entrypoints/serve/elastic_ep/api_router.py).
func (w *watch) reforming(ctx context.Context) error {
	ctx, stop := context.WithTimeout(ctx, min(w.m.cfg.Timeout, time.Second))
	defer stop()
	status, body, err := w.m.cfg.Client.NewCall(w.in.Target).Repeat().ask(ctx, http.MethodPost, "/is_scaling_elastic_ep", answerLimit)
	var told struct {
		Phase string `json:"phase"`
		Error string `json:"error"`
		Ranks Number `json:"requested_data_parallel_size"`
	}
	if err != nil || status != http.StatusOK || json.Unmarshal(body, &told) != nil { // older versions do not have this path
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

// rankDue says that it is time to try whether a lost rank is back. The caller holds m.mu.
func (w *watch) rankDue() bool {
	a := &w.absent
	return w.status.Up && a.ranks > 0 && a.halt == nil && time.Since(a.triedAt) >= max(a.rest, w.m.cfg.FactsInterval)
}

// lookForMore starts a try of the first lost rank if one is due. If canaries are turned off, it puts this rank back into service,
// and the next request of a client is the try. The caller holds m.mu.
func (w *watch) lookForMore() {
	switch a := &w.absent; {
	case !w.rankDue():
	case w.m.cfg.Canary > 0 && slices.ContainsFunc(w.in.Canaries, func(t *Target) bool { return t.Rank == a.ranks }):
		select {
		case w.canaryDue <- struct{}{}:
		default: // a wake-up is pending already
		}
	default:
		a.triedAt = time.Now()
		a.rest = max(a.rest, w.m.cfg.FactsInterval)
		if a.ranks++; a.ranks >= w.in.Ranks { // no rank is lost any more
			a.ranks = 0
		}
		w.publish(w.status)
	}
}

// longestRest bounds the time between two tries of a lost rank.
const longestRest = 5 * time.Minute

// tryLost sends a canary to the first lost rank if a try is due, to find out whether the engine has this rank again. If it does not,
// the engine refuses the request before it computes anything.
func (w *watch) tryLost(ctx context.Context) {
	w.m.mu.Lock()
	lowest, model := w.absent.ranks, w.status.baseModel()
	index := slices.IndexFunc(w.in.Canaries, func(t *Target) bool { return t.Rank == lowest })
	due := w.rankDue() && index >= 0 && model != ""
	ask := w.questionFor(model)
	w.m.mu.Unlock()
	if !due {
		return
	}
	bounded, stop := context.WithTimeout(ctx, min(w.m.cfg.Canary, w.m.cfg.Timeout))
	computed, err := oneToken(bounded, w.m.cfg.Client, w.in.Canaries[index], ask)
	stop()
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.gone || w.absent.ranks != lowest { // another answer has shown meanwhile how many ranks there are
		return
	}
	w.absent.triedAt = time.Now()
	var rank *RankError
	switch {
	case errors.As(err, &rank):
		w.absent.ranks = rank.Ranks
	case computed: // the ranks above it count as back, too, until a request is refused
		w.absent.ranks = 0
	}
	w.publish(w.status)
}

// fault asks vLLM whether its core has met a fault and waits for recovery. Only a vLLM that was started with
// --enable-fault-tolerance answers (entrypoints/serve/fault_tolerance/api_router.py of 0.33). While it waits, GET /health answers
// 200, and new requests wait in the engine. vLLM's status is unhealthy while recovery is possible, and dead if a worker has died.
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
	case json.Unmarshal(body, &told) != nil || told.Schema == 0: // another server answers with another text
		return nil, errNoFaults
	}
	for _, e := range told.Engines {
		switch e.Status {
		case "healthy":
		case "dead":
			return errDead, nil
		default: // unhealthy
			return fmt.Errorf("it has met a fault (%.64q) and waits for its recovery (vLLM, POST /fault_tolerance/apply)", e.Fault), nil
		}
	}
	return nil, nil
}

// isPaused asks vLLM whether its core is paused. vLLM has the paths to ask and to pause only with
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

// lacks says whether an error means that the engine does not have the path or the feature at all, so that asking again is useless.
func lacks(err error) bool {
	var answered *StatusError
	if errors.As(err, &answered) {
		return slices.Contains([]int{http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented}, answered.Status)
	}
	return errors.Is(err, errNoFaults)
}

// loads asks an SGLang server when each rank's scheduler last reported its load. The server answers without asking the schedulers
// (entrypoints/v1_loads.py of 0.5.23). GET /server_info would ask them, and so wait for lost ranks.
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
