package prefill

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func withPush(n int) func(*Config) { return func(c *Config) { c.Push.MaxUnanswered = n } }

// waits enters a request that must wait.
func waits(t testing.TB, scheduler *Scheduler, r Request) *waiter {
	t.Helper()
	r.Model = testModel
	w, lease, err := scheduler.enter(r)
	require.NoError(t, err)
	require.Nil(t, lease, "request %q was served", r.ID)
	select {
	case <-w.done:
		require.Fail(t, "served", "request %q", r.ID)
	default: // its lease is the scheduler's to write
	}
	return w
}

func TestARequestWaitsForItsBestPrefiller(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b"), withPolicy("lmetric"), withPush(2))
	first := hold(t, scheduler, "a", probing, 10, 10) // little to do, but as many as it takes
	hold(t, scheduler, "b", probing, 50_000)
	w := waits(t, scheduler, Request{ID: "r", PromptTokens: 100})
	first[0].Answered(Usage{}, time.Time{})
	require.NotNil(t, w.lease)
	require.Equal(t, "a", w.lease.Candidate.ID)
}

func TestWhoseBestIsElsewherePassesWhoIsHeld(t *testing.T) {
	scheduler := newScheduler(t, up("a", "b"), withPolicy("lmetric"), withPush(2))
	hold(t, scheduler, "a", probing, 10, 10)
	hold(t, scheduler, "b", probing, 3000)
	old := waits(t, scheduler, Request{ID: "old", PromptTokens: 2000}) // a: 2020·3, b: 5000·2
	w, _, err := scheduler.enter(Request{ID: "young", Model: testModel, PromptTokens: 3000})
	require.NoError(t, err) // a alone 3020·3 = 9060, with the old one 5020·4; b 6000·2
	require.NotNil(t, w.lease, "the held request's tokens count at a")
	require.Equal(t, "b", w.lease.Candidate.ID)
	require.Nil(t, old.lease)
	require.Zero(t, scheduler.candidates["a"].load.Waiting, "between rounds nothing is held")
}

func TestAPolicyThatIsBlindToLoadTakesWhoCanStart(t *testing.T) {
	for _, policy := range []string{"round-robin", "random"} {
		scheduler := newScheduler(t, up("a", "b"), withPolicy(policy), withPush(1))
		hold(t, scheduler, "a", probing, 10)
		require.Equal(t, "b", acquire(t, scheduler, request(1)).Candidate.ID, policy)
		mustWait(t, scheduler, request(2))
	}
}

func TestNobodyWaitsForAPrefillerThatIsStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheduler := newScheduler(t, up("a", "b"), withPolicy("lmetric"), withPush(2))
		hold(t, scheduler, "a", probing, 10, 10) // due in 300 ms
		hold(t, scheduler, "b", probing, 30_000)
		w := waits(t, scheduler, Request{ID: "r", PromptTokens: 100})
		time.Sleep(time.Second)
		synctest.Wait()
		select {
		case <-w.done:
			require.Fail(t, "served")
		default:
		}
		time.Sleep(time.Second)
		<-w.done // nobody answered
		require.NotNil(t, w.lease)
		require.Equal(t, "b", w.lease.Candidate.ID)
	})
}

func TestARetryPassesWhoIsHeldForAPlace(t *testing.T) {
	scheduler := newScheduler(t, up("a"), withPlaces(newPlaces(0)))
	waits(t, scheduler, Request{ID: "fresh"})
	require.NotNil(t, acquire(t, scheduler, Request{ID: "retry", HasPlace: true}))
}
