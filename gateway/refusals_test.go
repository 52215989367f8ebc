package gateway_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
)

// twoGroups are two groups of four ranks that prefill and decode.
func twoGroups(server string) options {
	o := together(func(cfg *config.Config) {
		cfg.Prefill.Retry = config.Default().Prefill.Retry // the usual tries, with the usual pauses
		for i := range cfg.Engines.Aggregated {
			e := &cfg.Engines.Aggregated[i]
			e.Group, e.Barrier = []string{"one", "other"}[i*2/len(cfg.Engines.Aggregated)], config.BarrierDP
			if server == oneGroup {
				e.Group = "one"
			}
		}
	})
	o.mixed[0].DPSize = 4
	if server != ownServers {
		o.mixed[0].DPMode = "internal"
	}
	o.mixed = append(o.mixed, o.mixed[0])
	return o
}

// The ways in which ranks share what refuses their requests.
const (
	oneServer  = "a group has one API server"
	ownServers = "each rank has its own API server"
	oneGroup   = "two API servers of one group"
)

// All ranks of a group refuse whatever they get, because the group is overloaded or what stands before it is. The other group is well,
// and no request fails, however many there are: neither where the empty group would be chosen first each time, nor
// where the other one has no slot to spare.
func TestAGroupThatRefusesFailsNoRequest(t *testing.T) {
	t.Parallel()
	refuses := map[string]refengine.Rule{
		"503":                       {Fault: refengine.Busy},
		"429":                       {Fault: refengine.Throttle},
		"429 that says how long":    {Fault: refengine.Throttle, RetryAfter: 1},
		"503 of its first requests": {Fault: refengine.Busy, Count: 3},
	}
	for _, server := range []string{oneServer, ownServers, oneGroup} {
		for name, rule := range refuses {
			t.Run(server+", "+name, func(t *testing.T) {
				t.Parallel()
				c := start(t, twoGroups(server))
				require.NoError(t, c.decode[0].SetFaults(rule))
				for i := range 12 {
					require.Equal(t, "right", c.judge(fmt.Sprint("request ", i), streamed))
				}
				require.Equal(t, map[string]int{"right": 200}, c.judgeAll(200, streamed))
				require.NoError(t, c.decode[0].SetFaults())
				was := c.decode[0].Stats().Finished
				c.eventually("it serves again", func() bool {
					require.Equal(t, "right", c.judge("once more", streamed))
					return c.decode[0].Stats().Finished > was
				})
			})
		}
		t.Run(server+", in turn", func(t *testing.T) {
			t.Parallel()
			c := start(t, twoGroups(server))
			stop := c.keepAsking(40)
			for turn := range 6 {
				was := c.decode[1-turn%2].Stats().Finished
				require.NoError(t, c.decode[turn%2].SetFaults(refuses[[]string{"503", "429"}[turn/2%2]]))
				c.eventually("the other one serves", func() bool { return c.decode[1-turn%2].Stats().Finished > was+200 })
				require.NoError(t, c.decode[turn%2].SetFaults())
			}
			stop()
		})
	}
}

// One group refuses more requests at once than the budget of retries has for all of them. Nothing was run, and the other group takes each.
func TestABurstThatAGroupRefusesFailsNoRequest(t *testing.T) {
	t.Parallel()
	for _, server := range []string{oneServer, ownServers, oneGroup} {
		t.Run(server, func(t *testing.T) {
			t.Parallel()
			o := twoGroups(server)
			for i := range o.mixed {
				o.mixed[i].Slots = 128
			}
			c := start(t, o)
			require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Busy}))
			require.Equal(t, map[string]int{"right": 1000}, c.judgeAll(1000, streamed))
			require.Zero(t, c.metric("evenkeel_prefill_retry_budget_exhausted_total"))
		})
	}
}

// One attempt is one, whoever refuses.
func TestWithOneAttemptNothingIsAskedTwice(t *testing.T) {
	t.Parallel()
	o := twoGroups(oneServer)
	configure := o.configure
	o.configure = func(cfg *config.Config) {
		configure(cfg)
		cfg.Prefill.Retry.Attempts = 1
	}
	c := start(t, o)
	for _, e := range c.decode {
		require.NoError(t, e.SetFaults(refengine.Rule{Fault: refengine.Busy}))
	}
	asked := func() int64 { return c.decode[0].Stats().Requests + c.decode[1].Stats().Requests }
	was := asked()
	require.Equal(t, http.StatusServiceUnavailable, c.post(chatPath, talk("", "hi")).status)
	require.EqualValues(t, 1, asked()-was)
}

// Where every group refuses, the client gets the refusal of an engine, and when to come back, after some attempts and not more.
func TestWhereEveryGroupRefusesTheClientIsTold(t *testing.T) {
	t.Parallel()
	for _, server := range []string{oneServer, ownServers, oneGroup} {
		t.Run(server, func(t *testing.T) {
			t.Parallel()
			c := start(t, twoGroups(server))
			for _, e := range c.decode {
				require.NoError(t, e.SetFaults(refengine.Rule{Fault: refengine.Throttle, RetryAfter: 1}))
			}
			asked := func() int64 { return c.decode[0].Stats().Requests + c.decode[1].Stats().Requests }
			was := asked()
			r := c.post(chatPath, talk("", "hi"))
			require.Equal(t, http.StatusTooManyRequests, r.status, r.body)
			require.Equal(t, "1", r.header.Get("Retry-After"))
			require.LessOrEqual(t, asked()-was, int64(6))
		})
	}
}

// The engines of one kind refuse whatever they get, and those of the other kind come second. They serve what the first ones refuse.
func TestTheOtherKindServesWhatOneKindRefuses(t *testing.T) {
	t.Parallel()
	for name, refuses := range map[string]func(c *cluster) []*refengine.Engine{
		config.PreferAggregated: func(c *cluster) []*refengine.Engine { return c.decode[1:] },
		config.PreferPD:         func(c *cluster) []*refengine.Engine { return c.prefill },
	} {
		for _, fault := range []refengine.Fault{refengine.Busy, refengine.Throttle} {
			t.Run(fmt.Sprint(name, ", ", fault), func(t *testing.T) {
				t.Parallel()
				o := together(func(cfg *config.Config) { cfg.Engines.Prefer = name })
				o.prefill, o.decode = []refengine.Config{{}}, []refengine.Config{{DPSize: 2}}
				c := start(t, o)
				for _, e := range refuses(c) {
					require.NoError(t, e.SetFaults(refengine.Rule{Fault: fault}))
				}
				for i := range 12 {
					require.Equal(t, "right", c.judge(fmt.Sprint("request ", i), streamed))
				}
				require.Equal(t, map[string]int{"right": 50}, c.judgeAll(50, streamed))
			})
		}
	}
}
