package gateway_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/engine/discover"
	"evenkeel/gateway"
)

// oracle is a source that says what a test says.
type oracle struct {
	mu      sync.Mutex
	list    []discover.Engine
	err     error // instead of the list
	changed chan struct{}
}

func newOracle() *oracle { return &oracle{changed: make(chan struct{}, 1)} }

func (o *oracle) Name() string { return "oracle" }

func (o *oracle) Run(ctx context.Context, tell func([]discover.Engine, error)) {
	for {
		select {
		case <-o.changed:
			o.mu.Lock()
			list, err := append([]discover.Engine{}, o.list...), o.err
			o.mu.Unlock()
			tell(list, err)
		case <-ctx.Done():
			return
		}
	}
}

// say puts engines into the list, or describes them anew; gone takes one out.
func (o *oracle) say(engines ...discover.Engine) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, e := range engines {
		o.drop(e)
		o.list = append(o.list, e)
	}
	o.wake()
}

func (o *oracle) gone(e discover.Engine) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.drop(e)
	o.wake()
}

func (o *oracle) drop(e discover.Engine) {
	kept := o.list[:0]
	for _, old := range o.list {
		if old.Key() != e.Key() {
			kept = append(kept, old)
		}
	}
	o.list = kept
}

func (o *oracle) wake() {
	select {
	case o.changed <- struct{}{}:
	default:
	}
}

// found describes a reference engine as a source would.
func found(e *refengine.Engine, role, incarnation, away string) discover.Engine {
	f := discover.Engine{Role: role, Address: addressOf(e), URL: e.URLs()[0], Incarnation: incarnation, Away: away}
	if role == "decode" {
		f.Slots = e.Config().Slots
	}
	return f
}

func (c *cluster) status(address string) gateway.EngineStatus {
	for _, e := range c.gw.Status(context.Background()).Engines {
		if e.ID == address {
			return e
		}
	}
	return gateway.EngineStatus{}
}

// An engine that fails the request it is tried with is shown as unfit. Where engines are to be found and their source fails, that is
// why there are none.
func TestOperatorsSeeWhatDiscoveryFinds(t *testing.T) {
	t.Parallel()
	o := newOracle()
	c := start(t, options{dirty: true, discover: func(c *cluster) []discover.Source {
		o.say(found(c.prefill[0], "prefill", "p", ""), found(c.decode[0], "decode", "d", ""))
		return []discover.Source{o}
	}})
	bad := c.engine(refengine.Config{Role: refengine.Decode})
	c.decode = append(c.decode, bad)
	require.NoError(t, bad.SetFaults(refengine.Rule{Fault: refengine.Internal}))
	o.say(found(bad, "decode", "", ""))
	c.eventually("the page tells which engine is not used", func() bool {
		return strings.Contains(c.get("/live?once").body, "1 engine of oracle is not used: decode engine "+addressOf(bad))
	})
	require.Contains(t, c.get("/workers").body, `"`+discover.Unfit+`"`)
	o.gone(found(c.prefill[0], "prefill", "p", ""))
	c.eventually("there is no prefill engine", func() bool {
		r := c.get("/readyz")
		return r.status == http.StatusServiceUnavailable && strings.Contains(r.body, "no healthy prefill engine")
	})
	require.NotContains(t, c.get("/readyz").body, "discovery")
	o.mu.Lock()
	o.err = errors.New("pods is forbidden: User \"evenkeel\" cannot list resource \"pods\"")
	o.wake()
	o.mu.Unlock()
	c.eventually("why is told", func() bool {
		return strings.Contains(c.get("/readyz").body, "no healthy prefill engine; discovery by oracle fails: pods is forbidden: User ")
	})
}
