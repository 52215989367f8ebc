package regions

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// plain is an engine whose times can be added up by hand: a token of a prompt
// takes 1 ms, a step 10 ms.
var plain = Engine{TPMs: 1, T0Ms: 10, StepMs: 10, KVTokens: 20_000}

// onePass prefills whatever waits together.
var onePass = Engine{TPMs: 1, T0Ms: 10, StepMs: 10, KVTokens: 20_000, OnePass: true}

// quiet is a scenario without clients: so many replicas in each region, 2 ms
// between a client and its dispatcher, 100 ms between regions.
func quiet(e Engine, replicas ...int) *Scenario {
	s := &Scenario{Engine: e, WarmS: 0, MeasureS: 60, ProbeMs: 500, ScrapeMs: 500}
	for i, n := range replicas {
		s.Regions = append(s.Regions, Region{Name: string(rune('a' + i)), Replicas: n, Load: Load{Turns: 1, Prompt: 1, Output: 1}})
		row := make([]float64, len(replicas))
		for k := range row {
			row[k] = 100
		}
		row[i] = 2
		s.RTTMs = append(s.RTTMs, row)
	}
	return s
}

// ask is one request by hand.
type ask struct {
	at             float64
	region         int
	tokens, output int
	id             uint64 // the same: the same prompt
}

type answer struct{ ttft, e2e float64 }

// play runs requests and returns when clients had their first and last tokens.
func play(t *testing.T, sc *Scenario, policy string, asks ...ask) ([]answer, *simulation) {
	t.Helper()
	require.NoError(t, sc.Validate())
	a, err := parseArm(policy)
	require.NoError(t, err)
	s, err := newSimulation(sc, a, 1)
	require.NoError(t, err)
	answers := make([]answer, len(asks))
	for i, x := range asks {
		c := &client{s: s, region: x.region}
		s.clients = append(s.clients, c)
		prompt := text{}.grow(x.id, x.tokens)
		s.after(x.at, func() {
			r := &request{client: c, keys: prompt.keys, all: prompt.grow(x.id, x.output).keys, tokens: x.tokens, output: x.output, key: x.id}
			began := s.now
			r.then = func(ok bool) {
				if ok {
					answers[i].e2e = s.now - began
				}
			}
			s.send(r)
			s.watch(r, func() { answers[i].ttft = s.now - began })
		})
	}
	require.NoError(t, s.run(context.Background()))
	require.Zero(t, s.meter.violations)
	return answers, s
}

// watch calls once the client has its first token.
func (s *simulation) watch(r *request, seen func()) {
	if r.first {
		seen()
		return
	}
	if r.ends == 0 {
		s.after(0.25, func() { s.watch(r, seen) })
	}
}

