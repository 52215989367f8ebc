package gateway_test

import (
	"net/http"
	"slices"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
)

// prepare shapes the cluster so that a request can be caught in the cell's
// phase.
func (c *cell) prepare(o *options) {
	switch {
	case c.act == nil:
	case c.phase == inChoice:
		o.with(func(cfg *config.Config) { cfg.Pool.Size = 1 })
	case c.phase == inPool:
		o.with(func(cfg *config.Config) { cfg.Dispatch.Policy = "prr" })
		for i := range o.decode {
			o.decode[i].Slots = 1
		}
	case c.phase == opened:
		for i := range o.decode {
			o.decode[i].KV.TransferBase, o.decode[i].Steps.C0 = time.Second, 50*time.Millisecond
		}
	}
	if c.setup != nil {
		c.setup(o)
	}
}

// kill ends the engine before the request comes.
func kill(c *cell, k *cluster, q *request) {
	if c.atPrefill() {
		k.killPrefill()
	} else {
		k.killDecode()
	}
	q.send()
}

func (c *cluster) killPrefill() { c.Prefill[0].Kill() }
func (c *cluster) killDecode()  { c.Decode[0].Kill() }

func (c *cluster) drainPrefill() { c.drainOut(c.Prefill[0]) }
func (c *cluster) drainDecode()  { c.drainOut(c.Decode[0]) }

func (c *cluster) drainOut(e *refengine.Engine) {
	c.Helper()
	r := c.Ask(http.MethodPost, c.admin+"/workers/"+refclient.AddressOf(e)+"/drain", `{"deadline":"20ms"}`)
	require.Equal(c, http.StatusNoContent, r.Status, r.Body)
}

// happens lets the cell's fault happen to a request that is in its phase.
func (c *cell) happens(k *cluster, q *request, do func(*cluster)) {
	if do != nil {
		do(k)
	}
	if c.fault == "client gone" {
		q.leave()
		k.Eventually("the proxy notices", func() bool { return slices.Contains(k.Outcomes(), "client_closed") })
	}
}

func whileQueued(do func(*cluster)) func(*cell, *cluster, *request) {
	return func(c *cell, k *cluster, q *request) {
		require.NoError(k, k.Prefill[0].SetFaults(refengine.Rule{Fault: refengine.Hang}))
		_, _ = k.Send(chat("another", ""))
		k.Eventually("the place is taken", func() bool { return k.Prefill[0].Stats().Probes == 1 })
		q.send()
		if c.fault == "deadline" {
			q.then = func() { k.Prefill[0].Kill() }
			return
		}
		k.Eventually("it waits", func() bool { return k.Metric("evenkeel_requests_open") == 2 })
		c.happens(k, q, do)
		q.then = func() { k.Prefill[0].Kill() } // ends the other
	}
}

func whileProbed(do func(*cluster)) func(*cell, *cluster, *request) {
	return func(c *cell, k *cluster, q *request) {
		require.NoError(k, k.Prefill[0].SetFaults(refengine.Rule{Fault: refengine.Slow, DelayMS: 5000}))
		q.send()
		k.Eventually("it is there", func() bool { return k.Prefill[0].Stats().Probes == 1 })
		c.happens(k, q, do)
	}
}

func whilePooled(do func(*cluster)) func(*cell, *cluster, *request) {
	return func(c *cell, k *cluster, q *request) {
		var leave []func()
		for range k.Decode {
			leave = append(leave, k.Endless())
		}
		q.send()
		k.Eventually("it is pooled", func() bool { return k.Metric("evenkeel_pool_entries") == 1 })
		end := func() {
			for _, l := range leave {
				l()
			}
		}
		if c.fault == "deadline" {
			q.then = end
			return
		}
		c.happens(k, q, do)
		end()
	}
}

func whileOpened(do func(*cluster)) func(*cell, *cluster, *request) {
	return func(c *cell, k *cluster, q *request) {
		q.send()
		k.Eventually("the KV is on its way", func() bool { return k.Decode[0].Stats().Waiting == 1 })
		c.happens(k, q, do)
	}
}

func whileStreaming(do func(*cluster)) func(*cell, *cluster, *request) {
	return func(c *cell, k *cluster, q *request) {
		require.NoError(k, k.Decode[0].SetFaults(halting))
		q.send()
		k.Eventually("it is decoded", func() bool { return k.Metric("evenkeel_ttft_seconds_count") == 1 })
		c.happens(k, q, do)
	}
}
