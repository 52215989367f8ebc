package ledger

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// prompts charges and releases prompts of a thousand tokens on an account, one a second.
type prompts struct {
	*EngineLoad
	now  time.Time
	held []*InFlight
}

func newPrompts(t *testing.T) *prompts {
	t.Helper()
	e := New(Config{KVThreshold: 0.9, Interval: time.Second}).NewLoad("p0")
	p := &prompts{EngineLoad: &e, now: time.Unix(1000, 0)}
	p.SetCapacity(100_000, p.now)
	return p
}

func (p *prompts) charge(tokens int64) {
	f := &InFlight{}
	p.Charge(f, Weight{Tokens: tokens}, nil, p.now)
	p.held = append(p.held, f)
}

func (p *prompts) release() {
	p.held[0].Release(p.now)
	p.held = p.held[1:]
}

// turn over a thousand tokens a second, for so many seconds.
func (p *prompts) turnOver(seconds int) {
	for range seconds {
		p.now = p.now.Add(time.Second)
		p.charge(1000)
		p.release()
	}
}

func (p *prompts) room(t *testing.T) Room {
	t.Helper()
	r, known := p.RoomForecast(p.now)
	require.True(t, known)
	return r
}

func TestRoomComesAtThePaceAtWhichItWasFreed(t *testing.T) {
	p := newPrompts(t)
	p.charge(1000)
	_, known := p.RoomForecast(p.now)
	require.False(t, known, "nothing was freed yet")
	for range 50 {
		p.charge(1000)
	}
	p.turnOver(60)
	r := p.room(t)
	require.InDelta(t, 1, r.TokenMs, 0.05, "a thousand tokens a second")
	require.InDelta(t, -49_000, r.InMs, 2500, "there was room for 49,000 more than it has")
	for range 42 {
		p.charge(1000)
	}
	require.True(t, p.Closed(p.now))
	require.InDelta(t, 5000, p.room(t).InMs, 250, "93,000 tokens are there, and the gate opens at 88,000")
	p.now = p.now.Add(freedHalfLife)
	require.Greater(t, p.room(t).TokenMs, 1.5, "nothing was freed for long")
}

func TestRoomCountsWhatTheEngineSays(t *testing.T) {
	p := newPrompts(t)
	for range 50 {
		p.charge(1000)
	}
	p.turnOver(60)
	at := p.StartScrape(p.now)
	p.StoreSample(Sample{KVUsage: 0.8, KVHeld: 0.8, Running: 51}, at, p.now)
	require.InDelta(t, -20_000, p.room(t).InMs, 1000, "answers and others hold 30,000 that we do not know of")
	p.charge(5000)
	require.InDelta(t, -15_000, p.room(t).InMs, 1000, "what came since is not in it")
	p.StoreSample(Sample{KVUsage: 0.8, KVHeld: 0.8, Running: 51, Waiting: float64(p.Leases[Probing])}, p.StartScrape(p.now), p.now)
	require.InDelta(t, -20_000+float64(p.Tokens[Probing]), p.room(t).InMs, 2500, "nor are those that wait in the engine")
	p.StoreSample(Sample{KVUsage: math.NaN(), KVHeld: math.NaN()}, p.StartScrape(p.now), p.now)
	require.InDelta(t, -45_000, p.room(t).InMs, 2500, "an engine that does not tell its usage has what we know of")
}

// A pool for sliding windows may be fuller than the memory that tokens fill.
func TestRoomIsThatOfTokensAndTheGateThatOfTheFullestPool(t *testing.T) {
	p := newPrompts(t)
	for range 50 {
		p.charge(1000)
	}
	p.turnOver(60)
	p.StoreSample(Sample{KVUsage: 0.8, KVHeld: 0.6, Running: 51}, p.StartScrape(p.now), p.now)
	require.False(t, p.Closed(p.now))
	require.InDelta(t, -40_000, p.room(t).InMs, 2000)
	p.StoreSample(Sample{KVUsage: 0.95, KVHeld: 0.6, Running: 51}, p.StartScrape(p.now), p.now)
	require.True(t, p.Closed(p.now))
}

func TestAClosedGateWaitsForTheNextScrape(t *testing.T) {
	p := newPrompts(t)
	for range 50 {
		p.charge(1000)
	}
	p.turnOver(60)
	p.StoreSample(Sample{KVUsage: 0.91, KVHeld: 0.91, Running: 51}, p.StartScrape(p.now), p.now)
	require.True(t, p.Closed(p.now))
	for range 10 {
		p.release()
	}
	require.True(t, p.Closed(p.now), "the engine has not said that there is room")
	require.InDelta(t, 1000, p.room(t).InMs, 1)
}
