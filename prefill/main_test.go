package prefill

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testModel = "m"

// Where hold leaves what it charges.
const (
	probing    = ledger.Probing
	pooled     = ledger.Pooled
	dispatched = ledger.Dispatched
	orphaned   = ledger.Orphaned
)

// up returns live candidates, each on the instance before the slash of its ID.
func up(ids ...string) []Candidate {
	var all []Candidate
	for _, id := range ids {
		instance := id
		for i := range id {
			if id[i] == '/' {
				instance = id[:i]
			}
		}
		all = append(all, Candidate{ID: id, Instance: instance, Models: []string{testModel}, CapacityTokens: 100_000, Live: true})
	}
	return all
}

// newScheduler returns a scheduler that does not scrape, with the candidates set.
func newScheduler(t testing.TB, candidates []Candidate, change ...func(*Config)) *Scheduler {
	t.Helper()
	cfg := Config{Policy: "least-tokens", Push: PushConfig{MaxUnanswered: 1_000_000}} // engines that can always start one more
	for _, f := range change {
		f(&cfg)
	}
	scheduler, err := New(cfg)
	require.NoError(t, err)
	scheduler.SetCandidates(candidates)
	return scheduler
}

func withPolicy(spec string) func(*Config) { return func(c *Config) { c.Policy = spec } }

// acquire must be served at once.
func acquire(t testing.TB, scheduler *Scheduler, r Request) *Lease {
	t.Helper()
	if r.Model == "" {
		r.Model = testModel
	}
	w, lease, err := scheduler.enter(r)
	require.NoError(t, err)
	require.Nil(t, w, "request %q waits", r.ID)
	return lease
}

// mustWait fails unless the request would have to wait, and leaves no trace.
func mustWait(t testing.TB, scheduler *Scheduler, r Request) {
	t.Helper()
	if r.Model == "" {
		r.Model = testModel
	}
	w, lease, err := scheduler.enter(r)
	require.NoError(t, err)
	require.Nil(t, lease, "request %q was served", r.ID)
	scheduler.withdraw(w)
}

// hold charges a candidate with prompts in one phase.
func hold(t testing.TB, scheduler *Scheduler, id string, p ledger.Phase, promptTokens ...int) []*Lease {
	t.Helper()
	var leases []*Lease
	for _, tokens := range promptTokens {
		scheduler.lock()
		c := scheduler.candidates[id]
		require.NotNil(t, c, "no candidate %q", id)
		v := policy.Engine{}
		v.TPMs, v.T0Ms = scheduler.cfg.Calibration.TPMs, scheduler.cfg.Calibration.T0Ms
		v.SetPrompt(float64(tokens), 0)
		l := scheduler.choose.makeLease(c, scheduler.steering.Default(), &Request{PromptTokens: tokens}, &v, scheduler.now)
		scheduler.unlock()
		switch p {
		case pooled:
			l.Answered(Usage{}, time.Time{})
		case dispatched:
			l.Answered(Usage{}, time.Time{})
			l.Dispatched()
		case orphaned:
			l.Failed(true, 0)
			scheduler.lock()
			c.circuit.Succeed()
			scheduler.unlock()
		}
		leases = append(leases, l)
	}
	return leases
}

// requireIdle checks that every charge was given back, once.
func requireIdle(t require.TestingT, scheduler *Scheduler) {
	status, audit := scheduler.status()
	require.Zero(t, audit.Drift, "charged - released - held")
	require.Zero(t, audit.Misuses, "calls on a lease after its last")
	for _, c := range status {
		require.Equal(t, ledger.Sums{}, c.sums, "candidate %s still holds something", c.ID)
	}
	for _, c := range scheduler.candidates {
		require.Equal(t, ledger.Sums{}, c.load.Waiting, "held for %s between rounds", c.ID)
		require.Zero(t, c.load.OldestSent(), "candidate %s has an unanswered probe", c.ID)
	}
	_, expires := scheduler.ledger.NextExpiry()
	require.False(t, expires)
	require.Zero(t, scheduler.queue.Len())
}

// places is a pool of so many free places.
type places struct {
	free atomic.Int64
	wake func()
}

func newPlaces(free int64) *places {
	p := &places{}
	p.free.Store(free)
	return p
}

func (p *places) TryAcquire() bool {
	if p.free.Add(-1) < 0 {
		p.free.Add(1)
		return false
	}
	return true
}

func (p *places) Room() bool { return p.free.Load() > 0 }

func (p *places) Release() {
	p.free.Add(1)
	if p.wake != nil {
		p.wake()
	}
}

func withPlaces(p *places) func(*Config) { return func(c *Config) { c.Places = p } }

func request(n int) Request { return Request{ID: fmt.Sprintf("r%d", n), PromptTokens: 100} }