func TestByHand(t *testing.T) {
	for _, row := range []struct {
		name   string
		sc     *Scenario
		policy string
		asks   []ask
		want   []answer
	}{
		{
			"one request: way, prefill, and a step for each further token", quiet(plain, 1), "finish",
			[]ask{{0, 0, 100, 3, 1}},
			[]answer{{2 + 110, 2 + 110 + 20}},
		},
		{
			"the same prompt again: all blocks but the last token's are cached", quiet(plain, 1), "finish",
			[]ask{{0, 0, 100, 3, 1}, {1000, 0, 100, 1, 1}},
			[]answer{{112, 132}, {2 + 10 + 4, 2 + 10 + 4}},
		},
		{
			"the second is prefilled after the first, which gets no token meanwhile", quiet(plain, 1), "finish",
			[]ask{{0, 0, 100, 3, 1}, {0, 0, 200, 1, 2}},
			[]answer{{112, 112 + 200 + 20}, {112 + 200, 112 + 200}},
		},
		{
			"those that wait for a prefill to end are prefilled one after the other, before the batch steps on", quiet(plain, 1), "finish",
			[]ask{{0, 0, 100, 3, 1}, {50, 0, 50, 1, 2}, {60, 0, 70, 2, 3}},
			[]answer{{112, 112 + 120 + 20}, {112 + 50 - 50, 112 + 50 - 50}, {112 + 120 - 60, 112 + 120 + 10 - 60}},
		},
		{
			"or together, in one pass, if the scenario says so", quiet(onePass, 1), "finish",
			[]ask{{0, 0, 100, 1, 1}, {50, 0, 50, 1, 2}, {60, 0, 70, 2, 3}},
			[]answer{{112, 112}, {112 + 120 - 50, 112 + 120 - 50}, {112 + 120 - 60, 112 + 120 + 10 - 60}},
		},
		{
			"t0 that keeps the engine busy is paid for each prompt", quiet(Engine{TPMs: 1, T0Ms: 10, BusyMs: 10, StepMs: 10, KVTokens: 20_000}, 1),
			"finish",
			[]ask{{0, 0, 100, 1, 1}, {50, 0, 50, 1, 2}},
			[]answer{{112, 112}, {112 + 60 - 50, 112 + 60 - 50}},
		},
		{
			"one that comes in a step waits for its end", quiet(plain, 1), "finish",
			[]ask{{0, 0, 100, 9, 1}, {115, 0, 50, 1, 2}}, // steps end at 111, 121
			[]answer{{112, 1 + 121 + 50 + 60 + 10}, {1 + 121 + 60 - 115, 1 + 121 + 60 - 115}},
		},
		{
			"a region without replicas forwards: half a round trip there, half back", quiet(plain, 0, 1), "finish",
			[]ask{{5000, 0, 100, 2, 1}},
			[]answer{{112 + 100, 112 + 100 + 10}},
		},
		{
			"a batch is bounded by KV tokens: the second waits until the first is gone",
			quiet(Engine{TPMs: 0.01, T0Ms: 10, StepMs: 10, KVTokens: 10_240}, 1), "local-only:push=blind",
			[]ask{{0, 0, 8000, 5, 1}, {0, 0, 3000, 1, 2}},
			[]answer{{2 + 90, 2 + 90 + 40}, {2 + 90 + 40 + 30, 2 + 90 + 40 + 30}},
		},
		{
			"a central balancer: its own way to the replica is in both directions", quiet(plain, 1, 0), "rr",
			[]ask{{0, 1, 100, 1, 1}},
			[]answer{{100 + 110, 100 + 110}},
		},
	} {
		got, _ := play(t, row.sc, row.policy, row.asks...)
		for i, want := range row.want {
			require.InDelta(t, want.ttft, got[i].ttft, 0.3, "%s: first token of %d", row.name, i)
			require.InDelta(t, want.e2e, got[i].e2e, 1e-6, "%s: last token of %d", row.name, i)
		}
	}
}

func TestKVOverflowThrowsTheLatestOut(t *testing.T) {
	sc := quiet(Engine{TPMs: 0.01, T0Ms: 10, StepMs: 10, KVTokens: 10_240}, 1)
	got, s := play(t, sc, "local-only:push=blind", ask{tokens: 5000, output: 200, id: 1}, ask{tokens: 5000, output: 200, id: 2})
	require.Positive(t, s.meter.preempted)
	require.Positive(t, got[0].e2e)
	require.Greater(t, got[1].e2e, got[0].e2e, "it began again after the first had ended, or nearly")
}

func TestWhatAnEngineSaysOfItsQueue(t *testing.T) {
	// Prefilled from 1 to 81, in steps of 10 until 191; the second has no room before, and is
	// prefilled from 191 to 221.
	e := Engine{TPMs: 0.01, T0Ms: 10, StepMs: 10, KVTokens: 10_240}
	slow, prefilling := e, e
	slow.LogSteps, prefilling.PrefillPends = 5, true
	for _, row := range []struct {
		name string
		e    Engine
		told map[float64]int
	}{
		{"who waits for a prefill to begin, at once", e, map[float64]int{50: 0, 84: 0, 90: 1, 130: 1, 190: 1, 192: 0, 225: 0}},
		{"as SGLang does: after a prefill, and every so many steps", slow, map[float64]int{50: 0, 84: 0, 90: 0, 130: 0, 132: 1, 190: 1, 192: 0}},
		{"until a prefill is done", prefilling, map[float64]int{50: 1, 84: 0, 90: 1, 190: 1, 192: 1, 225: 0}},
	} {
		a, err := parseArm("local-only:push=blind")
		require.NoError(t, err)
		s, err := newSimulation(quiet(row.e, 1), a, 1)
		require.NoError(t, err)
		c := &client{s: s}
		s.clients = append(s.clients, c)
		send := func(p text, output int) func() {
			return func() {
				s.send(&request{client: c, keys: p.keys, all: p.keys, tokens: p.tokens, output: output, then: func(bool) {}})
			}
		}
		s.after(0, send(text{}.grow(1, 8000), 12))
		s.after(85, send(text{}.grow(2, 3000), 1))
		seen := map[float64]int{}
		for at := range row.told {
			s.after(at, func() { seen[at] = s.replicas[0].pending() })
		}
		require.NoError(t, s.run(context.Background()))
		require.Equal(t, row.told, seen, row.name)
	}
}

