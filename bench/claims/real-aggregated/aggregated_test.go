package main

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/rigs/real/ranks"
)

var start = time.Unix(1000, 0)

func at(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }

// line is what a rank writes of a step.
func line(wave, step, from, to int, p part) string {
	return fmt.Sprintln(wave, step, at(from).UnixNano(), at(to).UnixNano(), p.prompt, p.decodes, p.kv)
}

func TestStepsAreJoinedByTheirNumbers(t *testing.T) {
	decodes, computes := part{decodes: 2, kv: 300}, part{prompt: 512}
	steps, err := join([ranks.Count][]byte{
		[]byte(line(0, 0, 0, 10, computes) + line(0, 1, 12, 20, part{}) + line(0, 2, 22, 25, part{}) + line(1, 0, 90, 95, computes) + "1 1 3"),
		[]byte(line(0, 0, 1, 9, decodes) + line(0, 1, 11, 21, decodes) + line(0, 2, 22, 26, part{}) + line(1, 0, 90, 99, computes) + line(1, 1,
			100, 101, decodes)),
	})
	require.NoError(t, err)
	require.Equal(t, []step{
		{at(1), 11 * time.Millisecond, [ranks.Count]part{computes, decodes}}, // until the next one
		{at(12), 10 * time.Millisecond, [ranks.Count]part{{}, decodes}},
		{at(90), 9 * time.Millisecond, [ranks.Count]part{computes, computes}}, // the last one of which both ranks told
	}, steps)
	alone, together := shares(steps)
	require.InDelta(t, 11./30, alone, 1e-9)
	require.InDelta(t, 9./30, together, 1e-9)
	require.Equal(t, steps[1:2], within(steps, at(2), at(90)))
	require.Empty(t, within(steps, at(100), at(2)))
	alone, together = shares(nil)
	require.Zero(t, alone+together)

	_, err = join([ranks.Count][]byte{[]byte("0 x\n")})
	require.ErrorContains(t, err, `"0 x\n" is no step`)
}

// made are steps of a law, with noise, some of them disturbed.
func made(truth law, n int) (steps []step) {
	rng := rand.New(rand.NewPCG(7, 7))
	for i := range n {
		var s step
		for k := range s.ranks {
			r := part{decodes: float64(1 + rng.IntN(8)), prompt: float64(max(0, rng.IntN(1000)-500))}
			r.kv = r.decodes * float64(100+rng.IntN(2000))
			s.ranks[k] = r
		}
		took := truth.at(&s) + rng.NormFloat64()
		if i%100 == 0 {
			took += 500
		}
		s.length = time.Duration(took * float64(time.Millisecond))
		steps = append(steps, s)
	}
	return steps
}

func TestTheLawOfTheStepIsFound(t *testing.T) {
	for name, of := range map[string][terms]float64{
		"all terms":                     {c0: 12, c1: 0.004, cr: 1.5, pl: 0.19, ps: 0.15},
		"requests cost nothing":         {c0: 12, c1: 0.004, pl: 0.19, ps: 0.15},
		"every rank computes by itself": {c0: 12, c1: 0.004, pl: 0.34},
	} {
		t.Run(name, func(t *testing.T) {
			l := fit(made(law{of: of}, 3000))
			require.True(t, l.known)
			for i := range of {
				require.InDelta(t, of[i], l.of[i], 5*l.off[i], termNames[i])
			}
			require.Equal(t, 30, l.left)
			require.Greater(t, l.r2, 0.99)
		})
	}
	require.False(t, fit(nil).known)
	require.Equal(t, "{}", (&law{}).config())
	l := law{known: true, of: [terms]float64{c0: 12, c1: 0.004, pl: 0.19, ps: 0.15}}
	require.Equal(t, "{c0_ms: 12, c1_ms: 0.004, request_ms: 0, own_prefill_ms: 0.19, shared_prefill_ms: 0.15}", l.config())
}

// While prompts are only computed on one rank at a time, nothing tells what ranks compute by
// themselves from what they share.
func TestTermsThatNothingTellsApartAreOne(t *testing.T) {
	steps := made(law{of: [terms]float64{c0: 12, c1: 0.004, pl: 0.2, ps: 0.2}}, 3000)
	for i := range steps {
		s := &steps[i]
		s.ranks[1].prompt = 0
		s.ranks[0].kv += 1e6
		s.length = time.Duration((12 + 0.3*s.ranks[0].prompt) * 1e6)
	}
	l := fit(steps)
	require.InDelta(t, 0.3, l.of[pl], 1e-3)
	require.Zero(t, l.of[ps])
}

