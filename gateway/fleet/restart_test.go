package fleet

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// A name that leads to another host leads to another process, which has none of the KV: once,
// however the two are told apart then.
func TestANameThatMovesLeadsToAnotherProcess(t *testing.T) {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": {}}
	f := of(t, cfg)
	require.NoError(t, f.Add(roster.Prefill, config.Engine{URL: "http://engine.test:80", Profile: "a"}))
	key := f.Now().Engines()[0].Key()
	f.OnStatus(key, engine.Status{Up: true, StartTime: 1})
	before := f.Now().GenerationAt(key)
	moved := engine.Moved{From: "10.0.0.1", To: "10.0.0.2", At: time.Unix(100, 0)}
	f.OnStatus(key, engine.Status{StartTime: 1, Moved: moved})
	doubt, _ := f.Now().KVInDoubt(before)
	require.True(t, doubt)
	require.Equal(t, moved, *f.Now().Statuses()[0].Moved)
	f.OnStatus(key, engine.Status{Up: true, StartTime: 2, Moved: moved})
	_, gone := f.Now().KVInDoubt(before)
	require.True(t, gone)
}

// The hand-offs of an engine whose name leads to another address now name that address. They are
// good, and soon no hand-off may name the address that the name has left, which may be a stranger's
// by then.
func TestHandOffsMayNameTheAddressToWhichANameHasMoved(t *testing.T) {
	cfg := config.Default()
	cfg.Limits.ProbeTimeout = 50 * time.Millisecond
	cfg.Profiles = map[string]mooncake.Profile{"a": {KVHosts: []string{"10.1.0.1"}}}
	f := of(t, cfg)
	in, err := f.deps.build(roster.Prefill, config.Engine{URL: "http://engine.test:80", Profile: "a"}, f.deps.Settings())
	require.NoError(t, err)
	in.Hosts = []string{"10.0.0.1", "10.1.0.1", "engine.test"}
	f.apply(roster.Entered{Engine: in})
	at := time.Unix(100, 0)
	for _, addresses := range [][2]string{{"10.0.0.1,10.1.0.1", "10.0.0.2,10.0.0.3"}, {"10.0.0.2,10.0.0.3", "10.0.0.1"}} {
		at = at.Add(time.Minute)
		f.OnStatus(in.Key(), engine.Status{Up: true, Moved: engine.Moved{From: addresses[0], To: addresses[1], At: at}})
		for to := range strings.SplitSeq(addresses[1]+",engine.test,10.1.0.1", ",") {
			require.True(t, f.KnownHost(to), to)
		}
		from, _, _ := strings.Cut(addresses[0], ",")
		require.Eventually(t, func() bool { return !f.KnownHost(from) }, time.Minute, time.Millisecond)
	}
	require.NoError(t, f.Remove(roster.Prefill, in.ID))
	require.Eventually(t, func() bool { return !f.KnownHost("10.0.0.1") && !f.KnownHost("engine.test") }, time.Minute, time.Millisecond)
}

// An engine may start after the proxy, so that its name resolves only then. From its first answer
// on, its hand-offs may name its address.
func TestAnEngineWhoseNameResolvesLaterIsLocatedWhenItIsUp(t *testing.T) {
	cfg := config.Default()
	cfg.Limits.ProbeTimeout = 50 * time.Millisecond
	cfg.Profiles = map[string]mooncake.Profile{"a": {KVHosts: []string{"10.1.0.1"}}}
	f := of(t, cfg)
	for _, name := range []string{"localhost", "engine.invalid"} { // a name that resolves now, and one that still does not
		in, err := f.deps.build(roster.Prefill, config.Engine{URL: "http://" + name + ":80", Profile: "a"}, f.deps.Settings())
		require.NoError(t, err)
		in.Hosts = []string{"10.1.0.1", name}
		f.apply(roster.Entered{Engine: in})
		f.OnStatus(in.Key(), engine.Status{Err: errors.New("it does not run yet")})
		require.False(t, f.KnownHost("127.0.0.1"))
		f.OnStatus(in.Key(), engine.Status{Up: true, Models: []engine.Model{{ID: "m"}}})
		require.Equal(t, name == "localhost", f.KnownHost("127.0.0.1"))
		require.True(t, f.KnownHost(name) && f.KnownHost("10.1.0.1"))
		require.True(t, f.Now().Engine(in.Key()).Status.Up)
		require.NoError(t, f.Remove(roster.Prefill, in.ID))
		require.Eventually(t, func() bool { return !f.KnownHost("127.0.0.1") && !f.KnownHost(name) }, time.Minute, time.Millisecond)
	}
}
