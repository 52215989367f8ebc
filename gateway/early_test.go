package gateway_test

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

const streamed = `"stream":true,`

// early is a proxy in front of engines whose connector wants the decode rank before the prefill.
func early(t *testing.T, connector refengine.Connector, o options) *cluster {
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