func TestPrefixesAreCachedInTheFreeKV(t *testing.T) {
	sc := quiet(Engine{TPMs: 0.01, T0Ms: 10, StepMs: 10, KVTokens: 10_240}, 1)
	for _, row := range []struct {
		name   string
		second ask
		again  float64 // tokens of the first prompt that its third use finds
	}{
		{"a batch that leaves room lets a prompt stay", ask{500, 0, 3200, 1, 2}, 3184},
		{"one that takes all but 2240 tokens leaves what fits there", ask{500, 0, 8000, 1, 2}, 2224},
		{"the prompt of a request that runs is there for all", ask{500, 0, 3200, 400, 1}, 3184},
	} {
		_, s := play(t, sc, "local-only:push=blind", ask{
			tokens: 3200, output: 1, id: 1,
		}, row.second, ask{at: 1000, tokens: 3200, output: 1, id: 1})
		hit := s.meter.hit
		if row.second.id == 1 {
			hit -= 3184
		}
		require.InDelta(t, row.again, hit, 16, row.name)
	}
}

func TestSPPSendsNoMoreThanItsCreditBetweenScrapes(t *testing.T) {
	sc := quiet(plain, 1)
	sc.ScrapeMs = 100_000 // only by hand
	a, err := parseArm("skylb:push=sp-p,credit_max=2")
	require.NoError(t, err)
	s, err := newSimulation(sc, a, 1)
	require.NoError(t, err)
	c := &client{s: s}
	s.clients = append(s.clients, c)
	s.after(0, s.dispatchers[0].scrape)
	answered := 0
	for i := range 3 {
		p := text{}.grow(uint64(i+1), 1000)
		s.after(float64(i), func() {
			s.send(&request{client: c, keys: p.keys, all: p.keys, tokens: p.tokens, output: 1, then: func(bool) { answered++ }})
		})
	}
	engine := s.replicas[0]
	until := func(at float64) {
		for s.next(at) {
		}
	}
	until(900)
	require.Equal(t, 2, len(engine.batch)+len(engine.waiting), "the third waits in the arrival queue")
	until(1100)
	require.Equal(t, 1, answered)
	require.Equal(t, 2, len(engine.batch)+len(engine.waiting), "a first token gives its credit back")
	until(4000)
	require.Equal(t, 3, answered)
}

func TestAForwardThatIsRefusedFallsBackOnce(t *testing.T) {
	s := refused(t, 0)
	require.GreaterOrEqual(t, s.meter.fallbacks, 1)
	require.Zero(t, s.meter.violations)
	require.Equal(t, 2, s.meter.forwards, "one of the long ones was refused, too")
	require.InDelta(t, 2*requestBytes+bytesPerToken*(3000+100), s.meter.bytes, 0, "no answer has crossed regions")
}

// Forwards, and those of them that come back, are counted in the same time.
func TestWhatTheWarmUpForwardsDoesNotCount(t *testing.T) {
	s := refused(t, 30)
	require.Zero(t, s.meter.forwards)
	require.Zero(t, s.meter.fallbacks)
	require.Zero(t, s.meter.violations)
}

// refused runs requests of which a peer refuses some, 4 s after the start of a simulation whose
// warm-up lasts so many seconds.
func refused(t *testing.T, warm float64) *simulation {
	t.Helper()
	sc := quiet(plain, 1, 1)
	sc.WarmS = warm
	a, err := parseArm("finish:min_gain_ms=0")
	require.NoError(t, err)
	s, err := newSimulation(sc, a, 1)
	require.NoError(t, err)
	c := &client{s: s, region: 0}
	s.clients = append(s.clients, c)
	var r *request
	ended := 0
	s.after(4000, func() {
		for i := range 3 { // long ones, so that the peer is better
			p := text{}.grow(uint64(90+i), 3000)
			s.send(&request{client: c, keys: p.keys, all: p.keys, tokens: p.tokens, output: 1, then: func(bool) {}})
		}
		p := text{}.grow(7, 100)
		r = &request{client: c, keys: p.keys, all: p.keys, tokens: 100, output: 5, then: func(ok bool) { require.True(t, ok); ended++ }}
		s.send(r)
		s.dispatchers[1].draining = true // the probe has not said so yet
	})
	require.NoError(t, s.run(context.Background()))
	require.Equal(t, 1, ended)
	require.Equal(t, 1, r.forwards)
	require.Equal(t, 1, r.executions)
	return s
}
