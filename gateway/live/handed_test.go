package live_test

import (
	"evenkeel/gateway/live"
	"evenkeel/gateway/live/livetest"
)

func init() { live.NewFake = func(ranks int) live.Fake { return livetest.New(ranks) } }
