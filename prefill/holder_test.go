package prefill

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheAuditSeesALeaseThatNobodyHolds(t *testing.T) {
	drift := func(tier *Scheduler) int64 {
		_, a := tier.status()
		return a.Drift
	}
	for name, end := range map[string]func(tier *Scheduler, l *Lease, h *LeaseOwner){
		"it is lost": func(tier *Scheduler, l *Lease, h *LeaseOwner) {
			tier.Ended(h)
			require.EqualValues(t, 1, drift(tier))
			tier.Ended(h)
			require.EqualValues(t, 1, drift(tier), "said twice, it is one")
			l.Release()
		},
		"it is given back in time": func(tier *Scheduler, l *Lease, h *LeaseOwner) {
			l.Release()
			tier.Ended(h)
		},
		"somebody else has it now": func(tier *Scheduler, l *Lease, h *LeaseOwner) {
			l.PassOn()
			tier.Ended(h)
			require.Zero(t, drift(tier))
			l.Release()
		},
		"its engine has given the KV up": func(tier *Scheduler, l *Lease, h *LeaseOwner) {
			l.Answered(Usage{}, tier.clock().Add(1))
			tier.Wake()
			tier.Ended(h)
		},
	} {
		t.Run(name, func(t *testing.T) {
			tier, err := New(Config{})
			require.NoError(t, err)
			tier.SetCandidates(up("p0"))
			h := &LeaseOwner{}
			l := acquire(t, tier, Request{ID: "r", Model: testModel, LeaseOwner: h})
			require.Zero(t, drift(tier))
			end(tier, l, h)
			require.Zero(t, drift(tier))
		})
	}
}
