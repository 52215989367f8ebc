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

// An engine that never answers in one piece is not waited for without end, even if the time was over before there was a connection.
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

// frees is a prefill engine that has given a hand-off away when it is asked.
type frees struct{ told }

func (frees) Expired(string) (float64, bool)                     { return 0, true }
func (frees) ExpiredNow(context.Context, string) (float64, bool) { return 1, true }

// Wrong KV that a rank has cached may also be found by a request that the rank had in its queue by then, with the same salt.
func TestWhatWaitsBesideARefutedHandOffIsNotBelieved(t *testing.T) {
	_, lease := leased(t)
	liveness, now := new(engine.Traffic).Liveness(0), time.Now()
	refuted := liveness.AddPull(now, mooncake.HeldUntil(now))
	pulls := liveness.AddPull(now, mooncake.HeldUntil(now.Add(time.Hour)))
	h := &Handoff{Lease: lease}
	h.NoteExpiries(&frees{})
	require.True(t, refuted.RecordFirstEvent(now))
	require.True(t, h.MayHaveExpired(t.Context(), &frees{}, refuted, now.Add(time.Second)))
	refuted.End()
	later := liveness.AddPull(now, mooncake.HeldUntil(now.Add(time.Hour)))
	require.NotEqual(t, pulls.Salt(), later.Salt())
	require.False(t, pulls.RecordFirstEvent(now.Add(2*time.Second)), "it has the salt of the wrong KV")
	require.True(t, later.RecordFirstEvent(now.Add(2*time.Second)))
}

func TestARankMayComputeABlockBesideAHandOff(t *testing.T) {
	for block, want := range map[int64]int64{0: 128, 16: 128, 256: 256, 1056: 1056} {
		require.Equal(t, want, MostComputed(&roster.Rank{BlockTokens: block}), "blocks of %d", block)
	}
}
