package config

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestDiff(t *testing.T) {
	const base = `
profiles: {ascend: {kv_hold_timeout: 480s}}
engines:
  prefill: [{url: "http://p:1"}]
  decode: [{url: "http://d:1", slots: 8}, {url: "http://d:2", slots: 8}]
`
	for _, row := range []struct {
		name, old, new string
		want           []string
	}{
		{"the same in other words is no change", base, "pool: {size: 1024}\ndispatch: {}\n" + base, nil},
		{"a value", base, base + "pool: {size: 5}\n", []string{"pool.size: 1024 -> 5"}},
		{"a duration", base, base + "pool: {ttl: 1500ms}\n", []string{"pool.ttl: 0s -> 1.5s"}},
		{"a list", base, base + "limits: {media_hosts: [a, b]}\n", []string{"limits.media_hosts: [] -> [a, b]"}},
		{"an engine's key, wherever the engine stands", base, `
engines:
  prefill: [{url: "http://p:1"}]
  decode: [{url: "http://d:2", slots: 9}, {url: "http://d:1", slots: 8}]
`, []string{"engines.decode[d:2].slots: 8 -> 9"}},
		{"engines that come and go", base, `
engines:
  prefill: [{url: "http://p:1"}, {url: "http://p:2"}]
  decode: [{url: "http://d:1", slots: 8}]
`, []string{
			`engines.prefill[p:2]: "" -> {url: http://p:2, profile: ascend}`,
			`engines.decode[d:2]: {url: http://d:2, profile: ascend, group: main, barrier: dp, slots: 8, cost: 1} -> ""`,
		}},
		{"a profile's key", base, "profiles: {ascend: {kv_hold_timeout: 240s, reject_releases: true}}\n" +
			base[len("\nprofiles: {ascend: {kv_hold_timeout: 480s}}\n"):], []string{
			"profiles.ascend.kv_hold_timeout: 8m0s -> 4m0s", `profiles.ascend.reject_releases: "" -> true`,
		}},
		{"what needs a restart is marked", base, base + "listen: \":1\"\nlimits: {body_bytes: 9, probe_timeout: 1m}\n", []string{
			"listen: :8000 -> :1 (needs a restart)", "limits.body_bytes: 33554432 -> 9 (needs a restart)", "limits.probe_timeout: 10m0s -> 1m0s",
		}},
		{"TLS that begins needs a restart", base, base + "tls: {cert_file: a, key_file: b}\n", []string{
			`tls.cert_file: "" -> a (needs a restart)`, `tls.key_file: "" -> b (needs a restart)`,
		}},
		{"another certificate does not", base + "tls: {cert_file: a, key_file: b}\n", base + "tls: {cert_file: c, key_file: b}\n", []string{"tls.cert_file: a -> c"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			a, err := Parse("a.yaml", []byte(row.old))
			require.NoError(t, err)
			b, err := Parse("b.yaml", []byte(row.new))
			require.NoError(t, err)
			_, changes, err := a.MergeReload(b)
			require.NoError(t, err)
			var got []string
			for _, c := range changes {
				got = append(got, c.String())
			}
			require.Equal(t, row.want, got)
		})
	}
}

// A listener that stays open to the network must not lose its token over a file
// that would have it listen here only.
func TestAReloadKeepsWhatBelongsTogether(t *testing.T) {
	a, err := Parse("a.yaml", []byte("admin: {listen: \":9090\", token_file: t}\n"))
	require.NoError(t, err)
	b, err := Parse("b.yaml", []byte("admin: {listen: \"127.0.0.1:9090\"}\n"))
	require.NoError(t, err)
	_, _, err = a.MergeReload(b)
	require.ErrorContains(t, err, "need a restart")
	require.ErrorContains(t, err, "admin.listen")
}

