package fleet_test

import (
	"fmt"
	"net/url"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// early is a proxy in front of engines whose connector wants the decode rank before the prefill.
func early(t *testing.T, connector refengine.Connector, o options) *bed {
	t.Helper()
	if o.prefill == nil {
		o.prefill = []refengine.Config{{}}
	}
	if o.decode == nil {
		o.decode = []refengine.Config{{DPSize: 2}}
	}
	for i := range o.prefill {
		o.prefill[i].Connector = connector
	}
	for i := range o.decode {
		o.decode[i].Connector = connector
	}
	configure := o.configure
	o.configure = func(cfg *config.Config) {
		u, err := url.Parse(cfg.Engines.Prefill[0].URL)
		require.NoError(t, err)
		p := cfg.Profiles[config.DefaultProfile]
		p.Connector = string(connector)
		if connector == refengine.NIXLPush {
			p.Bind = mooncake.BindArrival
		}
		if p.BootstrapPort, err = strconv.Atoi(u.Port()); connector != refengine.SGLang {
			p.BootstrapPort = 0
		}
		require.NoError(t, err)
		for i := range cfg.Engines.Prefill { // a reference engine's rooms are at its own port
			if connector == refengine.SGLang && i > 0 {
				name, q := fmt.Sprintf("p%d", i), p
				u, err := url.Parse(cfg.Engines.Prefill[i].URL)
				require.NoError(t, err)
				q.BootstrapPort, err = strconv.Atoi(u.Port())
				require.NoError(t, err)
				cfg.Profiles[name] = q
				cfg.Engines.Prefill[i].Profile = name
			}
		}
		cfg.Profiles[config.DefaultProfile] = p
		cfg.SelfTest = false
		if connector == refengine.AscendLayerwise {
			cfg.Bind.Listen = "127.0.0.1:0"
		}
		if configure != nil {
			configure(cfg)
		}
	}
	return start(t, o)
}

// A prefill engine that restarts is another one to decode engines.
func TestAPrefillEngineThatRestartsIsNamedAnew(t *testing.T) {
	t.Parallel()
	for _, connector := range earlyConnectors {
		t.Run(string(connector), func(t *testing.T) {
			t.Parallel()
			b := early(t, connector, options{dirty: true})
			require.Equal(t, "right", b.judge("one two", `"stream":true,`))
			require.Equal(t, "right", b.judge("one two three", `"stream":true,`))
			b.prefill[0].Kill()
			require.NoError(t, b.prefill[0].Revive())
			b.eventually("it is served again", func() bool { return b.judge("four five six", `"stream":true,`) == "right" })
			require.Equal(t, "right", b.judge("seven eight", `"stream":true,`))
		})
	}
}

var earlyConnectors = []refengine.Connector{refengine.AscendLayerwise, refengine.SGLang, refengine.NIXLPush}
