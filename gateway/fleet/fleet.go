// Package fleet runs the roster: it learns from the config, operators, discovery, health checks and
// owners which engines take requests, passes this on to the components that bind requests, and
// drains engines and ranks.
package fleet

import (
	"errors"
	"fmt"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// defaultSlots: engines do not report how many requests they can run.
const defaultSlots = 32

// Load builds the engines of the config. The caller calls enter, which puts them into the fleet,
// only if err is nil.
func (f *Fleet) Load() (enter func(), err error) {
	var entered []roster.Event
	set := f.deps.Settings()
	for role, e := range set.Engines.All() {
		built, invalid := f.deps.build(role, e, set)
		err = errors.Join(err, invalid)
		entered = append(entered, roster.Entered{Engine: built})
	}
	return func() { f.resolveAndApply(entered...) }, err
}

// Add registers an engine for an operator, who wants it to take requests, so its drains end.
func (f *Fleet) Add(role string, e config.Engine) error {
	built, err := f.deps.build(role, e, f.deps.Settings())
	if err == nil {
		f.resolveAndApply(roster.Entered{Engine: built, EndDrains: true})
	}
	return err
}

// Remove removes an engine, whose requests finish.
func (f *Fleet) Remove(role, id string) error {
	key := role + " " + id
	if f.Now().Engine(key) == nil {
		return fmt.Errorf("%w: %s %s", roster.ErrNoSuchEngine, role, id)
	}
	f.apply(roster.Removed{Key: key})
	return nil
}

// PutFound adds an engine that discovery has found, or updates its description.
func (f *Fleet) PutFound(role string, e config.Engine, found roster.Found) error {
	set := f.deps.Settings()
	e, err := set.CompleteFound(role, e)
	if err != nil {
		return err
	}
	built, err := f.deps.build(role, e, set)
	if err == nil {
		built.Found = found
		f.resolveAndApply(roster.Entered{Engine: built})
	}
	return err
}

// UpdateFound starts or stops new work for an engine by discovery. An engine that an operator has
// removed stays removed.
func (f *Fleet) UpdateFound(key string, found roster.Found) {
	f.apply(roster.Turned{Key: key, Found: found})
}

// RemoveFound spares a newer engine (another incarnation) at the address.
func (f *Fleet) RemoveFound(key, incarnation string) {
	f.apply(roster.Left{Key: key, Incarnation: incarnation})
}

// build warns of missing slots, and of a profile by which a prompt may make a whole group wait.
func (d *Deps) build(role string, e config.Engine, set *Settings) (*roster.Engine, error) {
	id, err := config.InstanceID(e.URL)
	if err != nil {
		return nil, err
	}
	profile, ok := set.Profiles[e.Profile]
	if !ok {
		return nil, fmt.Errorf("%s engine %s: no profile is named %q", role, id, e.Profile)
	}
	target, err := config.Target(e, profile)
	if err != nil {
		return nil, fmt.Errorf("%s %w", role, err)
	}
	built := &roster.Engine{ID: id, Role: role, Target: target, Conf: e, Profile: profileOf(role, profile)}
	if built.Decodes() && e.Slots == 0 {
		built.Conf.Slots = defaultSlots
		d.Log.Warn(fmt.Sprintf("the slots of %s engine are not set, and engines do not tell them; set engines.%s[].slots to its --max-num-seqs",
			aOrAn(role), role),
			zap.String("engine", id), zap.Int("assumed", defaultSlots))
	}
	prefillsOnAscend := role == roster.Decode && profile.AllowLocalPrefill && profile.Connector == mooncake.AscendMooncakeV1
	if prefillsOnAscend && profile.MaxBatchedTokens == 0 { // not set
		d.Log.Warn("decode engines on Ascend usually run with few tokens per step and without a prefix cache, so a prompt that one of them "+
			"computes makes its whole group wait; set max_num_batched_tokens of the profile to that of the engines, or set allow_local_prefill to "+
			"false",
			zap.String("engine", id), zap.String("profile", e.Profile))
	}
	return built, nil
}

// profileOf: an aggregated engine hands no KV over.
func profileOf(role string, p *mooncake.Profile) *mooncake.Profile {
	if role != roster.Aggregated {
		return p
	}
	withoutTransfer := p.Alone()
	return &withoutTransfer
}

func aOrAn(role string) string {
	if role == roster.Aggregated {
		return "an " + role
	}
	return "a " + role
}

// AnyPrefill takes turns among the engines; nil: none is up.
func (f *Fleet) AnyPrefill(model string) *engine.Target {
	return f.Now().AnyPrefill(model, int(f.anyPrefillCalls.Add(1)))
}
