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

// Why an engine that is alive takes no requests, as it says itself.
var (
	// ErrReforming is what vLLM says while it changes the number of its ranks. The ScalingMiddleware of
	// entrypoints/serve/elastic_ep/middleware.py (0.32, 0.33) answers before anything reads the request.
	ErrReforming = errors.New("its group re-forms, because vLLM changes the number of its ranks (elastic EP)")
	// ErrPaused is what vLLM from 0.33 on says of a request that comes while it is paused, unless by mode=keep: the core has run nothing of it
	// (_reject_add_while_paused in v1/engine/core.py). Before 0.33, and with mode=keep, requests wait in the engine until it goes on.
	ErrPaused = errors.New("it is paused, and POST /resume ends that (vLLM)")
	// ErrRetired is what the API server of a rank says that the others go on without (entrypoints/serve/elastic_ep/middleware.py, 0.33).
	ErrRetired = errors.New("vLLM has taken this rank out of its group (elastic EP) and waits for its process to be ended; take it out of " +
		"the config, too")
)

// errDead is what vLLM says of a core that does not come back.
var errDead = errors.New("one of its workers has died, and vLLM (--enable-fault-tolerance) will end the engine soon")

// errScaleFailed is what vLLM says, from 0.33 on, of a change of its ranks that will not end: its API server refuses everything from then
// on.
var errScaleFailed = errors.New("vLLM could not change the number of its ranks, and takes no requests until all of them are restarted")

// LongestHalt is how long requests wait for an engine that is halted. One that is for longer is as good as down.
const LongestHalt = 10 * time.Minute

// RankError is the refusal of a request for a rank that the engine does not have any more, or not yet.
type RankError struct{ Rank, Ranks int }

func (e *RankError) Error() string {
	return fmt.Sprintf("it has only %d ranks now, so there is no rank %d", e.Ranks, e.Rank)
}

// What vLLM says when it refuses: its middleware twice, and then a core that is paused.
const (
	saysPaused  = "Generation is paused. Please retry after it resumes."
	saysScaling = "The model is currently scaling. Please try again later."
	saysRetired = "This data-parallel rank has been retired and is awaiting shutdown."
)

