package gateway

import (
	"reflect"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/reload"
	"evenkeel/geo"
	"evenkeel/predictor"
	"evenkeel/prefill"
)

// conf returns the settings in force. A reload may come between two calls, so settings that belong together are read from one call.
func (g *Gateway) conf() *reload.Settings { return g.config.Settings() }

// reloadDeps returns what the reloader needs from this proxy. Parts that do not exist yet are reached through functions.
func (g *Gateway) reloadDeps() reload.Deps {
	return reload.Deps{
		Log: g.log, Registerer: g.reg, Started: g.started, Prepare: g.prepare,
		ReloadTrust: func(changed func(string) bool) (bool, error) { return g.fleet.ReloadTrust(changed) },
		SetFit:      func(fit *predictor.Fit) error { return g.dispatcher.SetFit(fit) },
		SetGeoKeys:  func(keys *geo.Keys) { g.peers.Geo().SetKeys(keys) },
	}
}

// prepare asks every part that may refuse a new config. The function apply gives the config to the parts, and calls commit once neither
// the dispatcher nor the prefill scheduler can refuse any more. An operator may set another policy before apply is called, so the
// dispatcher may still refuse then. Therefore apply asks it first, before anything has changed.
func (g *Gateway) prepare(old, next *reload.Settings, fit *predictor.Fit) (apply func(commit func()) error, err error) {
	plan, err := g.fleet.Plan(old.Settings, next.Settings)
	if err != nil {
		return nil, err
	}
	beginTraces, err := g.journal.PrepareTracing(&next.Tracing)
	if err != nil {
		return nil, err
	}
	prefillSettings := g.prefillConfig(next)
	if prefillSettings.Policy == g.prefillConfig(old).Policy {
		// The file did not change the policy, and an operator may have set another one since the start.
		prefillSettings.Policy = g.scheduler.Policy()
	}
	if err := prefillSettings.Validate(); err != nil {
		return nil, err
	}
	d := &next.Dispatch
	dispatchSettings := board.Settings{Policy: d.Policy, Window: d.Window, TickLimit: d.TickLimit, TTL: next.PoolTTL(), StepModel: d.StepModel,
		BindAhead: d.BindAhead, Predictor: next.Predictor}
	dispatchSettings.Predictor.Fit = fit
	if next.Dispatch.Policy == old.Dispatch.Policy {
		dispatchSettings.Policy = "" // empty: the file did not change the policy, so the policy in force stays
	}
	if err := g.dispatcher.CheckSettings(dispatchSettings); err != nil {
		return nil, err
	}
	apply = func(commit func()) error {
		if err := g.dispatcher.Configure(dispatchSettings); err != nil {
			return err
		}
		if err := g.scheduler.Configure(prefillSettings); err != nil {
			return err
		}
		commit()
		if !reflect.DeepEqual(old.Tracing, next.Tracing) {
			if err := beginTraces(); err != nil { // logged only: the rest of the config is in force, so the reload has not failed
				g.log.Error("the new tracing settings cannot be used; tracing stays as it was", zap.Error(err))
			}
		}
		g.places.Resize(next.Pool.Size)
		g.fleet.Apply(plan)
		return nil
	}
	return apply, nil
}

// prefillConfig returns the config of the prefill tier, with the parts of this proxy that the tier uses.
func (g *Gateway) prefillConfig(s *reload.Settings) prefill.Config {
	c := s.Tier()
	c.Explain = s.RecordsReasons()
	c.Places = g.places // the places in the pool, where hand-offs wait for slots
	// The closures reach the dispatcher when they are called: at the start, the prefill tier is made before the dispatcher.
	//
	// Free counts the decode slots of a model that are free now.
	c.Free = func(board, model string) (slots int, onlySomeRanks bool) { return g.dispatcher.Free(board, model) }
	// Decode estimates how many hand-offs, besides those that wait already, would get a slot within a time.
	c.Decode = func(board, model string, within time.Duration) (handoffs int, onlySomeRanks bool) {
		return g.dispatcher.Room(board, model, within)
	}
	c.Ranks = g.rankCaches
	c.Scraper, c.Registerer, c.Log = g.fleet.Scrape, g.reg, g.log
	return c
}
