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

// twins records the events of the boards on a tape and replays them in a goroutine of its own, which rests most of
// the time. The loop only appends to the tape, and copies the boards at the end of each stretch.
type twins struct {
	tape  twin.Tape
	every time.Duration // least length of a stretch
	wake  bell
	work  prometheus.Counter
	log   *zap.Logger
	began time.Time
	late  atomic.Int64 // when a round last took over half of tick_limit, in ns since began; 0: never

	mu     sync.Mutex
	fresh  []recorded // stretches that the twin's goroutine has not taken yet
	judged map[board.GroupKey]*judged
}

type recorded struct {
	*twin.Stretch
	end *board.Boards
}

// judged is what the twin has found of a group so far.
type judged struct {
	verdict twin.Verdict
	against map[string]*saved
}

// saved is what the policy in force saved or lost against another one, in seconds of steps.
type saved struct {
	saved, lost float64
	day         string  // UTC
	today       float64 // rank-hours saved on that day; below 0: lost
}

// mostFresh bounds the stretches that wait to be judged.
const mostFresh = 20

// share is how much of one core the twin may use. It is so small that the cost of the twin need not be weighed against its use.
const share = 0.01

// costs is how many seconds of processor time one second of replays costs, because garbage collection runs outside that second. With
// 144 ranks, a proxy with a twin took 1.03 % of a core more than a proxy without a twin, and the twin itself counted 0.95 %.
const costs = 1.1

// lateFor is how long the twin rests after a tick that was late.
const lateFor = time.Second

func newTwins(cfg Config, m *metrics) *twins {
	if len(cfg.Twin) == 0 {
		return nil
	}
	return &twins{work: m.twinWork, log: cfg.Log, began: time.Now(), wake: newBell(), judged: map[board.GroupKey]*judged{}}
}

// run replays stretches until ctx ends.
func (t *twins) run(ctx context.Context, specs []string) {
	judge, turns := twin.New(specs), 1
	timer := time.NewTimer(0)
	defer timer.Stop()
	rest := func(d time.Duration) bool {
		timer.Reset(d)
		select {
		case <-timer.C:
			return true
		case <-ctx.Done():
			return false
		}
	}
	for {
		select {
		case <-t.wake:
		case <-ctx.Done():
			return
		}
		for more := true; more; {
			t.take(judge)
			if late := t.late.Load(); late > 0 && time.Since(t.began) < time.Duration(late)+lateFor {
				if !rest(lateFor) {
					return
				}
				continue
			}
			start := time.Now()
			verdicts, again, failure := work(judge, turns)
			if more = again; failure != nil {
				t.log.Error("dispatcher: the twin failed to replay some minutes, and goes on with the next ones", zap.Error(failure))
				judge = twin.New(specs)
			}
			took := time.Since(start)
			t.work.Add(took.Seconds())
			for i := range verdicts {
				t.book(&verdicts[i])
			}
			if !rest(time.Duration(float64(took) * (costs/share - 1))) {
				return
			}
			turns = nextTurns(turns, took)
		}
	}
}

// work runs one slice of the replays. A panic becomes the failure, because a bug in a replay must not end the proxy.
func work(judge *twin.Twin, turns int) (fresh []twin.Verdict, more bool, failure error) {
	defer func() {
		if r := recover(); r != nil {
			failure = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	fresh, more = judge.Work(turns)
	return fresh, more, nil
}

// slice is about how long a slice of work takes: short compared to a tick, and long compared to a read of the clock.
const slice = time.Millisecond

func nextTurns(turns int, took time.Duration) int {
	switch {
	case took < slice/2:
		return min(2*turns, 1<<16)
	case took > 2*slice:
		return max(1, turns/2)
	}
	return turns
}

// take gives the twin the stretches that were recorded since the last call.
func (t *twins) take(judge *twin.Twin) {
	t.mu.Lock()
	fresh := t.fresh
	t.fresh = nil
	t.mu.Unlock()
	for _, s := range fresh {
		judge.AddStretch(s.Stretch, s.end)
	}
}

// book adds a verdict to what the twin has found of its group.
func (t *twins) book(v *twin.Verdict) {
	t.mu.Lock()
	defer t.mu.Unlock()
	j := t.judged[v.Group]
	if j == nil {
		j = &judged{against: map[string]*saved{}}
		t.judged[v.Group] = j
	}
	j.verdict = *v
	for _, a := range v.Against {
		s := j.against[a.Policy]
		if s == nil {
			s = &saved{}
			j.against[a.Policy] = s
		}
		if day := v.To.UTC().Format(time.DateOnly); day != s.day {
			s.day, s.today = day, 0
		}
		if !a.Claimed {
			continue
		}
		seconds := a.SavedMs / 1000 * float64(v.Fresh)
		s.saved, s.lost = s.saved+max(0, seconds), s.lost+max(0, -seconds)
		s.today += seconds * float64(v.Ranks) / 3600
	}
}

// status returns what the twin has found of a group; nil: nothing yet, or there is no twin.
func (t *twins) status(key board.GroupKey, policy string, now time.Time) *verdict.Twin {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	j := t.judged[key]
	if j == nil {
		return nil
	}
	v := &j.verdict
	s := &verdict.Twin{
		AgeSeconds: now.Sub(v.To).Seconds(), WindowSeconds: v.To.Sub(v.From).Seconds(), Policy: v.Policy, StepMs: v.StepMs, TwinStepMs: v.TwinMs,
		ErrorRatio: v.Error,
		Replays:    v.Replays,
		Against:    []verdict.Against{},
	}
	for _, found := range v.Against {
		kept := j.against[found.Policy]
		if kept.day != now.UTC().Format(time.DateOnly) {
			kept.today = 0
		}
		a := verdict.Against{
			Policy: found.Policy, StepMs: found.StepMs, SavedMs: found.SavedMs, ErrorRatio: found.Error, Claimed: found.Claimed,
			SavedSeconds: kept.saved, LostSeconds: kept.lost, Today: kept.today,
		}
		if h := found.Hour; h.Seconds > 0 {
			a.Hour = &verdict.Hour{AgeSeconds: now.Sub(h.To).Seconds(), Seconds: h.Seconds, StepMs: h.StepMs, SavedMs: h.SavedMs,
				ErrorRatio: h.Error}
		}
		if a.Say(s, found.Failed); v.Policy != policy || s.AgeSeconds > twin.Stale.Seconds() {
			a.Claimed, a.Hour, a.Says = false, nil, "against "+a.Policy+": nothing was replayed lately"
		}
		s.Against = append(s.Against, a)
	}
	return s
}

// gone forgets a group.
func (t *twins) gone(key board.GroupKey) {
	if t != nil {
		t.mu.Lock()
		delete(t.judged, key)
		t.mu.Unlock()
	}
}