// noRank is the whole message with which engines refuse a rank: vLLM in v1/engine/input_processor.py, SGLang in
// managers/tokenizer_manager.py. Only a whole message counts, because others may quote a client.
var noRank = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(?:data_parallel_rank (\d{1,6}) is|routed_dp_rank=(\d{1,6})) out of range \[0, (\d{1,6})\)\.?$`)
})

// Withheld reads a refusal that is about the engine and not about the request: one of those above, or nil. The request named the
// rank of the target in a header, if it has one. The engine counts its ranks as the header does.
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
		_ = json.Unmarshal(body, &told) // else it is another refusal
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
		e.Rank, _ = strconv.Atoi(found[1] + found[2]) // digits, not many
		e.Ranks, _ = strconv.Atoi(found[3])
		e.Rank, e.Ranks = e.Rank-t.First, e.Ranks-t.First
		if e.Ranks > 0 && e.Ranks <= e.Rank && (t.Rank < 0 || t.Rank == e.Rank) {
			return e
		}
	}
	return nil
}

// SaysPaused says whether a refusal, which may be an event of a stream, is that of a core that is paused.
func SaysPaused(status int, message string) bool {
	return status == http.StatusServiceUnavailable && message == saysPaused
}

// IsWithheld says whether an error is one of Withheld's.
func IsWithheld(err error) bool {
	return errors.Is(err, ErrReforming) || errors.Is(err, ErrPaused) || errors.Is(err, ErrRetired) || errors.As(err, new(*RankError))
}

// absent is which ranks of an engine that is up get no requests, and why nothing of the engine does. It is a value.
type absent struct {
	halt    error         // nothing new goes there, and what waits for it waits on
	since   time.Time     // of the halt
	sure    bool          // a check has heard of the halt, too, and not only a request
	ranks   int           // it has, as it said when it refused one; 0: all
	asked   time.Time     // when it was tried last whether it has them again
	rest    time.Duration // before the next try, if clients make it
	silent  map[int]bool
	reports loads
}

// lost is why each rank of an engine is out of its group.
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

// Halted says that nothing new goes to an engine that is up, and that requests wait for it.
func (s Status) Halted() bool { return s.Up && s.Halt != nil }

// LostRanks says which ranks are lost, and why, in a sentence; nil: none is.
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

// quietChecks is for how many checks the scheduler of a rank may say nothing of its load while other ranks do. Each says it
// after its batches, and after every turn without one.
const quietChecks = 5

// loads is when each rank of a server of SGLang has told its load last. It is a value.
type loads struct {
	told map[int]float64
	at   map[int]time.Time // when told changed
}

// see takes in what GET /v1/loads tells, and returns the ranks that are silent while others are not.
func (l *loads) see(told map[int]float64, quiet time.Duration, now time.Time) map[int]bool {
	if l.told == nil {
		l.told, l.at = map[int]float64{}, map[int]time.Time{}
	}
	var newest time.Time
	for r, stamp := range told {
		if was, known := l.told[r]; !known || was != stamp {
			l.told[r], l.at[r] = stamp, now
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

// withheld takes in what an engine says in place of an answer, and has it checked at once. It needs m.mu.
func (w *watch) withheld(why error) {
	if w.in.Held != nil { // its pause is why
		return
	}
	w.checkNow()
	var rank *RankError
	switch {
	case errors.Is(why, ErrReforming):
		w.reports++ // a check begun before this cannot say that it is over
		w.halt(ErrReforming, false)
	case errors.Is(why, ErrPaused): // by a call that did not come through here, or of which nothing is known any more
		w.reports++
		w.halt(ErrPaused, false)
	case errors.As(why, &rank):
		if w.absent.ranks != rank.Ranks { // else other requests were told so before
			w.absent.rest = min(2*w.absent.rest, longestRest)
		}
		w.absent.ranks, w.absent.asked = rank.Ranks, time.Now()
		w.show(w.status)
	case errors.Is(why, ErrRetired):
		w.reports++
		next := w.status
		next.Up, next.Err = false, ErrRetired
		w.become(next)
	}
}

// halt has nothing new go to the engine, or with nil again. heard says that a check has heard why from the engine. An engine
// that tells only requests so, and no check, fails them. It needs m.mu.
func (w *watch) halt(why error, heard bool) {
	was, sure := w.absent.halt, w.absent.sure
	w.absent.halt, w.absent.sure = why, why != nil && (heard || sure)
	if was == nil {
		w.absent.since = time.Now()
	}
	switch {
	case why == nil && sure:
		w.forgive()                                    // what failed meanwhile says nothing
		w.absent.asked, w.absent.rest = time.Time{}, 0 // it may have more ranks now
		w.m.cfg.Log.Info("an engine takes requests again", zap.String("engine", w.in.ID))
	case why == nil && was != nil && len(w.in.Canaries) > 0:
		if w.suspect.circuit.Fail(theCanary, time.Now()) { // which may be what was told so
			w.out(outFailures, fmt.Errorf("it refuses requests again and again, although its health checks do not say so: %w", was))
		}
	case w.absent.sure && !sure:
		w.m.cfg.Log.Warn("an engine takes no requests for now, and its requests wait", zap.String("engine", w.in.ID), zap.Error(why))
	}
	w.show(w.status)
}

// hold has nothing said against the engine while it is held, and what was said before is forgotten when that ends. It needs m.mu.
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
	if w.m.watches[w.in.ID] == w { // else nobody has been told of it
		w.show(w.status)
	}
}

// holdsBack says that an engine which is held may fail so: only that nothing is there counts.
func (w *watch) holdsBack(err error) bool { return w.in.Held != nil && err != nil && !unreachable(err) }

// hopeless is why an engine that is halted is down, or nil.
func (a *absent) hopeless(now time.Time) error {
	switch {
	case errors.Is(a.halt, errDead), errors.Is(a.halt, errScaleFailed):
		return a.halt
	case a.halt != nil && now.Sub(a.since) >= LongestHalt:
		return fmt.Errorf("it has taken no requests for %.0f minutes: %w", LongestHalt.Minutes(), a.halt)
	}
	return nil
}

// show puts what is absent into a status and makes it the one in force. It needs m.mu.
func (w *watch) show(next Status) {
	w.fill(&next)
	before := w.status.LostRanks()
	w.become(next)
	switch now := next.LostRanks(); {
	case text(now) == text(before):
	case now != nil:
		w.m.cfg.Log.Warn("an engine has lost ranks, which get no requests", zap.String("engine", w.in.ID), zap.Error(now))
	default:
		w.m.cfg.Log.Info("an engine has all its ranks again", zap.String("engine", w.in.ID))
	}
}

// fill completes a status by what is absent. It needs m.mu.
func (w *watch) fill(next *Status) {
	next.Halt, next.Lost = w.absent.halt, w.absent.lost(w.in.Ranks)
	if w.in.Held != nil && (next.Halt == nil || errors.Is(next.Halt, ErrPaused)) {
		next.Halt = w.in.Held
	}
	if next.Halt == nil {
		next.Accused = w.suspect.accusation()
	}
}

// lookForRanks asks an engine that is alive for what its health check does not tell: whether it waits for its recovery, and
// which of its ranks are silent. It returns why nothing new may go there.
func (w *watch) lookForRanks(ctx context.Context) (halt error) {
	w.m.mu.Lock()
	held, was := w.in.Held != nil, errors.Is(w.absent.halt, ErrPaused)
	w.m.mu.Unlock()
	if !held && (w.facts.pauses || was) {
		paused, err := w.isPaused(ctx)
		if err != nil { // then what it said last counts
			paused = was && !lacks(err)
		}
		if paused {
			return ErrPaused
		}
	}
	switch {
	case w.facts.tolerant:
		var err error
		if halt, err = w.fault(ctx, w.m.cfg.Timeout); err != nil { // then what it said last counts
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

// reforming asks vLLM how far a change of the number of its ranks is, while it refuses requests because of it. From 0.33 on it tells the
// phase, the number that was asked for and why it failed, also where each rank has an API server of its own
// (entrypoints/serve/elastic_ep/api_router.py). Before a commit, in the phase preparing, it takes requests. After one that failed it never
// does.
func (w *watch) reforming(ctx context.Context) error {
	ctx, stop := context.WithTimeout(ctx, min(w.m.cfg.Timeout, time.Second))
	defer stop()
	status, body, err := w.m.cfg.Client.NewCall(w.in.Target).Repeat().ask(ctx, http.MethodPost, "/is_scaling_elastic_ep", answerLimit)
	var told struct {
		Phase string `json:"phase"`
		Error string `json:"error"`
		Ranks Number `json:"requested_data_parallel_size"`
	}
	if err != nil || status != http.StatusOK || json.Unmarshal(body, &told) != nil { // an older one says nothing meanwhile
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
	return w.status.Up && a.ranks > 0 && a.halt == nil && time.Since(a.asked) >= max(a.rest, w.m.cfg.FactsInterval)
}

// lookForMore has the first rank that is lost tried when that is due. Where no request of one token may be sent, that rank alone
// is used again, and the next request of a client tells. It needs m.mu.
func (w *watch) lookForMore() {
	switch a := &w.absent; {
	case !w.rankDue():
	case w.m.cfg.Canary > 0 && slices.ContainsFunc(w.in.Canaries, func(t *Target) bool { return t.Rank == a.ranks }):
		select {
		case w.doubt <- struct{}{}:
		default: // it looks already
		}
	default:
		a.asked, a.rest = time.Now(), max(a.rest, w.m.cfg.FactsInterval)
		if a.ranks++; a.ranks >= w.in.Ranks {
			a.ranks = 0
		}
		w.show(w.status)
	}
}

// longestRest bounds the time between two tries of a rank whose requests are refused.
const longestRest = 5 * time.Minute

// tryLost asks whether an engine has more ranks again, with a request of one token for the first that is lost. An engine that
// does not have it refuses before it computes anything.
func (w *watch) tryLost(ctx context.Context) {
	w.m.mu.Lock()
	lowest, model := w.absent.ranks, w.status.baseModel()
	at := slices.IndexFunc(w.in.Canaries, func(t *Target) bool { return t.Rank == lowest })
	due, ask := w.rankDue() && at >= 0 && model != "", w.asks(model)
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
	w.absent.asked = time.Now()
	var rank *RankError
	switch {
	case errors.As(err, &rank):
		w.absent.ranks = rank.Ranks
	case computed:
		w.absent.ranks = 0
	}
	w.show(w.status)
}

// fault asks vLLM whether its core has met a fault and waits for its recovery. It fails unless vLLM was started with
// --enable-fault-tolerance (entrypoints/serve/fault_tolerance/api_router.py of 0.33). Its GET /health says 200 meanwhile, and
// requests that come wait in it. It says unhealthy while a recovery is possible, and dead if a worker has died.
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

// isPaused asks vLLM whether its core is paused. It has the path only with VLLM_SERVER_DEV_MODE=1, as that which pauses it
// (entrypoints/rl/online/api_router.py and entrypoints/launchers/api_server/routers.py of 0.32 and 0.33).
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

// lacks says that an engine answers so because it does not have what was asked for, and will not.
func lacks(err error) bool {
	var answered *StatusError
	if errors.As(err, &answered) {
		return slices.Contains([]int{http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented}, answered.Status)
	}
	return errors.Is(err, errNoFaults)
}

// loads asks a server of SGLang when each rank's scheduler has told its load last. Nothing is sent to the schedulers for that
// (entrypoints/v1_loads.py of 0.5.23), as GET /server_info does, which waits for the answer of ranks that are lost.
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
