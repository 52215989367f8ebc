package prefill

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

// foretold is a scheduler on a clock of its own, whose prefills take 100 ms.
type foretold struct {
	*Scheduler
	t   *testing.T
	now time.Time
}

func newForetold(t *testing.T, connector string, ids ...string) *foretold {
	f := &foretold{t: t, now: time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)}
	profile := mooncake.Profile{Name: "early", Connector: connector}.WithDefaults()
	all := up(ids...)
	for i := range all {
		all[i].Profile = &profile
	}
	f.Scheduler = newScheduler(t, all, withPolicy("finish"), func(c *Config) {
		c.Clock = func() time.Time { return f.now }
		c.Calibration = CalibrationConfig{T0Ms: 100, TPMs: 1e-9, Known: true}
	})
	return f
}

func (f *foretold) pass(d time.Duration) { f.now = f.now.Add(d) }

// bind is a request that is bound to its rank: in tells in how long its prefill is predicted to
// end.
func (f *foretold) bind() (l *Lease, in func() time.Duration) {
	l = acquire(f.t, f.Scheduler, Request{PromptTokens: 1000})
	return l, func() time.Duration {
		f.lock()
		defer f.unlock()
		return time.Duration(f.choose.predictedEndMs(l) * float64(msec))
	}
}

const msec = time.Millisecond

// What is foreseen of a prefill slides while what is before it is late, and comes nearer when that
// ends early.
func TestTheEndOfAPrefillIsForeseen(t *testing.T) {
	f := newForetold(t, mooncake.SGLang, "a")
	first, firstIn := f.bind()
	require.Equal(t, 100*msec, firstIn())
	first.MarkSent()
	f.pass(30 * msec)
	second, secondIn := f.bind()
	require.Equal(t, 170*msec, secondIn())
	second.MarkSent()
	require.Equal(t, 70*msec, firstIn())
	f.pass(120 * msec)
	require.Equal(t, time.Duration(0), firstIn(), "it is late")
	require.Equal(t, 100*msec, secondIn(), "and the next with it")
	f.pass(10 * msec)
	third, thirdIn := f.bind()
	require.Equal(t, 200*msec, thirdIn())
	first.Answered(Usage{}, time.Time{})
	first.Release()
	second.Release()
	require.Equal(t, 100*msec, thirdIn(), "those before it have ended early")
	third.Release()
	requireIdle(t, f.Scheduler)
}

// A decode engine that takes its time to call back is asked so much earlier, so that the prefiller
// does not wait for it.
func TestAPrefillerIsGivenAPromptBeforeItsCallbackIsDue(t *testing.T) {
	f := newForetold(t, mooncake.AscendLayerwise, "a")
	f.cfg.Push.MaxUnanswered = 1
	l, _ := f.bind()
	l.CalledBack(60 * msec)
	l.MarkSent()
	var next *Lease
	f.Offer(Request{Model: testModel, PromptTokens: 1000}, func(l *Lease, err error) {
		require.NoError(t, err)
		next = l
	})
	f.pass(39 * msec)
	f.Wake()
	require.Nil(t, next)
	at, ok := f.NextWake()
	require.True(t, ok)
	require.Equal(t, f.now.Add(msec), at)
	f.pass(msec)
	f.Wake()
	require.NotNil(t, next)
	next.MarkSent()
	next.Release()
	l.Release()
}

// Until its probe is sent, a prefill may move to where it ends sooner.
func TestAPrefillMovesToWhereItEndsSooner(t *testing.T) {
	f := newForetold(t, mooncake.AscendLayerwise, "a", "b")
	running, _ := f.bind()
	running.MarkSent()
	other, _ := f.bind()
	other.MarkSent()
	require.NotEqual(t, running.Candidate.ID, other.Candidate.ID)
	f.pass(50 * msec)
	l, in := f.bind()
	require.Equal(t, 150*msec, in())
	require.Nil(t, l.MoveIfSooner(0, nil), "the other engine is as busy")
	first, second := running, other
	if l.Candidate.ID == "b" {
		first, second = other, running
	}
	second.Answered(Usage{}, time.Time{})
	second.Release()
	require.Nil(t, l.MoveIfSooner(51*msec, nil), "it is not sooner by so much")
	require.Nil(t, l.MoveIfSooner(20*msec, []string{second.Candidate.Instance}), "its KV would not arrive")
	moved := l.MoveIfSooner(20*msec, nil)
	require.NotNil(t, moved)
	require.Equal(t, second.Candidate.ID, moved.Candidate.ID)
	require.Equal(t, l.Policy, moved.Policy)
	f.pass(10 * msec)
	require.Equal(t, 0, f.candidates[first.Candidate.ID].load.Leases[probing]-1, "only what runs there is charged there")
	moved.MarkSent()
	require.Nil(t, moved.MoveIfSooner(0, nil), "it is sent")
	moved.Answered(Usage{}, time.Time{})
	moved.Release()
	first.Release()
	require.Nil(t, l.MoveIfSooner(0, nil))
	requireIdle(t, f.Scheduler)
}

