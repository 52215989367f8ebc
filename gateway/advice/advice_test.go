package advice_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/gateway/advice"
)

var settings = advice.Settings{Window: time.Minute, CalmPeriod: 10 * time.Minute, Target: 0.8}

const tick = 5 * time.Second

// watched is a cluster of four prefill and eight decode ranks over time.
type watched struct {
	*advice.Advisor
	now   time.Time
	ended float64
}

func watch() *watched {
	return &watched{Advisor: advice.New(settings), now: time.Date(2026, 1, 1, 3, 0, 0, 0, time.UTC)}
}

// sides is a sample that is as busy as told: prefill and decode as shares.
func sides(prefill, decode float64) advice.Sample {
	return advice.Sample{
		Prefill: advice.Prefill{Live: 4, Busy: int(4 * prefill), Capacity: 4_000_000, KVTokens: 400_000},
		Decode:  advice.Decode{Live: 8, Slots: 256, Used: int(256 * decode), Capacity: 8_000_000, KVTokens: int64(8_000_000 * decode / 2)},
	}
}

// see shows the same for a time, during which rate answers a second end.
func (w *watched) see(s advice.Sample, d time.Duration, rate float64) (last advice.Advice) {
	for end := w.now.Add(d); w.now.Before(end); {
		w.now = w.now.Add(tick)
		w.ended += rate * tick.Seconds()
		s.At, s.Decode.Ended = w.now, uint64(w.ended)
		last = w.Observe(s)
	}
	return last
}

func with(s advice.Sample, change func(*advice.Sample)) advice.Sample {
	change(&s)
	return s
}

