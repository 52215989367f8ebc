package main

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/bench/lab/refengine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestALawIsFoundInItsSteps(t *testing.T) {
	var l found
	for _, n := range []int{1, 8, 64} {
		for _, context := range []float64{500, 4000, 16_000} {
			kv := float64(n) * context
			l.cells = append(l.cells, cell{requests: n, kv: kv, ms: 20 + 0.2*float64(n) + 1e-4*kv})
		}
	}
	require.NoError(t, l.fit())
	require.InDeltaSlice(t, []float64{20, 0.2, 1e-4}, l.decode.Of, 1e-6)
	for _, tokens := range []int{512, 2048, 8192} {
		for _, share := range []float64{0.25, 1} {
			l.beside = append(l.beside, beside{tokens: tokens, share: share, ms: 3 + 0.05*float64(tokens) + 0.08*float64(tokens)*share})
		}
	}
	l.fitPrompts()
	require.True(t, l.known)
	require.InDeltaSlice(t, []float64{3, 0.05, 0.08}, l.prompts.Of, 1e-6)
	l.beside = []beside{{tokens: 512, share: 1, ms: 10}, {tokens: 1024, share: 1, ms: 15}, {tokens: 2048, share: 1, ms: 25}}
	l.fitPrompts()
	require.InDeltaSlice(t, []float64{5, 10. / 1024}, l.prompts.Of, 1e-3, "one rank")
	require.ErrorIs(t, (&found{cells: l.cells[:2]}).fit(), errSingular)
}

// A reference engine with two ranks is measured over sockets. How long its steps last here is not
// asserted.
func TestAnEngineIsMeasured(t *testing.T) {
	e, err := refengine.Start(refengine.Config{Role: refengine.Aggregated, DPSize: 2, DPMode: "internal", Slots: 8,
		Steps: refengine.Steps{C0: 4 * time.Millisecond, CR: 100 * time.Microsecond}})
	require.NoError(t, err)
	defer e.Close()
	var out bytes.Buffer
	for steps := 40; ; steps *= 2 { // on a busy machine it takes more of them until the prompts of a round end together
		out.Reset()
		err := run(t.Context(), []string{"-engine", e.URLs()[0], "-ranks", "2", "-requests", "1,4", "-contexts", "64,256",
			"-prompts", "256,512", "-steps", fmt.Sprint(steps), "-repeats", "1"}, &out)
		if err == nil {
			break
		}
		require.ErrorContains(t, err, "take more -steps")
		require.Less(t, steps, 1000, "%v", err)
	}
	require.Regexp(t, `(?s)2 ranks.*by 4 measurements.*c0 .* cr .* c1 .*.*\| 4 \|.*\| 512 \| 1\.00 \|`, out.String())
	t.Log(out.String())
}

func TestWhatIsWrongIsSaid(t *testing.T) {
	for _, args := range [][]string{{}, {"-engine", "http://127.0.0.1:1", "-steps", "3"},
		{"-engine", "http://127.0.0.1:1", "-requests", "0"}} {
		require.Error(t, run(t.Context(), args, &bytes.Buffer{}))
	}
	require.ErrorContains(t, run(t.Context(), []string{"-engine", "http://127.0.0.1:1"}, &bytes.Buffer{}),
		"the engine does not tell its model")
}
