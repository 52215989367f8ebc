package gateway_test

import (
	"strings"
	"time"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// engineStatus is what /status says of an engine.
func (c *cluster) engineStatus(e *refengine.Engine) gateway.EngineStatus {
	c.Helper()
	for _, s := range c.gw.Status(c.Context()).Engines {
		if strings.HasSuffix(e.URLs()[0], s.ID) {
			return s
		}
	}
	c.Fatalf("no engine at %s", e.URLs()[0])
	return gateway.EngineStatus{}
}

// twoDecodes are engines of one rank each that rr takes in turn.
func twoDecodes(more func(*config.Config)) options {
	return options{
		decode: []refengine.Config{{}, {}}, dirty: true,
		profile: mooncake.Profile{FirstEventTimeout: 3 * time.Second, RejectReleases: new(false)},
		configure: func(cfg *config.Config) {
			cfg.Dispatch.Policy, cfg.Prefill.Retry.Budget = "rr", 1
			cfg.Health.Interval, cfg.Health.Canary, cfg.Health.SlowStart = 20*time.Millisecond, 3*time.Second, 0
			if more != nil {
				more(cfg)
			}
		},
	}
}