func TestAdvice(t *testing.T) {
	for _, row := range []struct {
		name            string
		sample          advice.Sample
		seen            time.Duration
		steps           []advice.Step
		prefill, decode int // advised
	}{
		{"half used is left alone", sides(0.5, 0.5), 5 * time.Minute, []advice.Step{{Kind: advice.None, Reason: advice.ReasonBalanced}}, 4, 8},
		{"a few seconds say nothing", sides(1, 1), 30 * time.Second, []advice.Step{{Kind: advice.None, Reason: advice.ReasonTooLittleData}}, 4, 8},
		{
			"prompts that wait want prefill ranks", with(sides(1, 0.5), func(s *advice.Sample) {
				s.Prefill.Requests, s.Prefill.WaitingSeconds = 40, 60
			}),
			5 * time.Minute, []advice.Step{{Kind: advice.AddPrefill, Reason: advice.ReasonBacklog}}, 7, 8,
		},
		{"prefill ranks that never rest want more", sides(1, 0.5), 5 * time.Minute, []advice.Step{{Kind: advice.AddPrefill, Reason: advice.ReasonBusy}}, 5, 8},
		{
			"hand-offs nobody fetches fill prefill's KV", with(sides(0.5, 0.5), func(s *advice.Sample) { s.Prefill.KVTokens = 3_900_000 }),
			5 * time.Minute, []advice.Step{{Kind: advice.AddPrefill, Reason: advice.ReasonKV}}, 5, 8,
		},
		{
			"hand-offs that wait want decode ranks, not prefill for the KV they hold",
			with(sides(0.5, 1), func(s *advice.Sample) { s.Decode.Pool, s.Prefill.KVTokens = 64, 3_900_000 }),
			5 * time.Minute, []advice.Step{{Kind: advice.AddDecode, Reason: advice.ReasonPoolWait}}, 4, 12,
		},
		{
			"with a full pool the arrival queue waits for decode",
			with(sides(0.25, 1), func(s *advice.Sample) {
				s.Decode.Pool, s.PoolFull, s.Prefill.Requests, s.Prefill.WaitingSeconds = 32, true, 32, 600
			}),
			5 * time.Minute, []advice.Step{{Kind: advice.AddDecode, Reason: advice.ReasonPoolWait}}, 4, 12,
		},
		{
			"full KV memory of decode is a reason of its own", with(sides(0.5, 0.5), func(s *advice.Sample) { s.Decode.KVTokens = 7_800_000 }),
			5 * time.Minute, []advice.Step{{Kind: advice.AddDecode, Reason: advice.ReasonKV}}, 4, 10,
		},
		{
			"both may be short", with(sides(1, 1), func(s *advice.Sample) { s.Prefill.WaitingSeconds = 60 }),
			5 * time.Minute,
			[]advice.Step{{Kind: advice.AddPrefill, Reason: advice.ReasonBacklog}, {Kind: advice.AddDecode, Reason: advice.ReasonBusy}}, 7, 10,
		},
		{"idle ranks stay while the calm is short", sides(0.25, 0.25), 10 * time.Minute, []advice.Step{{Kind: advice.None, Reason: advice.ReasonBalanced}}, 4, 8},
		{"after it they may go", sides(0.25, 0.25), 12 * time.Minute, []advice.Step{{Kind: advice.RemovePrefill, Reason: advice.ReasonIdle}, {Kind: advice.RemoveDecode, Reason: advice.ReasonIdle}}, 2, 3},
		{"the last rank of a side never goes", sides(0, 0), 12 * time.Minute, []advice.Step{{Kind: advice.RemovePrefill, Reason: advice.ReasonIdle}, {Kind: advice.RemoveDecode, Reason: advice.ReasonIdle}}, 1, 1},
		{
			"one side short, the other idle: move ranks", with(sides(1, 0.25), func(s *advice.Sample) { s.Prefill.WaitingSeconds = 30 }),
			12 * time.Minute, []advice.Step{{Kind: advice.Rebalance, Reason: advice.ReasonToPrefill}}, 6, 4,
		},
		{
			"no rank that answers is an outage, not a want of ranks", with(sides(0, 0), func(s *advice.Sample) { s.Decode.Live = 0 }),
			5 * time.Minute, []advice.Step{{Kind: advice.None, Reason: advice.ReasonDecodeDown}}, 4, 0,
		},
		{
			"while ranks are down it is not known whether there are enough", with(sides(0.5, 0.5), func(s *advice.Sample) { s.Decode.Down = 4 }),
			5 * time.Minute, []advice.Step{{Kind: advice.None, Reason: advice.ReasonRanksDown}}, 4, 8,
		},
		{
			"while one drains none is spared, but none is down", with(sides(0.25, 0.25), func(s *advice.Sample) { s.Prefill.OutOfService = 1 }),
			12 * time.Minute, []advice.Step{{Kind: advice.None, Reason: advice.ReasonBalanced}}, 4, 8,
		},
		{
			"while a decode rank drains none is spared either",
			with(sides(0.25, 0.25), func(s *advice.Sample) { s.Decode.OutOfService = 1 }),
			12 * time.Minute, []advice.Step{{Kind: advice.None, Reason: advice.ReasonBalanced}}, 4, 8,
		},
		{
			"and none is spared", with(sides(0.25, 0.25), func(s *advice.Sample) { s.Prefill.Down = 1 }),
			12 * time.Minute, []advice.Step{{Kind: advice.None, Reason: advice.ReasonRanksDown}}, 4, 8,
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			got := watch().see(row.sample, row.seen, 5)
			require.Equal(t, row.steps, got.Steps, "%+v", got)
			require.Equal(t, row.prefill, got.Prefill.Advised, "prefill: %+v", got)
			require.Equal(t, row.decode, got.Decode.Advised, "decode: %+v", got)
			for _, s := range got.Steps {
				require.Contains(t, advice.Steps(), s, "a step that metrics do not show")
			}
			require.NotEmpty(t, got.Says+got.Steps[0].Reason)
		})
	}
}

