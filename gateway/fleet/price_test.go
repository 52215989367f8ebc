package fleet

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// loaded has 16 prefill and 144 decode engines that are up.
func loaded(t testing.TB) *Fleet {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": {Connector: mooncake.NIXLPull}}
	for i := range 160 {
		e := config.Engine{URL: fmt.Sprintf("http://10.0.0.%d:80", i), Profile: "a"}
		if i < 16 {
			cfg.Engines.Prefill = append(cfg.Engines.Prefill, e)
		} else {
			cfg.Engines.Decode = append(cfg.Engines.Decode, e)
		}
	}
	require.NoError(t, cfg.Validate())
	set := NewSettings(cfg)
	f := empty(t, func() *Settings { return set })
	enter, err := f.Load()
	require.NoError(t, err)
	enter()
	for role, e := range cfg.Engines.All() {
		id, err := config.InstanceID(e.URL)
		require.NoError(t, err)
		f.up(role+" "+id, "m")
	}
	return f
}

// asks is what a request of two legs asks of the fleet.
func asks(t testing.TB, f *Fleet, c string) {
	now := f.Now()
	r, ok, _ := now.Lookup("m")
	doubt, _ := now.KVInDoubt(now.GenerationAt(c))
	if !ok || doubt || !now.OwnsGroupFor(r.Board, "m") || now.LongestContext(c) != 0 || now.RegionFor(c) != "" || now.Rank(7) == nil {
		t.Fatal("it is not up")
	}
}

// What a request asks of the fleet waits for no lock and costs no memory.
func TestAskingTheFleetAllocatesNothing(t *testing.T) {
	f := loaded(t)
	require.Zero(t, testing.AllocsPerRun(100, func() { asks(t, f, "prefill 10.0.0.1:80") }))
}

func BenchmarkWhatARequestAsks(b *testing.B) {
	f := loaded(b)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			asks(b, f, "prefill 10.0.0.1:80")
		}
	})
}
