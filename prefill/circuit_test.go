package prefill

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// fail makes a candidate fail so many probes in a row.
func fail(t *testing.T, scheduler *Scheduler, id string, times int) {
	t.Helper()
	for _, l := range hold(t, scheduler, id, probing, make([]int, times)...) {
		l.Failed(false, 0)
	}
}

func stateOf(scheduler *Scheduler, id string) string {
	for _, c := range scheduler.Status() {
		if c.ID == id {
			return c.State
		}
	}
	return "gone"
}

func TestFiveFailuresInARowTakeACandidateOut(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b"))
	fail(t, scheduler, "a", 4)
	require.Equal(t, "open", stateOf(scheduler, "a"))
	hold(t, scheduler, "a", pooled, 10) // an answer ends the row
	fail(t, scheduler, "a", 4)
	require.Equal(t, "open", stateOf(scheduler, "a"))
	fail(t, scheduler, "a", 1)
	require.Equal(t, "out", stateOf(scheduler, "a"))
	for n := range 20 {
		require.Equal(t, "b", acquire(t, scheduler, request(n)).Candidate.ID)
	}
}

func TestTheStatusSaysWhatFailedLast(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	said := func() string { return scheduler.Status()[0].Fault }
	for _, l := range hold(t, scheduler, "a", probing, make([]int, 5)...) {
		l.Blame("it answered without a hand-off" + strings.Repeat(".", 1000))
		l.Failed(false, 0)
	}
	require.Equal(t, "out", stateOf(scheduler, "a"))
	require.Len(t, said(), maxFaultBytes)
	require.Contains(t, said(), "it answered without a hand-off")
	scheduler = newScheduler(t, up("a"))
	hold(t, scheduler, "a", probing, 1)[0].Blame("it reset the connection")
	require.Equal(t, "it reset the connection", said())
	hold(t, scheduler, "a", pooled, 1)
	require.Empty(t, said(), "an answer ends the row")
}

func TestAnOutageIsLoggedWhenItBeginsAndWhenItEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		scheduler := newScheduler(t, up("a", "b"), func(c *Config) { c.Log = zap.New(core) })
		fail(t, scheduler, "a", 5)
		for range 4 { // trials that fail, too
			time.Sleep(30 * time.Second)
			fail(t, scheduler, "a", 1)
		}
		require.Equal(t, 1, logs.FilterMessageSnippet("is out after failures").Len())
		require.Zero(t, logs.FilterMessageSnippet("is back").Len())
		time.Sleep(30 * time.Second)
		hold(t, scheduler, "a", pooled, 10, 10)
		require.Equal(t, 1, logs.FilterMessageSnippet("is back").Len())
		fail(t, scheduler, "a", 5)
		require.Equal(t, 2, logs.FilterMessageSnippet("is out after failures").Len())
	})
}

func TestTheOutageDoublesUpToThirtySeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a", "b"))
		fail(t, scheduler, "a", 5)
		for _, out := range []time.Duration{1, 2, 4, 8, 16, 30, 30} {
			time.Sleep(out*time.Second - 1)
			require.Equal(t, "out", stateOf(scheduler, "a"), "after almost %d s", out)
			time.Sleep(time.Nanosecond)
			require.Equal(t, "open", stateOf(scheduler, "a"), "after %d s", out)
			fail(t, scheduler, "a", 1) // the trial
		}
		time.Sleep(30 * time.Second)
		hold(t, scheduler, "a", pooled, 10)
		fail(t, scheduler, "a", 4)
		require.Equal(t, "open", stateOf(scheduler, "a"), "an answer closes the circuit and forgets the past")
	})
}

func TestOneRequestTriesACandidateAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a", "b"), withPolicy("round-robin"))
		fail(t, scheduler, "a", 5)
		time.Sleep(time.Second)
		trial := acquire(t, scheduler, request(1))
		require.Equal(t, "a", trial.Candidate.ID)
		require.Equal(t, "b", acquire(t, scheduler, request(2)).Candidate.ID)
		require.Equal(t, "b", acquire(t, scheduler, request(3)).Candidate.ID, "a has its trial in flight")
		trial.Release() // the client left: no verdict
		trial = acquire(t, scheduler, request(4))
		require.Equal(t, "a", trial.Candidate.ID, "so the next request is the trial")
		trial.Orphan() // left after the probe was written: no verdict either
		require.Equal(t, "b", acquire(t, scheduler, request(5)).Candidate.ID)
		require.Equal(t, "a", acquire(t, scheduler, request(6)).Candidate.ID, "else nobody would ever try it again")
	})
}

func TestAFailureFromBeforeTheOutageDoesNotProlongIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a", "b"))
		early := hold(t, scheduler, "a", probing, 10)[0]
		fail(t, scheduler, "a", 5)
		time.Sleep(time.Second - 1)
		early.Failed(false, 0)
		time.Sleep(time.Nanosecond)
		require.Equal(t, "open", stateOf(scheduler, "a"))
	})
}

func TestWithAllCandidatesOutTheyAreTriedAnyway(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	fail(t, scheduler, "a", 5)
	require.Equal(t, "a", acquire(t, scheduler, request(1)).Candidate.ID)
}

func TestTheEndOfAnOutageServesTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a", "b"))
		hold(t, scheduler, "b", pooled, 95_000)
		fail(t, scheduler, "a", 5)
		got := <-start(t.Context(), scheduler, request(1))
		require.NoError(t, got.err)
		require.Equal(t, "a", got.lease.Candidate.ID)
		require.Equal(t, time.Second, got.after)
	})
}

func TestARefusedRequestSaysNothingAboutTheCandidate(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	for _, l := range hold(t, scheduler, "a", probing, make([]int, 20)...) {
		l.Release() // what the gateway calls after a 400
	}
	require.Equal(t, "open", stateOf(scheduler, "a"))
	requireIdle(t, scheduler)
}

// An engine whose hand-offs are lost gets one prompt as a trial when its time is over. A prompt
// that was tried before is none.
func TestAnEngineThatLosesHandoffsGetsOnePromptAsATrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a", "b"))
		scheduler.AvoidFor("a", time.Second)
		get := func(exclude ...string) string {
			r := request(1)
			r.Exclude = exclude
			return acquire(t, scheduler, r).Candidate.ID
		}
		require.Equal(t, []string{"b", "b", "b"}, []string{get(), get(), get()})
		time.Sleep(time.Second)
		require.Equal(t, "b", get("b"), "it was tried before")
		require.Equal(t, []string{"a", "b"}, []string{get(), get()})
		scheduler.AvoidFor("a", 0)
		require.Equal(t, "a", get())

		scheduler.AvoidFor("a", 10*time.Second)
		scheduler.SetCandidates(append(up("a"), Candidate{ID: "b", Instance: "b", Models: []string{testModel}, CapacityTokens: 100_000}))
		require.Equal(t, "a", get(), "no other is there")
		scheduler.SetCandidates(up("a", "b"))
		time.Sleep(10 * time.Second)
		require.Equal(t, "a", get(), "what it got because no other was there puts no trial off")
	})
}
