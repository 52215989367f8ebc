package config

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/geo"
	"evenkeel/mooncake"
	"evenkeel/prefill/policy"
)

const configs = "../../configs"

func TestEveryExampleFileIsValid(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(configs, "*.yaml"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, f := range files {
		_, err := Load(f)
		require.NoError(t, err)
	}
}

// TestTheFullExampleHasEveryKeyAtItsDefault: evenkeel.yaml is the reference an
// operator copies from, so it may neither lack a key nor lie about a default.
func TestTheFullExampleHasEveryKeyAtItsDefault(t *testing.T) {
	c, err := Load(filepath.Join(configs, "evenkeel.yaml"))
	require.NoError(t, err)
	for _, key := range keysBelow(reflect.TypeFor[Config](), "$") {
		require.Contains(t, c.source.positions, key, "a key is missing")
	}

	want := Default()
	require.NoError(t, want.Validate())
	require.Equal(t, want.Profiles, profilesWithoutEmpty(c.Profiles))
	c.Engines, want.Engines = Engines{}, Engines{}
	c.Profiles, want.Profiles = nil, nil
	require.Len(t, c.Geo.Peers, 1, "as an example")
	c.Geo.Peers, c.Geo.Residency = nil, nil
	o := &c.Geo.Ownership
	require.Empty(t, slices.Concat(o.TakeoverOrder, o.Etcd.Endpoints))
	require.Empty(t, o.Kubernetes.Kubeconfig)
	o.TakeoverOrder, o.Etcd.Endpoints, o.Kubernetes.Kubeconfig = nil, nil, nil
	require.Equal(t, geo.Self{ID: "us-1", Region: "us-west"}, c.Geo.Self)
	c.Geo.Self = geo.Self{}
	require.Empty(t, slices.Concat(c.HA.Members, c.HA.Etcd.Endpoints))
	c.HA.Members, c.HA.Etcd.Endpoints = nil, nil
	d := &c.Discovery
	require.False(t, d.On())
	d.Files, d.DNS, d.Kubernetes = nil, nil, nil
	require.Empty(t, c.Bind.Allow)
	c.Bind.Allow = nil
	require.Empty(t, c.Limits.MediaHosts)
	c.Limits.MediaHosts = nil
	require.Empty(t, c.Admin.WorkerHosts)
	c.Admin.WorkerHosts = nil
	require.Empty(t, c.Prefill.Policies)
	c.Prefill.Policies = nil
	require.Empty(t, c.Tracing.Headers)
	require.Empty(t, c.Tracing.Resource)
	c.Tracing.Headers, c.Tracing.Resource = nil, nil
	require.Empty(t, c.CORS.Origins)
	c.CORS.Origins = nil
	require.Empty(t, c.GatewayAPI.Objectives)
	c.GatewayAPI.Objectives = nil
	c.source, want.source = source{}, source{}
	require.Equal(t, want, c)
}

// profilesWithoutEmpty: an empty list written down is the same as none.
func profilesWithoutEmpty(all map[string]mooncake.Profile) map[string]mooncake.Profile {
	for name, p := range all {
		if len(p.KVHosts) == 0 {
			p.KVHosts = nil
		}
		if len(p.KVPlainKeys) == 0 {
			p.KVPlainKeys = nil
		}
		all[name] = p
	}
	return all
}

// Keys of engines that those of some roles do not have.
var (
	onlyAggregated = []string{"token_budget", "prefill_schedule_interval"}
	foreign        = map[string][]string{
		"$.engines.prefill[0]": slices.Concat(onlyAggregated, []string{"group", "barrier", "slots", "kv_tokens", "cost"}),
		"$.engines.decode[0]":  slices.Concat(onlyAggregated, []string{"kv_events_port", "kv_replay_port"}),
	}
)

// keysBelow lists the paths of a type's keys, of its example profile and of the
// first engine of a side.
func keysBelow(t reflect.Type, path string) (keys []string) {
	types, names := keysOf(t)
	for _, name := range names {
		at, typ := path+"."+name, types[name]
		if slices.Contains(foreign[path], name) {
			continue
		}
		keys = append(keys, at)
		switch {
		case path == "$.discovery" && typ.Kind() == reflect.Slice:
			// configs/discovery.yaml has them, for there is none to begin with.
		case typ == reflect.TypeFor[map[string]policy.Definition](), typ == reflect.TypeFor[map[string][]string](), typ.Kind() == reflect.Map &&
			typ.Elem().Kind() != reflect.Struct:
			// The user's: there is none to begin with.
		case typ.Kind() == reflect.Map:
			keys = append(keys, keysBelow(typ.Elem(), at+"."+DefaultProfile)...)
		case typ.Kind() == reflect.Slice && typ.Elem().Kind() == reflect.Struct:
			keys = append(keys, keysBelow(typ.Elem(), at+"[0]")...)
		case typ.Kind() == reflect.Struct:
			keys = append(keys, keysBelow(typ, at)...)
		}
	}
	return keys
}

// TestTheDiscoveryExampleHasEveryKeyAtItsDefault, as above.
func TestTheDiscoveryExampleHasEveryKeyAtItsDefault(t *testing.T) {
	c, err := Load(filepath.Join(configs, "discovery.yaml"))
	require.NoError(t, err)
	keys := slices.Concat(
		keysBelow(reflect.TypeFor[DiscoveryDNS](), "$.discovery.dns[0]"),
		keysBelow(reflect.TypeFor[DiscoveryKubernetes](), "$.discovery.kubernetes[0]"))
	for _, key := range append(keys, "$.discovery.probe", "$.discovery.files[0]") {
		require.Contains(t, c.source.positions, key, "a key is missing")
	}
	least, err := Parse("f.yaml", []byte(`discovery:
  dns: [{name: decode.example.svc.cluster.local, role: decode, port: 8200}]
  kubernetes: [{selector: app=vllm, port: 8000}]`))
	require.NoError(t, err)
	for i, want := range least.Discovery.DNS {
		want.Group, want.Barrier, want.Slots = "main", BarrierDP, 32 // of engines
		require.Equal(t, want, c.Discovery.DNS[i])
	}
	for i, want := range least.Discovery.Kubernetes {
		want.Group, want.Barrier, want.Slots = "main", BarrierDP, 32
		require.Equal(t, want, c.Discovery.Kubernetes[i])
	}
}

func TestTheAscendExampleIsWhatItSays(t *testing.T) {
	c, err := Load(filepath.Join(configs, "ascend-a3-pd.yaml"))
	require.NoError(t, err)
	require.Len(t, c.Engines.Prefill, 2)
	require.Len(t, c.Engines.Decode, 16)
	for _, e := range c.Engines.Decode {
		require.Equal(t, "main", e.Group)
		require.Equal(t, BarrierDP, e.Barrier)
		require.Equal(t, 32, e.Slots)
		require.Zero(t, e.Ranks)
	}
	budget, err := c.Profiles[DefaultProfile].HoldBudget()
	require.NoError(t, err)
	require.Equal(t, 360*time.Second, budget)
	text, err := os.ReadFile(filepath.Join(configs, "ascend-a3-pd.yaml"))
	require.NoError(t, err)
	require.Contains(t, string(text), "360 s")
}

func TestTheAggregatedExampleIsWhatItSays(t *testing.T) {
	c, err := Load(filepath.Join(configs, "aggregated.yaml"))
	require.NoError(t, err)
	require.Empty(t, c.Doubts(), "no prefill or decode engine is missing")
	require.Equal(t, []Engine{{
		URL: "http://10.2.0.1:8000", Profile: DefaultAggregated, Group: "10.2.0.1:8000", Barrier: BarrierDP, Cost: 1, Ranks: 8, Slots: 64,
		Budget: 8192, Interval: 2,
	}}, c.Engines.Aggregated)
	p := c.Profiles[DefaultAggregated]
	require.Equal(t, mooncake.None, p.Connector)
	require.Equal(t, mooncake.DPInternal, p.DPMode)
}

func TestAFileOfEnginesMayListAggregatedOnes(t *testing.T) {
	list, err := Default().ParseEngines("e.yaml", []byte("aggregated: [{url: \"http://a:1\", ranks: 2}]"))
	require.NoError(t, err)
	require.Equal(t, []Engine{{URL: "http://a:1", Profile: DefaultAggregated, Group: "a:1", Barrier: BarrierDP, Cost: 1, Ranks: 2}},
		list.Aggregated)
	_, err = Default().ParseEngines("e.yaml", []byte("aggregated: []\nprefer: aggregated"))
	require.ErrorContains(t, err, "prefer: only the config file says")
}

func TestTheGeoExampleIsWhatItSays(t *testing.T) {
	c, err := Load(filepath.Join(configs, "geo.yaml"))
	require.NoError(t, err)
	require.Equal(t, geo.Distributed, c.Geo.Mode)
	require.Equal(t, geo.Self{ID: "us-1", Region: "us-west"}, c.Geo.Self)
	require.Len(t, c.Geo.Peers, 1)
}

func TestTheHAExampleIsWhatItSays(t *testing.T) {
	c, err := Load(filepath.Join(configs, "ha.yaml"))
	require.NoError(t, err)
	require.Equal(t, geo.HAShard, c.HA.Mode)
	require.Equal(t, geo.OwnKubernetes, c.HA.Engine)
	require.NotEmpty(t, c.Geo.Self.ID, "the host's name")
	groups := map[string]bool{}
	for _, e := range c.Engines.Decode {
		groups[e.Group] = true
	}
	require.Len(t, groups, 2)
}

// No proxy of this region owns a decode group of another region, so requests to such an engine
// would be withdrawn from the pool at once.
func TestWithOwnersOfGroupsAnEngineIsOfThisRegion(t *testing.T) {
	file := filepath.Join(configs, "ha.yaml")
	c, err := Load(file)
	require.NoError(t, err)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	alone := Default()
	require.NoError(t, alone.Validate())
	for region, refused := range map[string]bool{"": false, c.Geo.Self.Region: false, "elsewhere": true} {
		for _, role := range Roles {
			e := Engine{URL: "http://e:1", Profile: "ascend", Region: region, Ranks: 1}
			if role == "aggregated" {
				e.Profile = DefaultAggregated
			}
			check := func(err error) {
				if refused {
					require.ErrorContains(t, err, "region: elsewhere is another region than geo.self.region", role)
					return
				}
				require.NoError(t, err, "%s of region %q", role, region)
			}
			_, err := c.CompleteFound(role, e)
			check(err)
			_, err = c.Complete(role, e)
			check(err)
			_, err = Parse(file, fmt.Appendf(text[:len(text):len(text)],
				"\ndiscovery: {dns: [{name: e, role: %s, port: 1, ranks: 1, region: %q}]}\n", role, region))
			check(err)
			_, err = alone.CompleteFound(role, e)
			require.NoError(t, err, "no groups have owners")
		}
	}
}