func TestAdviceSaysWhatIsNotKnownWhileRanksAreDown(t *testing.T) {
	s := with(sides(0.5, 0.5), func(s *advice.Sample) { s.Decode.Down, s.Prefill.Down = 4, 1 })
	require.Equal(t, "1 of 5 prefill ranks and 4 of 12 decode ranks do not answer. Those that answer are enough for what comes now. Whether "+
		"there are enough ranks for what came before is not known until all answer.", watch().see(s, 5*time.Minute, 5).Says)
	s = with(sides(0.5, 1), func(s *advice.Sample) { s.Decode.Down = 1 })
	got := watch().see(s, 5*time.Minute, 5)
	require.Equal(t, advice.AddDecode, got.Steps[0].Kind)
	require.Equal(t, "Prefill has 4 ranks, and 4 are advised. Decode has 8 ranks, and 10 are advised. 1 of 9 decode ranks does not answer. "+
		"Mend it first: how many more are needed then is not known.", got.Says)
}

func TestBacklogsAreSeconds(t *testing.T) {
	s := with(sides(1, 1), func(s *advice.Sample) {
		s.Prefill.WaitingSeconds, s.Prefill.RunningSeconds = 10, 2 // on four ranks
		s.Decode.Pool, s.Decode.Oldest = 30, 7*time.Second
	})
	got := watch().see(s, 2*time.Minute, 5)
	require.InDelta(t, 3, got.Prefill.BacklogSeconds, 1e-9)
	require.InDelta(t, 6, got.Decode.BacklogSeconds, 0.1, "30 hand-offs, 5 slots a second")
	got = watch().see(s, 2*time.Minute, 0)
	require.InDelta(t, 7, got.Decode.BacklogSeconds, 1e-9, "no slot gets free: what the oldest has waited")
}

func TestASpikeIsNoNeed(t *testing.T) {
	w := watch()
	w.see(sides(0.5, 0.5), 5*time.Minute, 5)
	got := w.see(with(sides(1, 1), func(s *advice.Sample) { s.Prefill.WaitingSeconds = 4 }), 20*time.Second, 5)
	require.Equal(t, advice.None, got.Steps[0].Kind, "%+v", got)
}

// Once more are advised they are until the need no longer exceeds what there
// is; before, it must exceed it by a tenth.
func TestAdviceHasHysteresis(t *testing.T) {
	between := with(sides(0.75, 0.84), func(s *advice.Sample) { s.Decode.KVTokens = 0 }) // 84 % of slots at 80 %: 8.4 ranks
	w := watch()
	require.Equal(t, advice.None, w.see(between, 5*time.Minute, 5).Steps[0].Kind)
	require.Equal(t, advice.AddDecode, w.see(sides(0.75, 1), 3*time.Minute, 5).Steps[0].Kind)
	require.Equal(t, advice.AddDecode, w.see(between, 5*time.Minute, 5).Steps[0].Kind)
	require.Equal(t, advice.None, w.see(sides(0.75, 0.78), 3*time.Minute, 5).Steps[0].Kind)
	require.Equal(t, advice.None, w.see(between, 5*time.Minute, 5).Steps[0].Kind)
}

func TestNoiseMovesNothing(t *testing.T) {
	w, rng := watch(), rand.New(rand.NewPCG(1, 2))
	changes, last := 0, ""
	for range 1000 {
		s := with(sides(0.5, 0.7+0.3*(rng.Float64()-0.5)), func(s *advice.Sample) {
			s.Prefill.Busy, s.Prefill.WaitingSeconds = 2+rng.IntN(2), rng.Float64()
			s.Decode.Pool = rng.IntN(3)
		})
		got := w.see(s, tick, 5)
		if kind := got.Steps[0].Kind; kind != last {
			changes, last = changes+1, kind
		}
		require.Equal(t, 4, got.Prefill.Advised)
		require.Equal(t, 8, got.Decode.Advised)
	}
	require.Equal(t, 1, changes, "none from the first to the last")
}

