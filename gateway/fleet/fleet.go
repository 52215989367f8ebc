// Package fleet knows which engines, ranks and models there are and which of them take
// requests: from the config, from operators and from discovery, from their health, and
// from who owns them. It says so to whoever binds requests, and drains engines and ranks.
package fleet

import (
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// defaultSlots is what a rank is given when nobody says its max_num_seqs, which
// cannot be discovered.
const defaultSlots = 32

// New returns a fleet without engines.
func New(h Host) *Fleet {
	f := &Fleet{
		host: h, instances: map[string]*instance{}, ranks: map[int32]*Rank{}, ids: map[string]int32{},
		routes: map[string]Route{}, hosts: map[string]trust{}, stops: map[string]*stopped{},
		bygone: map[string]bygone{}, dead: map[string]time.Time{}, runs: runs{all: map[*Run]struct{}{}},
	}
	f.again = time.AfterFunc(time.Hour, f.Publish)
	f.again.Stop()
	return f
}

// Load makes the engines of the config, all of them or none. They are in the fleet
// once enter has run.
func (f *Fleet) Load() (enter func(), err error) {
	var all []*instance
	set := f.host.Settings()
	for role, e := range set.Engines.All() {
		in, wrong := f.build(role, e, set)
		err = errors.Join(err, wrong)
		all = append(all, in)
	}
	return func() {
		for _, in := range all {
			f.enter(in)
		}
	}, err
}

// Add registers an engine, which drains no more. One that is known keeps its state.
func (f *Fleet) Add(role string, e config.Engine) error {
	in, err := f.build(role, e, f.host.Settings())
	if err != nil {
		return err
	}
	f.enter(in)
	if f.resume(func(s *stopped) bool { return s.at.Instance == in.key() }) {
		f.Publish()
	}
	return nil
}

// enter takes one engine in.
func (f *Fleet) enter(in *instance) {
	f.learnHosts(in) // before its hand-offs come
	f.mu.Lock()
	if f.instances[in.key()] == nil {
		f.order = append(f.order, in.key())
	}
	f.put(in)
	f.mu.Unlock()
	f.watch()
	f.Publish()
}

// build makes an engine of its description.
func (f *Fleet) build(role string, e config.Engine, set *Settings) (*instance, error) {
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
	in := &instance{id: id, role: role, engine: target, conf: e, profile: profileOf(role, profile), processes: &roster.Processes{}}
	if in.decodes() && e.Slots == 0 {
		in.conf.Slots = defaultSlots
		f.host.Log.Warn(fmt.Sprintf("the slots of %s engine are not set, and engines do not tell them; set engines.%s[].slots to its --max-num-seqs", aOrAn(role), role),
			zap.String("engine", id), zap.Int("assumed", defaultSlots))
	}
	if role == Decode && profile.AllowLocalPrefill && profile.MaxBatchedTokens == 0 && profile.Connector == mooncake.AscendMooncakeV1 {
		f.host.Log.Warn("decode engines on Ascend usually run with few tokens per step and without a prefix cache, so a prompt that one of them computes makes its whole group wait; set max_num_batched_tokens of the profile to that of the engines, or set allow_local_prefill to false",
			zap.String("engine", id), zap.String("profile", e.Profile))
	}
	return in, nil
}

// profileOf is the profile of an engine of a role.
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

// put takes an engine in, in the place of the one it was before. It is called
// with f.mu held.
func (f *Fleet) put(in *instance) {
	if old, ok := f.instances[in.key()]; ok {
		in.status, in.standing, in.number = old.status, old.standing, old.number
		in.lists, in.named = old.lists, old.named
		in.processes, in.gaveBack = old.processes, old.gaveBack
		if in.found == (found{}) && !in.own { // an operator describes it anew
			in.found = old.found
		}
		f.distrust(old, false)
	} else {
		f.added++
		in.number = f.added
	}
	f.instances[in.key()] = in
	if in.decodes() {
		for _, r := range ranksOf(in) { // numbered as configured, whoever comes up first
			f.number(in, in.target(r).ID)
		}
	}
}

// Remove takes an engine out: its requests finish, it gets no new ones.
func (f *Fleet) Remove(role, id string) error {
	f.mu.Lock()
	in, ok := f.instances[role+" "+id]
	if ok {
		f.drop(in, false)
		f.order = slices.DeleteFunc(f.order, func(k string) bool { return k == in.key() })
	}
	f.mu.Unlock()
	if !ok {
		return fmt.Errorf("%w: %s %s", ErrNoSuchEngine, role, id)
	}
	f.watch()
	f.Publish()
	return nil
}

// watch gives the monitor the present list.
func (f *Fleet) watch() {
	f.mu.RLock()
	defer f.mu.RUnlock()
	var list []engine.Instance
	for _, k := range f.order {
		in := f.instances[k]
		watched := engine.Instance{ID: k, Role: in.role, Target: in.target(-1), Ready: in.profile.Ready(), Version: in.profile.VersionPath(), Ranks: len(ranksOf(in))}
		if in.decodes() { // the prefill tier tries its own with requests
			watched.Slots = in.conf.Slots
			watched.Canary = in.profile.Canary()
			for _, r := range ranksOf(in) {
				watched.Canaries = append(watched.Canaries, in.target(r))
			}
		}
		list = append(list, watched)
	}
	f.host.Monitor.Set(list)
}

// OnStatus is the monitor's callback.
func (f *Fleet) OnStatus(key string, s engine.Status) {
	f.mu.Lock()
	in, ok := f.instances[key]
	if ok {
		if in.role == Prefill {
			f.another(in)(in.processes.Reached(s.Moved != in.status.Moved && !s.Moved.At.IsZero(), errors.Is(s.Err, syscall.ECONNREFUSED)))
			f.another(in)(in.processes.Started(s.StartTime, s.Up && s.Err == nil))
		}
		in.status = s
	}
	f.mu.Unlock()
	if ok {
		f.Publish()
	}
}
