package dispatcher

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/twin"
	"evenkeel/dispatcher/verdict"
)

// twins records the events of the boards on a tape, and replays them under other policies, to find out how long the steps would have taken
// under these. The replays run in a goroutine of their own, which rests most of the time. The scheduler's goroutine only appends to the
// tape, and copies the boards at the end of each segment of the tape.
type twins struct {
	specs       []string // policies that are replayed, as specs
	tape        twin.Tape
	minSegment  time.Duration // shortest length of the current segment of the tape
	wake        chan struct{} // wakes the goroutine of run after a new segment; has room for one value
	workSeconds prometheus.Counter
	log         *zap.Logger
	began       time.Time    // when newTwins ran; lateRoundAt counts from here
	lateRoundAt atomic.Int64 // when a round of decisions last took over half of tick_limit, in ns since began; 0: never

	mu      sync.Mutex
	queued  []queuedSegment // segments that the goroutine of run has not taken yet
	results map[board.GroupKey]*groupResults
}

// queuedSegment is a segment of the tape. end is a copy of the boards at the end of the segment, from which the next segment begins.
type queuedSegment struct {
	*twin.Segment
	end *board.Boards
}

// groupResults has what the replays have shown for one group.
type groupResults struct {
	verdict twin.Verdict
	against map[string]*savings // savings against each other policy, by its name
}

// savings is how much step time the policy in force has saved or lost against one other policy.
type savings struct {
	savedSeconds, lostSeconds float64 // step time saved and step time lost so far
	day                       string  // date of the last verdict (UTC), to which todayRankHours belongs
	todayRankHours            float64 // rank-hours saved on that day, less those lost
}

// maxQueuedSegments is the largest number of segments that may wait for the goroutine of run.
const maxQueuedSegments = 20

// coreShare is the share of one processor core that the replays may use. It is so small that an operator need not weigh the cost.
const coreShare = 0.01

// costFactor is how many seconds of processor time are counted for one second of replays. It is above 1, because garbage collection runs
// outside the measured second. With 144 ranks, a proxy with a twin used 1.03 % of a core more than a proxy without a twin, while the twin
// counted 0.95 %.
const costFactor = 1.1

// restAfterLate is how long the replays pause after a round of decisions that took more than half of tick_limit, so that decisions get the
// whole processor.
const restAfterLate = time.Second

// newTwins returns nil if no policy is replayed. The methods that the scheduler calls in each turn do nothing on a nil *twins.
func newTwins(cfg Config, m *metrics) *twins {
	work := m.addTwin() // the metrics exist even if no policy is replayed
	if len(cfg.Twin) == 0 {
		return nil
	}
	return &twins{
		specs: cfg.Twin, workSeconds: work, log: cfg.Log, began: time.Now(), wake: make(chan struct{}, 1),
		results: map[board.GroupKey]*groupResults{},
	}
}

// record records an event on the tape. It must be called before the event is applied to the boards.
func (t *twins) record(e board.Event, now time.Time) {
	if t != nil {
		t.tape.Record(e, now)
	}
}

// recordEffect records an effect of the boards on the tape. If the effect says that a group has lost its last rank, recordEffect drops the
// results for this group.
func (t *twins) recordEffect(e *board.Effect, now time.Time) {
	if t == nil {
		return
	}
	t.tape.RecordEffect(e, now)
	if e.Kind == board.EffectGroupGone {
		t.mu.Lock()
		delete(t.results, e.Group)
		t.mu.Unlock()
	}
}

// segmentDue says whether the current segment of the tape is long enough, so that the caller must call endSegment.
func (t *twins) segmentDue(now time.Time) bool { return t != nil && t.tape.Due(now, t.minSegment) }

// endSegment ends the current segment of recorded events. It queues the segment for run, together with a copy of the boards, from which the
// next segment begins. The next segment is longer if the boards hold more requests, because the copy takes longer.
func (t *twins) endSegment(now time.Time, boards *board.Boards) {
	copied := boards.Clone()
	t.minSegment = twin.MinSegmentLength(copied.ApproxRequests())
	segment := t.tape.NextSegment(now, copied)
	if segment == nil { // nothing was recorded, or the settings have changed within the segment
		return
	}
	t.mu.Lock()
	if len(t.queued) >= maxQueuedSegments { // run cannot keep up: drop all queued segments, which leaves a gap before this segment
		t.queued, segment.AfterGap = nil, true
	}
	t.queued = append(t.queued, queuedSegment{segment, copied})
	t.mu.Unlock()
	signal(t.wake)
}