// The policy that a file leaves open depends on the other regions, of which a proxy knows only
// after a restart.
func TestAReloadChoosesNoPolicyForRegionsThatNeedARestart(t *testing.T) {
	const (
		engines = "engines: {prefill: [{url: http://b0:1}], decode: [{url: http://b0:1}]}\n"
		geo     = "geo: {mode: distributed, hmac: {keys_file: keys}, self: {id: e1, region: east}, " +
			"peers: [{id: w1, region: west, url: http://w:1}]}\n"
	)
	alone, err := Parse("a.yaml", []byte(engines))
	require.NoError(t, err)
	together, err := Parse("b.yaml", []byte(engines+geo))
	require.NoError(t, err)
	require.Equal(t, []string{"finish", "lmetric"}, []string{alone.Prefill.Policy, together.Prefill.Policy})
	for _, row := range []struct{ running, next *Config }{{alone, together}, {together, alone}} {
		merged, changes, err := row.running.MergeReload(row.next)
		require.NoError(t, err)
		require.Equal(t, row.running.Geo.On(), merged.Geo.On())
		require.Equal(t, row.running.Prefill.Policy, merged.Prefill.Policy)
		for _, c := range changes {
			require.True(t, c.Restart, c.String())
		}
	}
	written, err := Parse("b.yaml", []byte(engines+geo+"prefill: {policy: lmetric}\n"))
	require.NoError(t, err)
	merged, _, err := alone.MergeReload(written)
	require.NoError(t, err)
	require.Equal(t, "lmetric", merged.Prefill.Policy, "the file has it, so no restart is needed")
}

// Of any two configs the merged one differs from the next by what needs a
// restart, and from the running one by all else.
func TestMergeReloadLosesNothing(t *testing.T) {
	draw := func(t *rapid.T, name string) *Config {
		c := Default()
		c.Listen = rapid.SampledFrom([]string{":1", ":2"}).Draw(t, name+"listen")
		c.Limits.Body = rapid.IntRange(1, 2).Draw(t, name+"body")
		c.Limits.EventBytes = rapid.IntRange(1, 2).Draw(t, name+"event")
		c.Pool.Size = rapid.IntRange(1, 2).Draw(t, name+"size")
		c.Dispatch.Policy = rapid.SampledFrom([]string{"br0", "jsq"}).Draw(t, name+"policy")
		for _, u := range rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"http://a:1", "http://b:1", "http://c:1"}), 0, 3, rapid.ID).Draw(t,
			name+"decode") {
			c.Engines.Decode = append(c.Engines.Decode, Engine{URL: u, Slots: rapid.IntRange(1, 2).Draw(t, "slots")})
		}
		require.NoError(t, c.Validate())
		return c
	}
	rapid.Check(t, func(t *rapid.T) {
		running, next := draw(t, "running "), draw(t, "next ")
		merged, changes, err := running.MergeReload(next)
		require.NoError(t, err)
		var restart, now []Change
		for _, c := range changes {
			if c.Restart {
				c.Restart = false
				restart = append(restart, c)
			} else {
				now = append(now, c)
			}
		}
		require.Equal(t, restart, Diff(merged, next))
		require.Equal(t, now, Diff(running, merged))
	})
}

func FuzzDiff(f *testing.F) {
	f.Add([]byte("pool: {size: 1}\n"), []byte("engines: {decode: [{url: \"http://a:1\"}]}\n"))
	f.Add([]byte("geo: {mode: off}\n"), []byte("profiles: {x: {}}\n"))
	f.Fuzz(func(t *testing.T, x, y []byte) {
		a, err := Parse("a.yaml", x)
		if err != nil {
			return
		}
		b, err := Parse("b.yaml", y)
		if err != nil {
			return
		}
		require.Empty(t, Diff(a, a))
		require.Len(t, Diff(b, a), len(Diff(a, b)))
		if m, _, err := a.MergeReload(b); err == nil {
			_, changes, err := m.MergeReload(b)
			require.NoError(t, err)
			for _, c := range changes {
				require.True(t, c.Restart, c.String())
			}
		}
	})
}
