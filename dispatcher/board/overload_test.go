package board

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
	"evenkeel/pool"
)

// overload is a run in virtual time over a board of 16 ranks with 8 slots, which requests keep for
// 8 s in the mean. Their hand-offs are those of NIXL's shortest lease.
type overload struct {
	*hand
	random   *rand.Rand
	profile  mooncake.Profile
	budget   time.Duration
	waiting  []waiting
	prefixed map[*Slot]time.Time // when its prefill ended
	begins   map[*Slot]time.Time // when the first event comes
	ends     map[*Slot]time.Time
	served   int
	refused  int
	again    int // first events after the end of the hold, whose prompts are computed a second time
}

// run lets requests come at so many times the rate at which slots come free, and returns how long
// after its begin the last one was refused.
func (o *overload) run(load float64, duration time.Duration) (lastRefusal time.Duration) {
	const step, pull, mean = 10 * time.Millisecond, 50 * time.Millisecond, 8 * time.Second
	perStep := load * 16 * 8 * step.Seconds() / mean.Seconds()
	for passed := time.Duration(0); passed < duration; passed += step {
		for n := perStep; n > 0; n-- {
			if o.random.Float64() < n {
				o.waiting = append(o.waiting, o.put(pool.Entry{Prompt: 100, Deadline: o.at.Add(o.budget)}))
			}
		}
		for s, at := range o.begins {
			if o.at.Before(at) {
				continue
			}
			if o.at.Sub(o.prefixed[s]) >= o.profile.PulledWithin() {
				o.again++
			}
			delete(o.begins, s)
			s.Started()
			o.ends[s] = o.at.Add(time.Duration(o.random.ExpFloat64() * float64(mean)))
		}
		var over []*Slot
		for s, at := range o.ends {
			if !o.at.Before(at) {
				over = append(over, s)
				delete(o.ends, s)
				delete(o.prefixed, s)
			}
		}
		o.release(over...)
		o.pass(step)
		still := o.waiting[:0]
		for _, w := range o.waiting {
			if w.waits() {
				still = append(still, w)
				continue
			}
			r := <-w.result
			if r.Err != nil {
				o.refused, lastRefusal = o.refused+1, passed
				continue
			}
			o.served++
			o.begins[r.Slot], o.prefixed[r.Slot] = o.at.Add(pull), w.entry.Entered
		}
		o.waiting = still
	}
	return lastRefusal
}

// What is refused in an overload is what comes too much, next to nothing is computed twice, and
// half a minute later all is calm.
func TestAnOverloadIsOverWhenTheLoadIs(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(16, 8, 0))
	o := &overload{hand: h, random: rand.New(rand.NewPCG(1, 2)), ends: map[*Slot]time.Time{}, begins: map[*Slot]time.Time{},
		prefixed: map[*Slot]time.Time{}, profile: mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()}
	var err error
	o.budget, err = o.profile.HoldBudget()
	require.NoError(t, err)
	o.run(0.9, time.Minute)
	require.Zero(t, o.refused)
	o.run(1.3, 3*time.Minute)
	came := o.served + o.refused + len(o.waiting)
	t.Logf("overload: %d came, %d got slots, %d were refused, %d computed twice", came, o.served, o.refused, o.again)
	require.Less(t, float64(o.refused), 0.25*float64(came))
	require.Less(t, float64(o.again), 0.02*float64(o.served))
	refused := o.refused
	last := o.run(0.7, time.Minute)
	t.Logf("after it: %d were refused, the last one after %v", o.refused-refused, last)
	require.Less(t, last, 30*time.Second)
	require.Empty(t, o.waiting)
}
