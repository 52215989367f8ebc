package fleet_test

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// A drain that is over as its engine is removed leaves nothing behind; one that
// still has a deadline ends what runs, and then goes, too.
func TestDrainsOfEnginesThatAreRemoved(t *testing.T) {
	t.Parallel()
	b := start(t, options{decode: []refengine.Config{{}, {Steps: refengine.Steps{C0: 50 * time.Millisecond}}, {}}})
	first, second := refclient.AddressOf(b.Decode[0]), refclient.AddressOf(b.Decode[1])
	require.NoError(t, b.fleet.Drain(roster.Decode, first, 0))
	require.NoError(t, b.fleet.Drain(roster.Decode, refclient.AddressOf(b.Decode[2]), 0))
	got := b.Judging("a long story", `"stream":true,"max_tokens":300,`)
	b.Eventually("it is decoded", func() bool { return b.Decode[1].Stats().Running > 0 && b.Metric("evenkeel_ttft_seconds_count") > 0 })
	require.NoError(t, b.fleet.Undrain(roster.Decode, refclient.AddressOf(b.Decode[2])))
	require.NoError(t, b.fleet.Drain(roster.Decode, second, 50*time.Millisecond))
	for _, gone := range []string{first, second} {
		require.NoError(t, b.fleet.Remove(roster.Decode, gone))
	}
	b.Eventually("no drain is left", func() bool { return len(b.now().Drains) == 0 })
	<-got
	require.Equal(t, 1.0, b.Sum("evenkeel_drained_answers_total"), "the deadline ended it")
}

// A rank of an engine that fronts several is drained alone, and comes back.
func TestOneRankDrains(t *testing.T) {
	t.Parallel()
	b := start(t, options{decode: []refengine.Config{{DPSize: 2, DPMode: "internal"}}, profile: mooncake.Profile{DPMode: mooncake.DPInternal}})
	used := func() map[string]bool {
		before := len(b.Records())
		for i := range 8 {
			require.Equal(t, "right", b.Judge(fmt.Sprint("story ", before+i), ""))
		}
		b.Accounted()
		ranks := map[string]bool{}
		for _, r := range b.Records()[before:] {
			ranks[r.Rank] = true
		}
		return ranks
	}
	id := refclient.AddressOf(b.Decode[0])
	require.NoError(t, b.fleet.Drain("", id+"/1", 0), "found without a role")
	require.Equal(t, map[string]bool{id + "/0": true}, used())
	require.Equal(t, "done", b.now().Drains[0].State)
	require.Equal(t, id+"/1", b.now().Drains[0].ID)
	require.NoError(t, b.fleet.Undrain("", id+"/1"))
	require.Empty(t, b.now().Drains)
	require.ErrorIs(t, b.fleet.Undrain("", id+"/1"), roster.ErrNoSuchEngine, "it does not drain any more")
	require.ErrorIs(t, b.fleet.Drain("", id+"/2", 0), roster.ErrNoSuchEngine)
	require.NoError(t, b.fleet.Drain("", id+"/0", 0))
	require.NoError(t, b.fleet.Drain("", id+"/1", 0))
	r := b.Post(refclient.ChatPath, chat("a", ""))
	require.Equal(t, http.StatusServiceUnavailable, r.Status, "every rank drains")
}

// Prefills under way go to another engine at the deadline, and what a drained
// prefiller has finished is decoded all the same.
func TestADrainedPrefiller(t *testing.T) {
	t.Parallel()
	b := start(t, options{
		prefill: []refengine.Config{{}, {}},
		decode:  []refengine.Config{{Slots: 1, Steps: refengine.Steps{C0: 10 * time.Millisecond}}},
	})
	first := refclient.AddressOf(b.Prefill[0])
	require.NoError(t, b.fleet.Drain("", refclient.AddressOf(b.Prefill[1]), 0))
	leave := b.Endless()
	got := make(chan string, 2)
	go func() { got <- b.Judge("it waits in the pool", `"stream":true,`) }()
	b.Eventually("it is prefilled", func() bool { return b.now().Prefill[0].Pooled == 1 })
	require.NoError(t, b.Prefill[0].SetFaults(refengine.Rule{Fault: refengine.Hang, Count: 1}))
	go func() { got <- b.Judge("its prefill hangs", `"stream":true,`) }()
	b.Eventually("it hangs", func() bool { return b.Prefill[0].Stats().Probes == 3 }) // behind the endless one and the one that waits
	require.NoError(t, b.fleet.Undrain("", refclient.AddressOf(b.Prefill[1])))
	require.NoError(t, b.fleet.Drain(roster.Prefill, first, 20*time.Millisecond))
	b.Eventually("the probe is elsewhere", func() bool { return b.Prefill[1].Stats().Pins == 1 })
	d := b.now().Drains[0]
	require.Equal(t, []any{"deadline", 0, 1}, []any{d.State, d.Requests, d.Handoffs}, "what is finished is kept")
	require.NotNil(t, d.Deadline)
	leave()
	require.Equal(t, "right", <-got)
	require.Equal(t, "right", <-got)
	b.Eventually("it is done", func() bool { return b.now().Drains[0].State == "done" })
}