// pause stops the replays for restAfterLate. The scheduler calls it after a round of decisions that took more than half of tick_limit.
func (t *twins) pause() {
	if t != nil {
		t.lateRoundAt.Store(int64(time.Since(t.began)))
	}
}

// run replays segments until ctx ends. It works in slices of about sliceTarget each, and rests after each slice. While a slow round of
// decisions was less than restAfterLate ago, it only rests.
func (t *twins) run(ctx context.Context) {
	replayer := twin.New(t.specs)
	turns := 1 // number of turns (small parts of a replay) that the next slice makes
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-t.wake:
		case <-ctx.Done():
			return
		}
		for more := true; more; { // until all segments are replayed; runSlice sets more
			t.passQueuedTo(replayer)
			rest := restAfterLate
			if !t.wasLate() { // after a slow round there is no slice: only the rest, and more stays true
				var took time.Duration
				replayer, took, more = t.runSlice(replayer, turns) // a new replayer if a replay has panicked
				turns = nextTurns(turns, took)
				// The slice counts as took*costFactor of processor time: coreShare of the time of slice and rest together.
				rest = time.Duration(float64(took) * (costFactor/coreShare - 1))
			}
			timer.Reset(rest)
			select {
			case <-timer.C:
			case <-ctx.Done():
				return
			}
		}
	}
}

// runSlice makes one slice of work: at most this many turns, which are small parts of a replay. It adds the verdicts to the results: when
// all replays of a model are done, each of its groups gets a verdict, which says how long the steps took under each policy. next is the
// twin for the next slice: a new one if a replay has panicked. took is how long the slice took. more says whether there is more to replay.
func (t *twins) runSlice(replayer *twin.Twin, turns int) (next *twin.Twin, took time.Duration, more bool) {
	start := time.Now()
	verdicts, more, failure := replaySlice(replayer, turns)
	if failure != nil {
		t.log.Error("dispatcher: the twin failed to replay some minutes, and goes on with the next ones", zap.Error(failure))
		replayer = twin.New(t.specs)
	}
	took = time.Since(start)
	t.workSeconds.Add(took.Seconds())
	for i := range verdicts {
		t.addVerdict(&verdicts[i])
	}
	return replayer, took, more
}

// wasLate says whether the replays must pause, because a slow round of decisions (see pause) was less than restAfterLate ago.
func (t *twins) wasLate() bool {
	lateRoundAt := t.lateRoundAt.Load()
	return lateRoundAt > 0 && time.Since(t.began) < time.Duration(lateRoundAt)+restAfterLate
}

