package prefill

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheAuditSeesALeaseThatNobodyHolds(t *testing.T) {
	drift := func(scheduler *Scheduler) int64 {
		_, a := scheduler.status()
		return a.Drift
	}
	for name, end := range map[string]func(scheduler *Scheduler, l *Lease, o *LeaseOwner){
		"it is lost": func(scheduler *Scheduler, l *Lease, o *LeaseOwner) {
			scheduler.Ended(o)
			require.EqualValues(t, 1, drift(scheduler))
			scheduler.Ended(o)
			require.EqualValues(t, 1, drift(scheduler), "said twice, it is one")
			l.Release()
		},
		"it is given back in time": func(scheduler *Scheduler, l *Lease, o *LeaseOwner) {
			l.Release()
			scheduler.Ended(o)
		},
		"somebody else has it now": func(scheduler *Scheduler, l *Lease, o *LeaseOwner) {
			l.DetachOwner()
			scheduler.Ended(o)
			require.Zero(t, drift(scheduler))
			l.Release()
		},
		"its engine has given the KV up": func(scheduler *Scheduler, l *Lease, o *LeaseOwner) {
			l.Answered(Usage{}, scheduler.clock().Add(1))
			scheduler.Wake()
			scheduler.Ended(o)
		},
	} {
		t.Run(name, func(t *testing.T) {
			scheduler, err := New(Config{})
			require.NoError(t, err)
			scheduler.SetCandidates(up("p0"))
			o := &LeaseOwner{}
			l := acquire(t, scheduler, Request{ID: "r", Model: testModel, LeaseOwner: o})
			require.Zero(t, drift(scheduler))
			end(scheduler, l, o)
			require.Zero(t, drift(scheduler))
		})
	}
}
