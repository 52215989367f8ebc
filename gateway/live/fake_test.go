package live

import (
	"time"

	"evenkeel/gateway/detect"
	"evenkeel/gateway/watch"
)

// Fake is a livetest.Proxy. That package imports this one, so that the tests of this one cannot
// import it: handed_test.go, which is outside of this package, hands it to them.
type Fake interface {
	Watch() *watch.Watch
	Live(*watch.Watch) *Live
	Change(func(*detect.Facts))
	Fail(by map[detect.Outcome]uint64, whys map[detect.Outcome]detect.Why, all uint64)
	Pass(time.Duration)
	Asked() int
}

// NewFake has so many ranks.
var NewFake func(ranks int) Fake