func TestGapsDuringAPromptAreHeldAgainstTheUsualOnes(t *testing.T) {
	stream := func(times ...int) (chunks []ranks.Chunk) {
		for i, ms := range times {
			chunks = append(chunks, ranks.Chunk{At: at(ms), Tokens: i + 1})
		}
		return chunks
	}
	spells := []spell{{at(42), at(190)}, {at(215), at(225)}}
	d := delay{disturbance: disturbance{prompt: 500}}
	require.NoError(t, d.take(stream(0, 10, 20, 30, 40, 50, 120, 190, 200, 210, 230, 240), spells, 0))
	require.Equal(t, []float64{10}, d.usual)
	require.Equal(t, []float64{70}, d.longest)
	require.Equal(t, []float64{2}, d.long)
	require.InDelta(t, 0+60+60, d.more[0], 1e-9, "the gap that begins with the end of the prompt is a usual one")
	require.ErrorContains(t, d.take(stream(0, 10, 20), spells, 1), "0 while a prompt of 500 is")
}

func TestDelaysAreMeansOfRepeats(t *testing.T) {
	d := &delay{disturbance: disturbance{500, true}, interval: 2}
	for repeat := range 3 {
		for range watchers {
			d.usual, d.longest, d.long, d.more = append(d.usual, 20), append(d.longest, 200), append(d.long, 1), append(d.more, float64(100*repeat))
		}
	}
	d.forgetFirst()
	var out strings.Builder
	writeDelays(&out, []*delay{d})
	require.Contains(t, out.String(), "over 2 repeats")
	require.Contains(t, out.String(), "| 500 on each rank | 2 | 20.0 ± 0.0 | 200 ± 0 | 1.0 ± 0.0 | 150 ± 71 | 0.300 ± 0.141 |")
}

func TestRunsAreComparedWithinTheirRound(t *testing.T) {
	w := &site{options: options{policies: theirs + ",evenkeel", Options: ranks.Options{Requests: 100, Seed: 3}}}
	list := w.variants()
	require.Len(t, list, 4)
	var rounds [][]*run
	for i := range 5 {
		var round []*run
		for k, v := range list {
			x := float64(100+50*i) * (1 + float64(k)/10)
			round = append(round,
				&run{variant: v, failed: k,
					Sample: report.Sample{report.TokensPerS: x, report.TTFTMean: x, report.TTFTP99: x, report.TPOTP95: x, alone: .1, together: .2}})
		}
		rounds = append(rounds, round)
	}
	var out strings.Builder
	writeRuns(&out, rounds, w.options)
	require.Contains(t, out.String(), "| `engine` | 1 | 200 ± 79 | 200 ± 79 | 200 ± 79 | 200.0 ± 79.1 | 10.0 ± 0.0 | 20.0 ± 0.0 | 0 |")
	require.Contains(t, out.String(), "| `evenkeel` | 2 | +30.0 ± 0.0 | +30.0 ± 0.0 | +30.0 ± 0.0 | +30.0 ± 0.0 |")
	require.Contains(t, out.String(), "| `evenkeel` | 2 | 260 ± 103 | 260 ± 103 | 260 ± 103 | 260.0 ± 102.8 | 10.0 ± 0.0 | 20.0 ± 0.0 | 15 |")
	require.NotContains(t, out.String(), "| `engine` | 1 | +")
	require.Contains(t, (&run{variant: list[3], Sample: report.Sample{alone: .25}}).String(), "evenkeel, interval 2: 0 tokens/s")
	require.Zero(t, base([]variant{{"rr", 1}}), "without vLLM's own balancing the first is compared with")
}

func TestListsOfARoundAreTheSameForAll(t *testing.T) {
	w := &site{options: options{Options: ranks.Options{Requests: 50, Seed: 3}}}
	require.Equal(t, w.draw(1), w.draw(1))
	require.NotEqual(t, w.draw(1), w.draw(2))
	for _, r := range w.draw(1) {
		require.LessOrEqual(t, r.Prompt+r.Output, ranks.ContextLen)
	}
}
