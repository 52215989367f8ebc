package request

import (
	"time"

	"evenkeel/gateway/fleet"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/lifecycle"
	"evenkeel/mooncake"
)

// waitAtMost is the time that a limit stands for.
func waitAtMost(l lifecycle.Limit, set *fleet.Settings, p *mooncake.Profile) time.Duration {
	switch l {
	case lifecycle.ByProbe, lifecycle.ByWhole:
		return set.Limits.ProbeTimeout
	case lifecycle.ByFirstEvent, lifecycle.ByHold:
		return p.FirstEventTimeout
	case lifecycle.ByCallback:
		return set.Bind.CallbackTimeout
	case lifecycle.ByGrace:
		return set.Bind.Grace
	case lifecycle.ByConfirm:
		return set.Bind.Confirm
	case lifecycle.ByAbort:
		return abortTime
	case lifecycle.NotHere:
	}
	return handoff.Forever
}

const abortTime = 200 * time.Millisecond
