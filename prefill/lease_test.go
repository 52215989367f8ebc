package prefill

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/prefill/policy"
)

// noDeadline hides testing.T's Deadline, which may not be asked in a bubble.
type noDeadline struct{ rapid.TB }

func TestEveryChargeIsGivenBackOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(noDeadline{t}, func(t *rapid.T) {
			serving := &policy.Library{ForServing: true}
			scheduler, err := New(Config{Push: PushConfig{MaxUnanswered: 100}, Policy: rapid.SampledFrom(serving.Names()).Draw(t, "policy")})
			require.NoError(t, err)
			scheduler.SetCandidates(up("p0/0", "p0/1", "p1/0"))
			var open []*Lease
			take := func() *Lease {
				i := rapid.IntRange(0, len(open)-1).Draw(t, "lease")
				l := open[i]
				open = append(open[:i], open[i+1:]...)
				return l
			}
			for range rapid.IntRange(1, 60).Draw(t, "steps") {
				step := rapid.IntRange(0, 8).Draw(t, "step")
				if step > 2 && len(open) == 0 {
					step = 0
				}
				switch step {
				case 0, 1:
					r := Request{ID: "r", Model: testModel, PromptTokens: rapid.IntRange(0, 20_000).Draw(t, "tokens"),
						PromptBytes: rapid.IntRange(0, 100_000).Draw(t, "bytes")}
					if w, l, err := scheduler.enter(r); err == nil && w == nil {
						open = append(open, l)
					} else if w != nil {
						scheduler.withdraw(w)
					}
				case 2:
					time.Sleep(time.Duration(rapid.IntRange(0, 20).Draw(t, "seconds")) * time.Second)
				case 3:
					l := open[rapid.IntRange(0, len(open)-1).Draw(t, "lease")]
					if l.inFlight.Phase() == probing {
						l.Answered(Usage{PromptTokens: rapid.IntRange(0, 20_000).Draw(t, "prompt tokens")},
							time.Now().Add(time.Duration(rapid.IntRange(0, 30).Draw(t, "hold"))*time.Second))
					}
				case 4:
					if l := open[rapid.IntRange(0, len(open)-1).Draw(t, "lease")]; l.inFlight.Phase() != probing {
						l.Dispatched()
					}
				case 5:
					take().Failed(rapid.Bool().Draw(t, "written"), 10*time.Second)
				case 6:
					take().Orphan()
				case 7:
					take().Release()
				case 8:
					scheduler.SetCandidates(up("p0/0", "p0/1", "p1/0")[:rapid.IntRange(0, 3).Draw(t, "candidates")])
				}
				_, audit := scheduler.status()
				require.Zero(t, audit.Drift)
			}
			for _, l := range open {
				l.Release()
			}
			time.Sleep(defaultHold) // the orphans'
			requireIdle(t, scheduler)
		})
	})
}

func TestACallAfterTheLastIsCountedAndChangesNothing(t *testing.T) {
	last := map[string]func(*Lease){
		"Release":        (*Lease).Release,
		"Orphan":         (*Lease).Orphan,
		"Failed":         func(l *Lease) { l.Failed(false, 0) },
		"Failed written": func(l *Lease) { l.Failed(true, time.Minute) },
	}
	calls := map[string]func(*Lease){
		"Answered":   func(l *Lease) { l.Answered(Usage{PromptTokens: 7}, time.Now().Add(time.Minute)) },
		"Dispatched": (*Lease).Dispatched,
	}
	for name, f := range last {
		calls[name] = f
	}
	for first, end := range last {
		for second, again := range calls {
			t.Run(first+" then "+second, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { // no time passes
					scheduler := newScheduler(t, up("a"))
					hold(t, scheduler, "a", probing, 300) // a neighbour that must not be hit
					l := acquire(t, scheduler, Request{PromptTokens: 100})
					end(l)
					before, _ := scheduler.status()
					again(l)
					after, audit := scheduler.status()
					require.Equal(t, before, after)
					require.EqualValues(t, 1, audit.Misuses)
					require.Zero(t, audit.Drift)
				})
			})
		}
	}
}

func TestTheLastCallAfterTheEnginesTimeoutIsNoBug(t *testing.T) {
	for name, end := range map[string]func(*Lease){
		"Release": (*Lease).Release,
		"Orphan":  (*Lease).Orphan,
		"Failed":  func(l *Lease) { l.Failed(true, time.Minute) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				scheduler := newScheduler(t, up("a"))
				l := acquire(t, scheduler, request(1))
				l.Answered(Usage{}, time.Now().Add(time.Second))
				time.Sleep(time.Second)
				require.Zero(t, scheduler.Status()[0].KVTokens, "the engine has freed it")
				l.Dispatched()
				end(l)
				requireIdle(t, scheduler)
			})
		})
	}
}

// The engine may have finished what it never answered.
func TestALostProbeStaysChargedUntilTheHoldTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a"))
		acquire(t, scheduler, Request{PromptTokens: 5000}).Failed(true, 30*time.Second)
		s := scheduler.Status()[0]
		require.Zero(t, s.QueuedNewTokens, "it is not in the prefiller's queue")
		require.Zero(t, s.Inflight)
		require.EqualValues(t, 5000, s.KVTokens)
		require.Equal(t, 1, s.Orphans)
		time.Sleep(30 * time.Second)
		requireIdle(t, scheduler)
	})
}

func TestAProbeThatWasAnsweredByAnErrorHoldsNothing(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	acquire(t, scheduler, request(1)).Failed(false, 30*time.Second)
	requireIdle(t, scheduler)
}

func TestMoreCachedTokensThanThePromptHasAreNotBelieved(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	lease := acquire(t, scheduler, request(1))
	lease.Answered(Usage{PromptTokens: 100, CachedTokens: 1 << 40}, time.Time{})
	require.Zero(t, scheduler.Overview().Index.ActualTokens)
	lease.Release()
	requireIdle(t, scheduler)
}

func TestACandidateThatComesBackFindsItsAccounts(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b"))
	l := hold(t, scheduler, "a", pooled, 700)[0]
	scheduler.SetCandidates(up("b"))
	require.Equal(t, "removed", stateOf(scheduler, "a"))
	scheduler.SetCandidates(up("a", "b"))
	require.EqualValues(t, 700, scheduler.Status()[0].KVTokens)
	scheduler.SetCandidates(up("b"))
	l.Release()
	require.Equal(t, "gone", stateOf(scheduler, "a"), "nothing is charged to it any more")
	requireIdle(t, scheduler)
}

// What an engine said may be in any language, and is cut.
func TestWhatACandidateSaidIsCutAtALetter(t *testing.T) {
	scheduler := newScheduler(t, up("a"))
	lease := acquire(t, scheduler, request(1))
	lease.Blame(strings.Repeat("x", maxFaultBytes-1) + "模型")
	lease.Failed(false, 0)
	fault := scheduler.Status()[0].Fault
	require.True(t, utf8.ValidString(fault), "%q", fault)
	require.True(t, strings.HasPrefix(fault, strings.Repeat("x", maxFaultBytes-1)))
	require.LessOrEqual(t, utf8.RuneCountInString(fault), maxFaultBytes)
}
