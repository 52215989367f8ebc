package gateway_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/engine/discover"
	"evenkeel/gateway"
)

func (c *cluster) status(address string) gateway.EngineStatus {
	for _, e := range c.gw.Status(context.Background()).Engines {
		if e.ID == address {
			return e
		}
	}
	return gateway.EngineStatus{}
}

// An engine that fails the request it is tried with is shown as unfit. Where engines are to be
// found and their source fails, that is why there are none.
func TestOperatorsSeeWhatDiscoveryFinds(t *testing.T) {
	t.Parallel()
	o := refclient.NewOracle()
	c := start(t, options{dirty: true, discover: func(c *cluster) []discover.Source {
		o.Say(refclient.Found(c.Prefill[0], "prefill", "p", ""), refclient.Found(c.Decode[0], "decode", "d", ""))
		return []discover.Source{o}
	}})
	bad := c.Engine(refengine.Config{Role: refengine.Decode})
	c.Decode = append(c.Decode, bad)
	require.NoError(t, bad.SetFaults(refengine.Rule{Fault: refengine.Internal}))
	o.Say(refclient.Found(bad, "decode", "", ""))
	c.Eventually("the page tells which engine is not used", func() bool {
		return strings.Contains(c.get("/live?once").Body, "1 engine of oracle is not used: decode engine "+refclient.AddressOf(bad))
	})
	require.Contains(t, c.get("/workers").Body, `"`+discover.Unfit+`"`)
	o.Gone(refclient.Found(c.Prefill[0], "prefill", "p", ""))
	c.Eventually("there is no prefill engine", func() bool {
		r := c.get("/readyz")
		return r.Status == http.StatusServiceUnavailable && strings.Contains(r.Body, "no healthy prefill engine")
	})
	require.NotContains(t, c.get("/readyz").Body, "discovery")
	o.Fails(errors.New("pods is forbidden: User \"evenkeel\" cannot list resource \"pods\""))
	c.Eventually("why is told", func() bool {
		return strings.Contains(c.get("/readyz").Body, "no healthy prefill engine; discovery by oracle fails: pods is forbidden: User ")
	})
}
