package live

import (
	"time"

	"evenkeel/gateway/timeline"
)

// Fake is a livetest.Proxy. That package imports this one, so that the tests of this one cannot import it: handed_test.go,
// which is outside of this package, hands it to them.
type Fake interface {
	Subject
	Change(func(*Document))
	Fail(by map[timeline.Outcome]uint64, whys map[timeline.Outcome]timeline.Why, all uint64)
	Pass(time.Duration)
	Documents() int
}

// NewFake has so many ranks.
var NewFake func(ranks int) Fake
