// Package fleet runs the roster. It knows which engines, ranks and models there are, and which of them take requests:
// from the config, from operators and from discovery, from the engines' health, and from who owns them. It passes
// this on to the parts that bind requests, and drains engines and ranks.
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

// defaultSlots is the slots of a rank whose max_num_seqs is not configured. Engines cannot be asked for it.
const defaultSlots = 32

// Load makes the engines of the config, all of them or none. They are in the fleet once enter was called.
func (f *Fleet) Load() (enter func(), err error) {
	var all []roster.Event
	set := f.host.Settings()
	for role, e := range set.Engines.All() {
		in, invalid := f.host.build(role, e, set)
		err = errors.Join(err, invalid)
		all = append(all, roster.Entered{Engine: in})
	}
	return func() { f.enter(all...) }, err
}

// Add registers an engine, and ends its drains. An engine that is known keeps its state.
func (f *Fleet) Add(role string, e config.Engine) error {
	in, err := f.host.build(role, e, f.host.Settings())
	if err == nil {
		f.enter(roster.Entered{Engine: in, Anew: true})
	}
	return err
}

// Remove takes an engine out: its requests finish, and it gets no new ones.
func (f *Fleet) Remove(role, id string) error {
	key := role + " " + id
	if f.Now().Engine(key) == nil {
		return fmt.Errorf("%w: %s %s", ErrNoSuchEngine, role, id)
	}
	f.apply(roster.Removed{Key: key})
	return nil
}

// Put takes in an engine that was found, or a new description of it.
func (f *Fleet) Put(role string, e config.Engine, found roster.Found) error {
	set := f.host.Settings()
	e, err := set.CompleteFound(role, e)
	if err != nil {
		return err
	}
	in, err := f.host.build(role, e, set)
	if err == nil {
		in.Found = found
		f.enter(roster.Entered{Engine: in})
	}
	return err
}

// Turn starts or stops new work for an engine that was found. What an operator decided about it stays, also that it is removed.
func (f *Fleet) Turn(key string, found roster.Found) { f.apply(roster.Turned{Key: key, Found: found}) }

// Leave takes out an engine that was found and is not there any more, unless another engine has its place by now.
func (f *Fleet) Leave(key, incarnation string) {
	f.apply(roster.Left{Key: key, Incarnation: incarnation})
}

// build makes an engine from its entry in the config.
func (h *Host) build(role string, e config.Engine, set *Settings) (*roster.Engine, error) {
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
	in := &roster.Engine{ID: id, Role: role, Target: target, Conf: e, Profile: profileOf(role, profile)}
	if in.Decodes() && e.Slots == 0 {
		in.Conf.Slots = defaultSlots
		h.Log.Warn(fmt.Sprintf("the slots of %s engine are not set, and engines do not tell them; set engines.%s[].slots to its --max-num-seqs",
			aOrAn(role), role),
			zap.String("engine", id), zap.Int("assumed", defaultSlots))
	}
	if role == Decode && profile.AllowLocalPrefill && profile.MaxBatchedTokens == 0 && profile.Connector == mooncake.AscendMooncakeV1 {
		h.Log.Warn("decode engines on Ascend usually run with few tokens per step and without a prefix cache, so a prompt that one of them "+
			"computes makes its whole group wait; set max_num_batched_tokens of the profile to that of the engines, or set allow_local_prefill to "+
			"false",
			zap.String("engine", id), zap.String("profile", e.Profile))
	}
	return in, nil
}

// profileOf is the profile as an engine of that role uses it.
func profileOf(role string, p *mooncake.Profile) *mooncake.Profile {
	if role != Aggregated {
		return p
	}
	own := p.Alone()
	return &own
}

func aOrAn(role string) string {
	if role == Aggregated {
		return "an " + role
	}
	return "a " + role
}

// AnyPrefill is a prefill engine that serves a model; each call returns another one; nil: none is up.
func (f *Fleet) AnyPrefill(model string) *engine.Target {
	return f.Now().AnyPrefill(model, int(f.asked.Add(1)))
}
