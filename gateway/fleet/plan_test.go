package fleet

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// An engine may leave after a reload is prepared and before it is carried out. The reload does not
// bring it back: discovery has removed it, and would not do so again.
func TestAReloadBringsNoEngineBackThatHasLeft(t *testing.T) {
	running, next := config.Default(), config.Default()
	running.Profiles = map[string]mooncake.Profile{"p": {MaxModelLen: 1}}
	next.Profiles = map[string]mooncake.Profile{"p": {MaxModelLen: 2}}
	f := of(t, running)
	require.NoError(t, next.Validate())
	for port, incarnation := range map[string]string{"1": "u1", "2": "u2"} {
		require.NoError(t,
			f.PutFound(roster.Decode, config.Engine{URL: "http://127.0.0.1:" + port, Profile: "p", Slots: 1},
				roster.Found{Incarnation: incarnation}))
	}
	plan, err := f.Plan(NewSettings(running), NewSettings(next))
	require.NoError(t, err)
	require.Len(t, plan.Set, 2)
	f.RemoveFound("decode 127.0.0.1:1", "u1")
	f.Apply(plan)
	require.Nil(t, f.Now().Engine("decode 127.0.0.1:1"))
	require.Equal(t, 2, f.Now().Engine("decode 127.0.0.1:2").Profile.MaxModelLen)
}

// drawConfig draws a valid config of a few engines, in any order.
func drawConfig(t *rapid.T, name string) *config.Config {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{}
	for _, p := range []string{"ascend", "other"} {
		cfg.Profiles[p] = mooncake.Profile{MaxModelLen: rapid.IntRange(0, 2).Draw(t, name+p),
			MaxNumSeqs: rapid.IntRange(0, 2).Draw(t, name+p+"slots")}
	}
	engines := func(side string) (list []config.Engine) {
		ports := rapid.SliceOfNDistinct(rapid.IntRange(1, 5), 0, 5, rapid.ID).Draw(t, name+side)
		for _, port := range ports {
			list = append(list, config.Engine{
				URL: fmt.Sprintf("http://127.0.0.1:%d", port), Profile: rapid.SampledFrom([]string{"ascend", "other"}).Draw(t, "profile"),
			})
		}
		return list
	}
	cfg.Engines.Prefill, cfg.Engines.Decode = engines("prefill"), engines("decode")
	for i := range cfg.Engines.Decode {
		cfg.Engines.Decode[i].Slots = rapid.IntRange(0, 3).Draw(t, "slots")
		cfg.Engines.Decode[i].Ranks = rapid.IntRange(0, 2).Draw(t, "ranks")
	}
	require.NoError(t, cfg.Validate())
	return cfg
}

// described is all of a fleet that a config decides.
func (f *Fleet) described() (list []string) {
	for _, e := range f.Now().Engines() {
		list = append(list, fmt.Sprintf("%s %+v %v %d", e.Key(), e.Conf, e.Target.URL, e.Profile.MaxModelLen))
	}
	return list
}

// Whatever came before, a reload leaves the fleet as a start would, and every
// rank who it was.
func TestAReloadLeavesTheFleetThatAStartWould(t *testing.T) {
	var current *Settings
	outer := t
	rapid.Check(t, func(t *rapid.T) {
		begin := func(cfg *config.Config) *Fleet {
			current = NewSettings(cfg)
			f := empty(outer, func() *Settings { return current })
			for _, e := range cfg.Engines.Prefill {
				require.NoError(t, f.Add(roster.Prefill, e))
			}
			for _, e := range cfg.Engines.Decode {
				require.NoError(t, f.Add(roster.Decode, e))
			}
			for _, e := range f.Now().Engines() {
				f.up(e.Key(), "m")
			}
			return f
		}
		next := drawConfig(t, "next")
		want := begin(next).described()
		running := drawConfig(t, "running")
		f := begin(running)
		ids := map[string]int32{}
		for _, e := range f.Now().Engines() {
			for _, r := range e.Ranks() {
				if rank := e.At(r).ID; e.Decodes() {
					ids[rank] = f.worker(rank)
				}
			}
		}
		merged, changes, err := running.MergeReload(next)
		require.NoError(t, err)
		set := NewSettings(merged)
		plan, err := f.Plan(current, set)
		require.NoError(t, err)
		current = set
		f.Apply(plan)
		require.Equal(t, want, f.described(), "%v", changes)
		for rank, id := range ids {
			if is, _ := f.Now().RankByName(rank); is != nil {
				require.Equal(t, id, is.Worker, rank)
			}
		}
		again, err := f.Plan(set, set)
		require.NoError(t, err)
		require.Empty(t, again.Set)
		require.Empty(t, again.Remove)
		require.Empty(t, config.Diff(merged, next))
	})
}
