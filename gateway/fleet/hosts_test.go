package fleet

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// Hand-offs may point only at hosts of engines that are there, and
// for as long as an answer of one that was there may be on its way.
func TestHostsAreTrustedWhileAnEngineStandsForThem(t *testing.T) {
	synctest.Test(t, hostsAreTrusted)
}

func hostsAreTrusted(t *testing.T) {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": {KVHosts: []string{"10.1.0.1", "10.1.0.2"}}, "b": {KVHosts: []string{"10.1.0.2"}}}
	f := of(t, cfg)
	forgotten := func(host string) {
		t.Helper()
		time.Sleep(2 * cfg.Limits.ProbeTimeout)
		require.False(t, f.KnownHost(host))
	}
	add := func(address, profile string) {
		t.Helper()
		require.NoError(t, f.Add(roster.Prefill, config.Engine{URL: "http://" + address, Profile: profile}))
	}
	add("10.0.0.1:80", "a")
	add("10.0.0.2:80", "b")
	add("10.0.0.1:80", "a") // described anew
	require.NoError(t, f.Remove(roster.Prefill, "10.0.0.1:80"))
	require.True(t, f.KnownHost("10.0.0.1"), "a probe of it may still be answered")
	require.True(t, f.KnownHost("10.1.0.1"))
	forgotten("10.0.0.1")
	forgotten("10.1.0.1")
	require.True(t, f.KnownHost("10.1.0.2"), "another engine stands for it")

	add("10.0.0.2:80", "a")
	require.True(t, f.KnownHost("10.1.0.1"), "by its new profile")
	require.NoError(t, f.Remove(roster.Prefill, "10.0.0.2:80"))
	forgotten("10.1.0.2")

	require.NoError(t, f.PutFound(roster.Prefill, config.Engine{URL: "http://10.0.0.4:80", Profile: "b"}, roster.Found{Incarnation: "u1"}))
	require.True(t, f.KnownHost("10.0.0.4"))
	f.RemoveFound("prefill 10.0.0.4:80", "u1")
	require.False(t, f.KnownHost("10.0.0.4"), "a pod that is no more answers nothing")
}

// An engine is described anew while its name does not resolve. The addresses to which the name led
// before stay good.
func TestAnEngineWhoseNameDoesNotResolveKeepsItsAddresses(t *testing.T) {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": {}, "b": {KVHosts: []string{"10.1.0.1"}}}
	f := of(t, cfg)
	conf := config.Engine{URL: "http://engine.invalid:80", Profile: "a"}
	in, err := f.deps.build(roster.Prefill, conf, f.deps.Settings())
	require.NoError(t, err)
	in.Hosts = []string{"10.0.0.1", "engine.invalid"}
	f.apply(roster.Entered{Engine: in})
	require.NoError(t, f.Add(roster.Prefill, conf))
	require.Equal(t, in.Hosts, f.Now().Engine(in.Key()).Hosts)
	conf.Profile = "b"
	require.NoError(t, f.Add(roster.Prefill, conf))
	require.Equal(t, []string{"10.1.0.1", "engine.invalid"}, f.Now().Engine(in.Key()).Hosts, "the operator has written other hosts")
}
