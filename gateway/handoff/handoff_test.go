package handoff

import (
	"context"
	"encoding/json"
	"math"
	"net"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// The params of a hand-off that an engine refused may go to another rank, but
// not after the deadline: what is pulled then may be somebody else's.
func TestParamsAreNotTakenAfterTheDeadline(t *testing.T) {
	now := time.Now()
	kv := json.RawMessage(`{"block":1}`)
	fresh := func() *Handoff {
		return &Handoff{Handoff: mooncake.NewHandoff(kv, now.Add(time.Second), now.Add(2*time.Second))}
	}
	h := fresh()
	for range 2 { // ranks
		got, err := h.TakeParams(now.Add(time.Second - 1))
		require.NoError(t, err)
		require.Equal(t, kv, got)
	}
	_, err := h.TakeParams(now.Add(time.Second))
	require.ErrorIs(t, err, mooncake.ErrExpired, "taken before")
	_, err = fresh().TakeParams(now.Add(time.Second))
	require.ErrorIs(t, err, mooncake.ErrExpired, "not taken yet")
}

// The limits of an answer may allow more tokens than a time.Duration has seconds.
func TestAnAnswerOfVeryManyTokensIsWaitedFor(t *testing.T) {
	settings := fleet.NewSettings(config.Default())
	now := time.Now()
	r := &roster.Rank{Signs: new(engine.Traffic).Liveness(0)}
	for _, tokens := range []int{1 << 20, 1 << 34, math.MaxInt} {
		require.Equal(t, settings.Limits.ProbeTimeout, RemainingWait(r, settings, now, tokens, now), "%d tokens", tokens)
	}
}

// An engine that never answers in one piece is not waited for without end, even if the time was
// over before there was a connection.
func TestAWaitForAWholeAnswerThatIsOverTooEarlyEnds(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0") // nobody accepts, and nothing is answered
	require.NoError(t, err)
	defer func() { require.NoError(t, ln.Close()) }()
	client := engine.NewClient(engine.Options{})
	defer client.Close()
	call := client.NewCall(&engine.Target{ID: "d", URL: &url.URL{Scheme: "http", Host: ln.Addr().String()}, Rank: -1})
	c := config.Default()
	c.Limits.ProbeTimeout = time.Millisecond
	defer LimitOnePiece(&roster.Rank{Signs: engine.NewLiveness()}, call, fleet.NewSettings(c), 0)()
	time.Sleep(50 * time.Millisecond) // the time is over
	_, err = call.Do("POST", "/v1/completions", nil, nil, engine.Deadlines{})
	require.True(t, engine.WasSilent(err), "%v", err)
}

// counts is a prefill engine that says how many hand-offs it has freed unfetched: when it is read,
// and when it is asked.
type counts struct {
	told
	before, now engine.Expiries
}

func (c *counts) Expiries(string) engine.Expiries                     { return c.before }
func (c *counts) ExpiriesNow(context.Context, string) engine.Expiries { return c.now }

// Up to the end of its hold, KV is there. After that an answer in one piece is believed if the
// prefill engine has freed nothing, as far as it is known to count.
func TestThePrefillEnginesCountSaysWhetherKVWasFreed(t *testing.T) {
	known := engine.Expiries{HandOffs: 3, Start: 100, Known: true}
	more, restarted := known, known
	more.HandOffs, restarted.Start = 4, 200
	for _, row := range []struct {
		name        string
		before, now engine.Expiries
		gone        bool
		want        mooncake.Freed
	}{
		{"nothing was freed", known, known, false, mooncake.FreedNone},
		{"something was", known, more, false, mooncake.FreedSome},
		{"another process counts", known, restarted, false, mooncake.FreedSome},
		{"another process may count", known, known, true, mooncake.FreedSome},
		{"the count cannot be read any more", known, engine.Expiries{}, false, mooncake.FreedSome},
		{"it could not be read before", engine.Expiries{}, known, false, mooncake.FreedSome},
		{"the engine does not count", engine.Expiries{}, engine.Expiries{}, false, mooncake.FreedUnknown},
	} {
		t.Run(row.name, func(t *testing.T) {
			h := &Handoff{Lease: &prefill.Lease{Candidate: prefill.Candidate{Instance: "prefill p"}}}
			m := &counts{before: row.before, now: row.now}
			h.NoteExpiries(m)
			require.Equal(t, row.want, h.FreedSince(t.Context(), m, outlives{gone: row.gone}))
		})
	}
}

// outlives are engines of which a process may be gone.
type outlives struct {
	Engines
	gone bool
}

func (o outlives) KVInDoubt(roster.Generation) (inDoubt, gone bool) { return o.gone, false }

func TestARankMayComputeABlockBesideAHandOff(t *testing.T) {
	for block, want := range map[int64]int64{0: 128, 16: 128, 256: 256, 1056: 1056} {
		require.Equal(t, want, MostComputed(&roster.Rank{BlockTokens: block}), "blocks of %d", block)
	}
}
