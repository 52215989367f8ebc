package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway"
	"evenkeel/gateway/config"
	"evenkeel/gateway/selftest"
)

const (
	selfTestPoll     = 500 * time.Millisecond
	selfTestPatience = time.Minute     // longest wait for engines that are down when the proxy becomes ready
	selfTestLimit    = 5 * time.Minute // longest time that the test may take
)

// errTooLong is the error of the request that runs when the test is ended because it has taken
// selfTestLimit.
var errTooLong = fmt.Errorf("the self-test may take %v", selfTestLimit)

// startSelfTest starts a test of the engines in the background, which logs its findings. The proxy
// serves clients meanwhile. The function end stops the test and waits for its end.
func startSelfTest(g *gateway.Gateway, cfg *config.Config, log *zap.Logger) (end func()) {
	if !cfg.SelfTest {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if !awaitEngines(ctx, g) {
			return
		}
		limited, cancel := context.WithTimeoutCause(ctx, selfTestLimit, errTooLong)
		defer cancel()
		findings := selftest.Run(limited, withOwnRegionOnly(cfg), selftest.Options{Callbacks: g.Callbacks(), TakeSlot: g.TakeSlot})
		if ctx.Err() == nil { // if ctx has ended, serve has cut the test, and the findings may be wrong
			logFindings(log, findings)
		}
	}()
	return func() { cancel(); <-done }
}

// awaitEngines waits until the proxy is ready, no engine is halted, and all engines are up. It
// waits at most selfTestPatience for engines that are down. It returns false if ctx ends first.
func awaitEngines(ctx context.Context, g *gateway.Gateway) bool {
	tick := time.NewTicker(selfTestPoll)
	defer tick.Stop()
	var ready time.Time // since when the proxy is ready and no engine is halted; zero: it is not, or one is
	for {
		select {
		case <-ctx.Done():
			return false
		case now := <-tick.C:
			s := g.Status(ctx)
			if !s.Ready || anyHalted(&s) {
				ready = time.Time{}
				continue
			}
			if ready.IsZero() {
				ready = now
			}
			if now.Sub(ready) >= selfTestPatience || allUp(&s) {
				return true
			}
		}
	}
}

// withOwnRegionOnly returns a config without the engines of other regions, which are tested by the
// proxies of their own region.
func withOwnRegionOnly(cfg *config.Config) *config.Config {
	reduced := *cfg
	ofOwnRegion := func(list []config.Engine) (own []config.Engine) {
		for _, e := range list {
			if e.Region == "" || e.Region == cfg.Geo.Self.Region { // an engine without a region is in the proxy's own region
				own = append(own, e)
			}
		}
		return own
	}
	reduced.Engines.Prefill = ofOwnRegion(cfg.Engines.Prefill)
	reduced.Engines.Decode = ofOwnRegion(cfg.Engines.Decode)
	reduced.Engines.Aggregated = ofOwnRegion(cfg.Engines.Aggregated)
	return &reduced
}

// allUp says whether all engines pass their health checks.
func allUp(s *gateway.Status) bool {
	return !slices.ContainsFunc(s.Engines, func(e gateway.EngineStatus) bool { return !e.Up })
}

// anyHalted says whether an engine is halted: it is paused, or its group re-forms. A request of the
// test would only wait there.
func anyHalted(s *gateway.Status) bool {
	return slices.ContainsFunc(s.Engines, func(e gateway.EngineStatus) bool { return e.State == "halted" })
}

// logFindings logs each finding at the log level of its severity, and then the number of findings
// of each level.
func logFindings(log *zap.Logger, findings []selftest.Finding) {
	count := map[selftest.Level]int{}
	for _, f := range findings {
		count[f.Level]++
		say := log.Info
		switch f.Level {
		case selftest.Warn:
			say = log.Warn
		case selftest.Bad:
			say = log.Error
		}
		say("self-test: "+f.Msg, zap.String("engine", f.Engine))
	}
	log.Info("the self-test is done", zap.Int("ok", count[selftest.OK]), zap.Int("warnings", count[selftest.Warn]),
		zap.Int("bad", count[selftest.Bad]))
}
