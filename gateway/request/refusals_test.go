package request

import (
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// The ways in which ranks share what refuses their requests.
const (
	oneServer  = "a group has one API server"
	ownServers = "each rank has its own API server"
	oneGroup   = "two API servers of one group"
)

// twoGroups are two groups of four ranks that prefill and decode, or one of eight. Requests are
// tried as often as usual, with the usual pauses.
func twoGroups(server string, slots int) setup {
	o := setup{waits: true, configure: func(c *config.Config, _ *Deps) {
		c.Prefill.Retry, c.Dispatch.Policy = config.Default().Prefill.Retry, config.Default().Dispatch.Policy
	}}
	e := refengine.Config{DPSize: 4, DPMode: "internal", Slots: slots}
	switch server {
	case oneServer:
		o.mixed, o.groups = []refengine.Config{e, e}, []string{"one", "other"}
	case oneGroup:
		o.mixed, o.groups = []refengine.Config{e, e}, []string{"one", "one"}
	case ownServers:
		o.mixed = slices.Repeat([]refengine.Config{{Slots: slots}}, 8)
		o.groups = append(slices.Repeat([]string{"one"}, 4), slices.Repeat([]string{"other"}, 4)...)
	}
	return o
}

// half is the first half of the engines, or the second one.
func (b *bed) half(second int) []*refengine.Engine {
	n := len(b.d) / 2
	return b.d[second*n : second*n+n]
}

func (b *bed) says(engines []*refengine.Engine, rules ...refengine.Rule) {
	b.t.Helper()
	for _, e := range engines {
		require.NoError(b.t, e.SetFaults(rules...))
	}
}

func counts(engines []*refengine.Engine) (requests, finished int64) {
	for _, e := range engines {
		requests += e.Stats().Requests
		finished += e.Stats().Finished
	}
	return requests, finished
}

// All ranks of a group refuse whatever they get, because the group is overloaded or what stands
// before it is. The other group is well, and no request fails, however many there are: neither
// where the empty group would be chosen first each time, nor where the other one has no slot to
// spare.
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
				b := start(t, twoGroups(server, 16))
				b.says(b.half(0), rule)
				for i := range 12 {
					require.Equal(t, "right", b.judge(fmt.Sprint("request ", i), `"stream":true,`))
				}
				require.Equal(t, map[string]int{"right": 80}, <-b.judgeAll(80))
				b.says(b.half(0))
				_, was := counts(b.half(0))
				b.eventually("it serves again", func() bool {
					require.Equal(t, "right", b.judge("once more", `"stream":true,`))
					_, now := counts(b.half(0))
					return now > was
				})
				b.settle()
			})
		}
		t.Run(server+", in turn", func(t *testing.T) {
			t.Parallel()
			b := start(t, twoGroups(server, 16))
			for turn := range 6 {
				b.says(b.half(turn%2), refuses[[]string{"503", "429"}[turn/2%2]])
				require.Equal(t, map[string]int{"right": 40}, <-b.judgeAll(40))
				b.says(b.half(turn % 2))
			}
			b.settle()
		})
	}
}

// One group refuses more requests at once than the budget of retries has for all of them. Nothing
// was run, and the other group takes each.
func TestABurstThatAGroupRefusesFailsNoRequest(t *testing.T) {
	t.Parallel()
	for _, server := range []string{oneServer, ownServers, oneGroup} {
		t.Run(server, func(t *testing.T) {
			t.Parallel()
			b := start(t, twoGroups(server, 128))
			b.says(b.half(0), refengine.Rule{Fault: refengine.Busy})
			require.Equal(t, map[string]int{"right": 500}, <-b.judgeAll(500))
			b.settle()
			require.Zero(t, b.metric(t, "evenkeel_prefill_retry_budget_exhausted_total", ""))
		})
	}
}

// One attempt is one, whoever refuses.
func TestWithOneAttemptNothingIsAskedTwice(t *testing.T) {
	t.Parallel()
	o := twoGroups(oneServer, 16)
	o.configure = func(c *config.Config, _ *Deps) { c.Prefill.Retry.Attempts = 1 }
	b := start(t, o)
	b.says(b.d, refengine.Rule{Fault: refengine.Busy})
	require.Equal(t, "503", b.judge("hi", ""))
	b.settle()
	asked, _ := counts(b.d)
	require.EqualValues(t, 1, asked)
}

// Where every group refuses, the client gets the refusal of an engine, and when to come back, after
// some attempts and not more.
func TestWhereEveryGroupRefusesTheClientIsTold(t *testing.T) {
	t.Parallel()
	for _, server := range []string{oneServer, ownServers, oneGroup} {
		t.Run(server, func(t *testing.T) {
			t.Parallel()
			b := start(t, twoGroups(server, 16))
			b.says(b.d, refengine.Rule{Fault: refengine.Throttle, RetryAfter: 1})
			r := b.post(mooncake.Chat.Path(), talk("", "hi"))
			require.Equal(t, http.StatusTooManyRequests, r.status, r.body)
			require.Equal(t, "1", r.header.Get("Retry-After"))
			b.settle()
			asked, _ := counts(b.d)
			require.LessOrEqual(t, asked, int64(6))
		})
	}
}

// The engines of one kind refuse whatever they get, and those of the other kind come second. They
// serve what the first ones refuse.
func TestTheOtherKindServesWhatOneKindRefuses(t *testing.T) {
	t.Parallel()
	for _, first := range []string{config.PreferPD, config.PreferAggregated} {
		for _, fault := range []refengine.Fault{"", refengine.Busy, refengine.Throttle} {
			t.Run(fmt.Sprint(first, ", ", fault), func(t *testing.T) {
				t.Parallel()
				b := start(t, setup{prefill: []refengine.Config{{}}, decode: both, mixed: both, waits: true, second: map[string]string{
					config.PreferPD: config.PreferAggregated, config.PreferAggregated: config.PreferPD,
				}[first]})
				kinds := map[string][]*refengine.Engine{config.PreferPD: b.p, config.PreferAggregated: b.d[2:]}
				if fault != "" {
					b.says(kinds[first], refengine.Rule{Fault: fault})
				}
				for i := range 12 {
					require.Equal(t, "right", b.judge(fmt.Sprint("request ", i), `"stream":true,`))
				}
				if fault == "" {
					for kind, engines := range kinds {
						asked, _ := counts(engines)
						require.Equal(t, kind == first, asked > 0, "where all is well, the preferred kind serves")
					}
				}
				require.Equal(t, map[string]int{"right": 50}, <-b.judgeAll(50))
				b.settle()
			})
		}
	}
}

// The dispatcher may bind a request to a rank of another group than the one that has its lease.
// What this rank fails at is not held against the group of the lease.
func TestAGroupIsNotBlamedForARankOfAnother(t *testing.T) {
	t.Parallel()
	b := start(t, setup{waits: true, mixed: []refengine.Config{{Slots: 4}, {Slots: 4}}, groups: []string{"one", "other"}})
	require.Equal(t, "right", b.judge("the first lease is of one", `"stream":true,`))
	require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.Internal}))
	for i := range 6 {
		require.Equal(t, "right", b.judge(fmt.Sprint("request ", i), `"stream":true,`))
	}
	for _, c := range b.Prefill.Status() {
		if c.ID == "other" {
			require.Zero(t, c.Failures, "its rank has failed at nothing")
		}
	}
	b.settle()
}
