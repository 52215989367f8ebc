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

// conf returns the settings in force. A reload may come between two calls, so settings that belong
// together are read from one call.
func (g *Gateway) conf() *reload.Settings { return g.config.Settings() }

// reloadDeps returns what the reloader needs from this proxy. Parts that do not exist yet are
// reached through functions.
func (g *Gateway) reloadDeps() reload.Deps {
	return reload.Deps{
		Log: g.log, Registerer: g.reg, Started: g.started, Prepare: g.prepare,
		ReloadTrust: func(changed func(string) bool) (bool, error) { return g.fleet.ReloadTrust(changed) },
		SetFit:      func(fit *predictor.Fit) error { return g.dispatcher.SetFit(fit) },
		SetGeoKeys:  func(keys *geo.Keys) { g.peers.Geo().SetKeys(keys) },
	}
}

// prepare asks every part that may refuse a new config. The function apply gives the config to the
// parts, and calls commit once neither the dispatcher nor the prefill scheduler can refuse any
// more. An operator may set another policy before apply is called, so the dispatcher may still
// refuse then. Therefore apply asks it first, before anything has changed.
func (g *Gateway) prepare(old, next *reload.Settings, fit *predictor.Fit) (apply func(commit func()) error, err error) {
	plan, err := g.fleet.Plan(old.Settings, next.Settings)
	if err != nil {
		return nil, err
	}
	beginTraces, err := g.journal.PrepareTracing(&next.Tracing)
	if err != nil {
		return nil, err
	}
	prefillSettings := prefillSettingsOf(g, old, next)
	if err := prefillSettings.Validate(); err != nil {
		return nil, err
	}
	dispatchSettings := dispatchSettingsOf(old, next, fit)
	if err := g.dispatcher.CheckSettings(dispatchSettings); err != nil {
		return nil, err
	}
	apply = func(commit func()) error {
		if err := g.dispatcher.Configure(dispatchSettings); err != nil {
			return err
		}
		if err := g.scheduler.Configure(prefillSettings); err != nil { // no error is expected, because the settings are valid
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

// prefillSettingsOf returns the config that a reload gives to the prefill tier. If the file has the
// same policy as before, the policy in force stays, because an operator may have set another one
// since the start.
func prefillSettingsOf(g *Gateway, old, next *reload.Settings) prefill.Config {
	settings := g.prefillConfig(next)
	if settings.Policy == g.prefillConfig(old).Policy {
		settings.Policy = g.scheduler.Policy()
	}
	return settings
}

// dispatchSettingsOf returns the settings that a reload gives to the dispatcher. Its predictor
// starts from fit; nil: from nothing. If the file has the same policy as before, the settings have
// an empty one, with which the dispatcher keeps the policy in force.
func dispatchSettingsOf(old, next *reload.Settings, fit *predictor.Fit) board.Settings {
	d := &next.Dispatch
	settings := board.Settings{Policy: d.Policy, Window: d.Window, TickLimit: d.TickLimit, TTL: next.PoolTTL(), StepModel: d.StepModel,
		BindAhead: d.BindAhead, Predictor: next.Predictor}
	settings.Predictor.Fit = fit
	if next.Dispatch.Policy == old.Dispatch.Policy {
		settings.Policy = ""
	}
	return settings
}

// prefillConfig returns the config of the prefill tier, with the parts of this proxy that the tier
// uses. With two functions the tier asks the dispatcher about the ranks of a board, those that
// share a base model. Free returns how many slots are free now on ranks that prefill and decode.
// Decode returns for how many more hand-offs there will be a slot within a time. Their result
// onlySomeRanks says that not all ranks of the board list the model, so that the tier counts the
// model's hand-offs separately.
func (g *Gateway) prefillConfig(s *reload.Settings) prefill.Config {
	c := s.Tier()
	c.Explain = s.RecordsReasons()
	c.Places = g.places // the places in the pool, where hand-offs wait for slots
	// The closures reach the dispatcher when they are called: at the start, the prefill tier is made
	// before the dispatcher.
	c.Free = func(board, model string) (slots int, onlySomeRanks bool) { return g.dispatcher.Free(board, model) }
	c.Decode = func(board, model string, within time.Duration) (handoffs int, onlySomeRanks bool) {
		return g.dispatcher.Room(board, model, within)
	}
	c.Ranks = g.rankCaches
	c.Scraper, c.Registerer, c.Log = g.fleet.Scrape, g.reg, g.log
	return c
}