// replaySlice continues the replays for the given number of turns, and returns the new verdicts. A panic in a replay is returned as
// failure, because it must not end the proxy.
func replaySlice(replayer *twin.Twin, turns int) (verdicts []twin.Verdict, more bool, failure error) {
	defer func() {
		if r := recover(); r != nil {
			failure = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	verdicts, more = replayer.Work(turns)
	return verdicts, more, nil
}

// sliceTarget is how long a slice of replay work should take. A slice may delay a round of decisions, so it is short compared to one. It is
// also long compared to the reading of the clock that ends a slice.
const sliceTarget = time.Millisecond

// nextTurns returns how many turns the next slice makes, so that it takes about sliceTarget. turns is how many the last slice made, and
// took is how long it took.
func nextTurns(turns int, took time.Duration) int {
	switch {
	case took < sliceTarget/2:
		return min(2*turns, 1<<16) // without the bound, very short turns would make the number grow without limit
	case took > 2*sliceTarget:
		return max(1, turns/2)
	}
	return turns
}

// passQueuedTo gives the replayer the segments that were queued since the last call.
func (t *twins) passQueuedTo(replayer *twin.Twin) {
	t.mu.Lock()
	segments := t.queued
	t.queued = nil
	t.mu.Unlock()
	for _, s := range segments {
		replayer.AddSegment(s.Segment, s.end)
	}
}

// addVerdict stores a verdict as the latest of its group, and adds up the time that the policy in force saved or lost against each other
// policy. It counts only differences that are larger than the error of the replay (Claimed).
func (t *twins) addVerdict(v *twin.Verdict) {
	t.mu.Lock()
	defer t.mu.Unlock()
	group := t.results[v.Group]
	if group == nil {
		group = &groupResults{against: map[string]*savings{}}
		t.results[v.Group] = group
	}
	group.verdict = *v
	for _, a := range v.Against {
		sums := group.against[a.Policy]
		if sums == nil {
			sums = &savings{}
			group.against[a.Policy] = sums
		}
		if day := v.To.UTC().Format(time.DateOnly); day != sums.day { // the first verdict of a day begins a new sum
			sums.day, sums.todayRankHours = day, 0
		}
		if !a.Claimed { // the difference is not larger than the error of the replay
			continue
		}
		seconds := a.SavedMs / 1000 * float64(v.NewSteps) // time saved per step, times the number of steps that no earlier verdict has counted
		sums.savedSeconds += max(0, seconds)
		sums.lostSeconds += max(0, -seconds)
		sums.todayRankHours += seconds * float64(v.Ranks) / 3600 // gains less losses; each rank of the group waits for a longer step
	}
}

// addResults adds what the replays have shown to the status of each group.
func (t *twins) addResults(s *board.Status, now time.Time) {
	if t == nil {
		return
	}
	for i := range s.Models {
		m := &s.Models[i]
		for j := range m.Groups {
			g := &m.Groups[j]
			g.Twin = t.resultsOf(board.GroupKey{Model: m.Model, Name: g.Name, Barrier: g.Barrier}, s.Policy, now)
		}
	}
}

// resultsOf returns what the replays have shown for a group; nil: there are no results yet. policy is the policy in force. A difference
// between two policies is claimed if it is larger than the error of the replays. If the last verdict is about another policy, or is old,
// resultsOf leaves out its claim and the comparison over the last hour, which people would take for present ones. The sums of the seconds
// saved and lost stay: they are counters since the start.
func (t *twins) resultsOf(key board.GroupKey, policy string, now time.Time) *verdict.Twin {
	t.mu.Lock()
	defer t.mu.Unlock()
	group := t.results[key]
	if group == nil {
		return nil
	}
	v := &group.verdict
	s := &verdict.Twin{
		AgeSeconds: now.Sub(v.To).Seconds(), WindowSeconds: v.To.Sub(v.From).Seconds(), Policy: v.Policy, StepMs: v.StepMs, TwinStepMs: v.TwinMs,
		ErrorRatio: v.Error,
		Replays:    v.Replays,
		Against:    []verdict.Against{},
	}
	for _, found := range v.Against {
		sums := group.against[found.Policy]
		if sums.day != now.UTC().Format(time.DateOnly) { // todayRankHours still has the sum of an earlier day
			sums.todayRankHours = 0
		}
		a := verdict.Against{
			Policy: found.Policy, StepMs: found.StepMs, SavedMs: found.SavedMs, ErrorRatio: found.Error, Claimed: found.Claimed,
			SavedSeconds: sums.savedSeconds, LostSeconds: sums.lostSeconds, Today: sums.todayRankHours,
		}
		if h := found.Hour; h.Seconds > 0 { // 0: too little traffic was replayed for a result
			a.Hour = &verdict.Hour{AgeSeconds: now.Sub(h.To).Seconds(), Seconds: h.Seconds, StepMs: h.StepMs, SavedMs: h.SavedMs,
				ErrorRatio: h.Error}
		}
		a.Say(s, found.Failed) // sets Says, the sentence that people read
		otherPolicy, old := v.Policy != policy, s.AgeSeconds > twin.Stale.Seconds()
		if otherPolicy || old {
			a.Claimed, a.Hour, a.Says = false, nil, "against "+a.Policy+": nothing was replayed lately"
		}
		s.Against = append(s.Against, a)
	}
	return s
}