// What a load of the last minutes wanted is never advised away.
func TestNeverFewerThanWereNeeded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := watch()
		var busy, filled []float64 // ranks, at each tick
		for range rapid.IntRange(1, 8).Draw(t, "phases") {
			p := float64(rapid.IntRange(0, 4).Draw(t, "busy")) / 4
			d := float64(rapid.IntRange(0, 256).Draw(t, "used")) / 256
			ticks := rapid.IntRange(1, 120).Draw(t, "ticks")
			for range ticks {
				busy, filled = append(busy, 4*p), append(filled, 8*d)
			}
			got := w.see(sides(p, d), time.Duration(ticks)*tick, 3)
			for side, one := range map[string]struct {
				advised, live int
				used          []float64
			}{"prefill": {got.Prefill.Advised, 4, busy}, "decode": {got.Decode.Advised, 8, filled}} {
				if wants := mostOfAMinute(one.used); one.advised < one.live && float64(one.advised)*settings.Target < wants-1e-9 {
					t.Fatalf("%s: %d ranks advised, %v were used in a minute of the last ten", side, one.advised, wants)
				}
			}
		}
	})
}

// mostOfAMinute is the largest mean of a window within the calm: what is shorter
// is no need.
func mostOfAMinute(used []float64) (most float64) {
	const window = int(time.Minute/tick) + 1
	within := used[max(0, len(used)-int(settings.CalmPeriod/tick)):]
	for i := 0; i+window <= len(within); i++ {
		sum := 0.0
		for _, u := range within[i : i+window] {
			sum += u
		}
		most = max(most, sum/float64(window))
	}
	return most
}

// While a side is down what was needed before it stays the word.
func TestAnOutageForgetsNothing(t *testing.T) {
	w := watch()
	w.see(sides(0.75, 0.75), 12*time.Minute, 5)
	got := w.see(with(sides(0, 0), func(s *advice.Sample) { s.Prefill.Live = 0 }), 5*time.Minute, 0)
	require.Equal(t, []advice.Step{{Kind: advice.None, Reason: advice.ReasonPrefillDown}}, got.Steps)
	require.Equal(t, 4, got.Prefill.Advised)
	require.Equal(t, 8, got.Decode.Advised)
	require.Equal(t, advice.ReasonTooLittleData, w.see(sides(1, 1), 30*time.Second, 5).Steps[0].Reason,
		"engines that come back are slow at first")
}

func BenchmarkObserve(b *testing.B) {
	w := watch()
	s := sides(0.5, 0.5)
	w.see(s, 12*time.Minute, 5)
	b.ReportAllocs()
	for b.Loop() {
		w.see(s, tick, 5)
	}
}

// While ranks were down, less work got to the others: what they did then does not tell
// that they can be spared.
func TestNoneIsSparedSoonAfterRanksWereDown(t *testing.T) {
	w := watch()
	idle := sides(0.25, 0.25)
	require.Equal(t, advice.ReasonRanksDown, w.see(with(idle, func(s *advice.Sample) { s.Decode.Down = 4 }), time.Hour, 5).Steps[0].Reason)
	require.Equal(t, []advice.Step{{Kind: advice.None, Reason: advice.ReasonBalanced}}, w.see(idle, settings.CalmPeriod, 5).Steps)
	require.Equal(t, []advice.Step{{Kind: advice.RemovePrefill, Reason: advice.ReasonIdle},
		{Kind: advice.RemoveDecode, Reason: advice.ReasonIdle}}, w.see(idle, 2*settings.Window, 5).Steps)
}

func TestOneRankIsAdvised(t *testing.T) {
	s := with(sides(0.5, 0.5), func(s *advice.Sample) {
		s.Prefill.Live, s.Prefill.Busy, s.Prefill.Capacity = 1, 0, 1_000_000
		s.Decode.Live, s.Decode.Used, s.Decode.Slots = 1, 8, 32
	})
	require.Equal(t, "Prefill has 1 rank, and 1 is advised. Decode has 1 rank, and 1 is advised.", watch().see(s, 5*time.Minute, 5).Says)
}