// A prefill whose KV may not arrive moves to where it ends a little later.
func TestAPrefillMovesToWhereItEndsALittleLater(t *testing.T) {
	f := newForetold(t, mooncake.AscendLayerwise, "a", "b")
	l, _ := f.bind()
	busy, _ := f.bind()
	busy.MarkSent()
	require.NotEqual(t, l.Candidate.ID, busy.Candidate.ID)
	blocked := []string{l.Candidate.Instance}
	require.Nil(t, l.MoveIfSooner(-20*msec, blocked), "the other engine is busy for 100 ms")
	moved := l.MoveIfSooner(-120*msec, blocked)
	require.NotNil(t, moved)
	require.Equal(t, busy.Candidate.ID, moved.Candidate.ID)
	moved.Release()
	busy.Answered(Usage{}, time.Time{})
	busy.Release()
	requireIdle(t, f.Scheduler)
}

// A prefill waits for nothing that will not come.
func TestAPrefillMovesFromAnEngineThatIsDown(t *testing.T) {
	f := newForetold(t, mooncake.AscendLayerwise, "a", "b")
	l, _ := f.bind()
	all := up("a", "b")
	for i := range all {
		all[i].Profile, all[i].Live = l.Candidate.Profile, all[i].ID != l.Candidate.ID
	}
	f.SetCandidates(all)
	moved := l.MoveIfSooner(time.Hour, nil)
	require.NotNil(t, moved)
	require.NotEqual(t, l.Candidate.ID, moved.Candidate.ID)
	moved.Release()
	requireIdle(t, f.Scheduler)
}

// Requests that are bound before their prefill wait for a decode rank, in the pool: its size and
// time bound them, those of the arrival queue the others, whichever model comes first.
func TestModelsThatBindEarlyHaveBoundsOfTheirOwn(t *testing.T) {
	f := newForetold(t, mooncake.SGLang, "a", "b")
	all := up("a", "b")
	all[0].Models, all[0].Profile = []string{"early"}, f.candidates["a"].Profile
	f.SetCandidates(all)
	f.cfg.Push.MaxUnanswered = 1
	f.cfg.Queue, f.cfg.Early = QueueConfig{Max: 3, Timeout: time.Minute}, QueueConfig{Max: 1, Timeout: time.Second}
	for _, row := range []struct {
		model, key string
		most       int
		wait       time.Duration
	}{{"early", "pool.size", 1, time.Second}, {testModel, "prefill.queue.max", 3, time.Minute}} {
		running := acquire(t, f.Scheduler, Request{Model: row.model})
		var waiters []*waiter
		for range row.most {
			w, lease, err := f.enter(Request{Model: row.model})
			require.NoError(t, err)
			require.Nil(t, lease)
			require.Equal(t, f.now.Add(row.wait), w.timesOutAt)
			waiters = append(waiters, w)
		}
		_, _, err := f.enter(Request{Model: row.model})
		require.ErrorIs(t, err, ErrQueueFull)
		require.ErrorContains(t, err, row.key)
		_, _, err = f.enter(Request{Model: row.model, Arrival: f.now.Add(-row.wait)})
		require.ErrorIs(t, err, ErrQueueTimeout)
		require.ErrorContains(t, err, row.wait.String())
		for _, w := range waiters {
			f.withdraw(w)
		}
		running.Release()
	}
	requireIdle(t, f.Scheduler)
}
