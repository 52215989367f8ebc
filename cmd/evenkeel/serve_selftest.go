package main

import (
	"context"
	"slices"
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway"
	"evenkeel/gateway/config"
	"evenkeel/gateway/selftest"
)

const (
	selfTestPoll     = 500 * time.Millisecond
	selfTestPatience = time.Minute     // for the engines that are still down once requests can be served
	selfTestLimit    = 5 * time.Minute // for the test itself
)

// startSelfTest tests the engines in the background, once, and logs what it
// finds; serving never waits for it. The function it returns ends it.
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
		limited, cancel := context.WithTimeout(ctx, selfTestLimit)
		defer cancel()
		findings := selftest.Run(limited, atHome(cfg), selftest.Options{Callbacks: g.Callbacks(), Seat: g.Seat})
		if ctx.Err() == nil { // what was cut by the end of serve says nothing about engines
			logFindings(log, findings)
		}
	}()
	return func() { cancel(); <-done }
}

// awaitEngines waits until every engine is up, or some of each side are and the
// rest were given their time. It is false when ctx ended first.
func awaitEngines(ctx context.Context, g *gateway.Gateway) bool {
	tick := time.NewTicker(selfTestPoll)
	defer tick.Stop()
	var ready time.Time
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

// atHome leaves out the engines of other regions: who owns them sends nothing to
// them for a test.
func atHome(cfg *config.Config) *config.Config {
	own := *cfg
	ours := func(list []config.Engine) (home []config.Engine) {
		for _, e := range list {
			if e.Region == "" || e.Region == cfg.Geo.Self.Region {
				home = append(home, e)
			}
		}
		return home
	}
	own.Engines.Prefill, own.Engines.Decode, own.Engines.Aggregated = ours(cfg.Engines.Prefill), ours(cfg.Engines.Decode),
		ours(cfg.Engines.Aggregated)
	return &own
}

func allUp(s *gateway.Status) bool {
	return !slices.ContainsFunc(s.Engines, func(e gateway.EngineStatus) bool { return !e.Up })
}

// anyHalted says that an engine is paused, or its group re-forms: a request of the test would wait, and find nothing out.
func anyHalted(s *gateway.Status) bool {
	return slices.ContainsFunc(s.Engines, func(e gateway.EngineStatus) bool { return e.State == "halted" })
}

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
