package fleet_test

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/fleet"
	"evenkeel/mooncake"
)

// A drain that is over as its engine is removed leaves nothing behind; one that
// still has a deadline ends what runs, and then goes, too.
func TestDrainsOfEnginesThatAreRemoved(t *testing.T) {
	t.Parallel()
	b := start(t, options{decode: []refengine.Config{{}, {C0: 50 * time.Millisecond}, {}}})
	first, second := addressOf(b.decode[0]), addressOf(b.decode[1])
	require.NoError(t, b.fleet.Drain(fleet.Decode, first, 0))
	require.NoError(t, b.fleet.Drain(fleet.Decode, addressOf(b.decode[2]), 0))
	got := b.judging("a long story", `"stream":true,"max_tokens":300,`)
	b.eventually("it is decoded", func() bool { return b.decode[1].Stats().Running > 0 && b.metric("evenkeel_ttft_seconds_count") > 0 })
	require.NoError(t, b.fleet.Undrain(fleet.Decode, addressOf(b.decode[2])))
	require.NoError(t, b.fleet.Drain(fleet.Decode, second, 50*time.Millisecond))
	for _, gone := range []string{first, second} {
		require.NoError(t, b.fleet.Remove(fleet.Decode, gone))
	}
	b.eventually("no drain is left", func() bool { return len(b.now().Drains) == 0 })
	<-got
	require.Equal(t, 1.0, b.sum("evenkeel_drained_answers_total"), "the deadline ended it")
}

// A rank of an engine that fronts several is drained alone, and comes back.
func TestOneRankDrains(t *testing.T) {
	t.Parallel()
	b := start(t, options{decode: []refengine.Config{{DPSize: 2, DPMode: "internal"}}, profile: mooncake.Profile{DPMode: mooncake.DPInternal}})
	used := func() map[string]bool {
		before := len(b.records())
		for i := range 8 {
			require.Equal(t, "right", b.judge(fmt.Sprint("story ", before+i), ""))
		}
		b.accounted()
		ranks := map[string]bool{}
		for _, r := range b.records()[before:] {
			ranks[r.Rank] = true
		}
		return ranks
	}
	id := addressOf(b.decode[0])
	require.NoError(t, b.fleet.Drain("", id+"/1", 0), "found without a role")
	require.Equal(t, map[string]bool{id + "/0": true}, used())
	require.Equal(t, "done", b.now().Drains[0].State)
	require.Equal(t, id+"/1", b.now().Drains[0].ID)
	require.NoError(t, b.fleet.Undrain("", id+"/1"))
	require.Empty(t, b.now().Drains)
	require.ErrorIs(t, b.fleet.Undrain("", id+"/1"), fleet.ErrNoSuchEngine, "it does not drain any more")
	require.ErrorIs(t, b.fleet.Drain("", id+"/2", 0), fleet.ErrNoSuchEngine)
	require.NoError(t, b.fleet.Drain("", id+"/0", 0))
	require.NoError(t, b.fleet.Drain("", id+"/1", 0))
	r := b.post(chatPath, chat("a", ""))
	require.Equal(t, http.StatusServiceUnavailable, r.status, "every rank drains")
}

// Prefills under way go to another engine at the deadline, and what a drained
// prefiller has finished is decoded all the same.
func TestADrainedPrefiller(t *testing.T) {
	t.Parallel()
	b := start(t, options{
		prefill: []refengine.Config{{}, {}},
		decode:  []refengine.Config{{Slots: 1, C0: 10 * time.Millisecond}},
	})
	first := addressOf(b.prefill[0])
	require.NoError(t, b.fleet.Drain("", addressOf(b.prefill[1]), 0))
	leave := b.endless()
	got := make(chan string, 2)
	go func() { got <- b.judge("it waits in the pool", `"stream":true,`) }()
	b.eventually("it is prefilled", func() bool { return b.now().Prefill[0].Pooled == 1 })
	require.NoError(t, b.prefill[0].SetFaults(refengine.Rule{Fault: refengine.Hang, Count: 1}))
	go func() { got <- b.judge("its prefill hangs", `"stream":true,`) }()
	b.eventually("it hangs", func() bool { return b.now().Prefill[0].Inflight == 1 })
	require.NoError(t, b.fleet.Undrain("", addressOf(b.prefill[1])))
	require.NoError(t, b.fleet.Drain(fleet.Prefill, first, 20*time.Millisecond))
	b.eventually("the probe is elsewhere", func() bool { return b.prefill[1].Stats().Pins == 1 })
	d := b.now().Drains[0]
	require.Equal(t, []any{"deadline", 0, 1}, []any{d.State, d.Requests, d.Handoffs}, "what is finished is kept")
	require.NotNil(t, d.Deadline)
	leave()
	require.Equal(t, "right", <-got)
	require.Equal(t, "right", <-got)
	b.eventually("it is done", func() bool { return b.now().Drains[0].State == "done" })
}
