package gateway

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/detect"
	"evenkeel/gateway/receipt"
)

func TestTheConfigOfTheStartIsNoReload(t *testing.T) {
	began := time.UnixMilli(5000)
	require.Zero(t, reloadedMs(began, began))
	require.Equal(t, int64(7000), reloadedMs(time.UnixMilli(7000), began))
}

// A host is named where its engines may be drained: others do the same, and take requests now.
func TestAHostThatFailsIsNamedIfOthersMayTakeOver(t *testing.T) {
	p, d := detect.Engine{ID: "a:7000", Role: "prefill", State: "up"}, detect.Engine{ID: "a:8000", Role: "decode", State: "up"}
	other := func(id, role, state string, drains bool) detect.Engine {
		return detect.Engine{ID: id, Role: role, State: state, Draining: drains}
	}
	for name, tt := range map[string]struct {
		engines []detect.Engine
		want    bool
	}{
		"another host has both":                       {[]detect.Engine{p, d, other("b:7000", "prefill", "up", false), other("b:8000", "decode", "up", false)}, true},
		"others on two hosts":                         {[]detect.Engine{p, d, other("b:7000", "prefill", "up", false), other("c:8000", "decode", "up", false)}, true},
		"it has gone":                                 {[]detect.Engine{other("b:8000", "decode", "up", false)}, false},
		"one host":                                    {[]detect.Engine{p, d, other("a:8001", "decode", "up", false)}, false},
		"the other host prefills only":                {[]detect.Engine{d, other("b:7000", "prefill", "up", false)}, false},
		"nobody else prefills":                        {[]detect.Engine{p, d, other("b:8000", "decode", "up", false)}, false},
		"the other is down":                           {[]detect.Engine{d, other("b:8000", "decode", "down", false)}, false},
		"the other drains":                            {[]detect.Engine{d, other("b:8000", "decode", "up", true)}, false},
		"another proxy owns the other":                {[]detect.Engine{d, {ID: "b:8000", Role: "decode", State: "up", OwnedByOther: true}}, false},
		"one other is down and another one is not":    {[]detect.Engine{d, other("b:8000", "decode", "down", false), other("c:8000", "decode", "up", false)}, true},
		"the others of the same host are down anyway": {[]detect.Engine{d, other("a:8001", "decode", "down", false), other("b:8000", "decode", "up", false)}, true},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tt.want, hasStandIns(tt.engines, "a")) })
	}
}

func TestAnEngineWithManyAdaptersHasFewNames(t *testing.T) {
	many := make([]string, 3000)
	for i := range many {
		many[i] = strings.Repeat("x", 20)
	}
	many[0] = "base"
	got := firstModels(many)
	require.Len(t, got, mostModelsNamed+1)
	require.Equal(t, "base", got[0])
	require.Equal(t, "other", got[mostModelsNamed])
	require.Equal(t, many[:mostModelsNamed], firstModels(many[:mostModelsNamed]))
}

func TestWhoWaitsIsSortedAndBounded(t *testing.T) {
	want := []detect.Waiting{{Key: "f", Requests: 6}, {Key: "e", Requests: 5}, {Requests: 4}, {Key: "a", Requests: 3}, {Key: "b", Requests: 3},
		{Requests: 2}}
	require.Equal(t, want, waitingOf(map[string]receipt.Load{
		"a": {Waiting: 3}, "b": {Waiting: 3}, "c": {Waiting: 1}, "d": {Waiting: 1}, "e": {Waiting: 5}, "f": {Waiting: 6}, "": {Waiting: 4}, "g": {Prompts: 1},
	}))
	require.Empty(t, waitingOf(nil))
}

func TestTheHeaviestKey(t *testing.T) {
	require.Nil(t, heaviestKey(nil))
	require.Nil(t, heaviestKey(map[string]receipt.Load{"a": {Waiting: 3}}))
	require.Equal(t, &detect.Heaviest{Key: "b", Share: 0.75, Mean: 30_000},
		heaviestKey(map[string]receipt.Load{"a": {Prompts: 20, Tokens: 20_000}, "b": {Prompts: 2, Tokens: 60_000}}))
}

// A proxy in front of an embedding model alone is ready without a prefill engine. Nothing of it is
// started here.
func TestAProxyWithoutPrefillEnginesIsReady(t *testing.T) {
	cfg := config.Default()
	cfg.Engines.Decode = []config.Engine{{URL: "http://127.0.0.1:9", Slots: 1}}
	require.NoError(t, cfg.Validate())
	g, err := New(cfg, zap.NewNop())
	require.NoError(t, err)
	t.Cleanup(g.discard)
	enter, err := g.fleet.Load()
	require.NoError(t, err)
	enter()
	ready := func(up bool) (bool, string) {
		g.fleet.OnStatus("decode 127.0.0.1:9", engine.Status{Up: up, Models: []engine.Model{{ID: "emb"}}})
		return g.Ready()
	}
	for _, up := range []bool{false, true, false} {
		ok, why := ready(up)
		require.Equal(t, up, ok)
		require.Equal(t, up, why == "", why)
	}
}
