package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/tools/page"
)

// small is a grid that takes no time.
const small = "-traces synth:code -ranks 2 -slots 4 -loads closed,0.8 -steps 0,10 -seeds 2 -requests 200"

func TestTheCSVHasEveryArmAndThePageSaysWhatWasRun(t *testing.T) {
	o, err := parse(strings.Fields(small))
	require.NoError(t, err)
	var found strings.Builder
	require.NoError(t, o.run(context.Background(), &found, io.Discard))
	for _, want := range []string{"\nsynth:code,2,4,closed,", "\nsynth:code,2,4,0.8,", "2 seeds of 200 requests",
		"All of the 24 runs", "| expected | found | verdict |"} {
		require.Contains(t, found.String(), want)
	}
	for _, a := range arms {
		want := 2 // loads
		if a.late() {
			want = 1 // the closed loop has them without prefills alone
		}
		require.Equal(t, want, strings.Count(strings.ReplaceAll(found.String(), `"`, ""), ",10,"+strings.ReplaceAll(a.name, "`", "")+",2,"), a.name)
	}
	require.NotContains(t, found.String(), "NaN")
}

func TestWhatCannotBeRunIsRefused(t *testing.T) {
	for line, want := range map[string]string{"-ranks two": "-ranks", "-steps -3": "negative"} {
		_, err := parse(strings.Fields(line))
		require.ErrorContains(t, err, want)
	}
	o, err := parse([]string{"-traces", "mars"})
	require.NoError(t, err)
	require.ErrorContains(t, o.run(context.Background(), io.Discard, io.Discard), `no trace "mars"`)
}

// Whoever ends the program loses nothing that was run, and gets the same page in the end.
func TestRunsAreFoundAgain(t *testing.T) {
	file := filepath.Join(t.TempDir(), "out", "samples") // a clone has no folder for it
	o, err := parse(append(strings.Fields(small), "-samples", file))
	require.NoError(t, err)
	page := func(ctx context.Context) (string, int, error) {
		var page, progress strings.Builder
		err := o.run(ctx, &page, &progress)
		return page.String(), strings.Count(progress.String(), "\n"), err
	}
	ended, end := context.WithCancel(context.Background())
	end()
	text, _, err := page(ended)
	require.ErrorIs(t, err, context.Canceled)
	require.Contains(t, text, "**0** of the 24 runs")

	whole, runs, err := page(context.Background())
	require.NoError(t, err)
	require.Equal(t, 24, runs)
	written, err := os.ReadFile(file)
	require.NoError(t, err)
	cut := written[:len(written)-10]
	require.NoError(t, os.WriteFile(file, cut, 0o600))
	again, runs, err := page(context.Background())
	require.NoError(t, err)
	require.Equal(t, 1, runs, "the line that was cut")
	require.Equal(t, whole, again)
	got, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(written), string(got))

	other := strings.Replace(string(written), `"tokens_per_s":`, `"tokens_per_s":1`, 1)
	require.NoError(t, os.WriteFile(file, []byte(other), 0o600))
	_, _, err = page(context.Background())
	require.ErrorContains(t, err, "another program made these samples")
}

// Every verdict can be either, and is none where nothing was run.
func TestVerdictsAreFound(t *testing.T) {
	o, err := parse(strings.Fields("-traces synth:lognormal -ranks 2 -slots 4 -loads closed -steps 1,10 -seeds 1 -requests 200"))
	require.NoError(t, err)
	b := &book{options: o, samples: &samples{of: map[cell]report.Sample{}}, scenarios: o.scenarios()}
	require.Equal(t, 4, strings.Count(b.verdicts(), "nothing was measured"))
	set := func(of func(arm int, steps float64) (idle, tokens float64)) {
		for _, steps := range []float64{0, 1, 10} {
			for i := range arms {
				c := b.scenarios[0].cell(steps, i)
				c.Seed = 1
				idle, tokens := of(i, c.Steps)
				b.samples.of[c] = report.Sample{report.IdleShare: idle, report.TokensPerS: tokens, report.TTFTP99: 100}
			}
		}
	}
	// As it was expected: one step is free, ten cost what they were foreseen to, and slots ahead give
	// most of that back.
	set(func(arm int, steps float64) (idle, tokens float64) {
		idle, tokens = 0.1, 1000
		if arm == lateKV || arm == arrivalKV {
			idle = 0.3
		}
		if steps == 10 && !arms[arm].late() {
			share := foreseen(b.scenarios[0], steps)
			if arm == arrivalAhead {
				share /= 4
			}
			tokens *= 1 - share
		}
		return idle, tokens
	})
	require.Equal(t, 4, strings.Count(b.verdicts(), "| met |"), b.verdicts())
	// And nothing of it.
	set(func(arm int, steps float64) (idle, tokens float64) {
		idle, tokens = 0.1, 1000
		if arms[arm].late() {
			tokens = 2000
		}
		switch arm {
		case lateKV:
			idle = 0.3
		case arrivalAhead:
			tokens = 900
		}
		return idle, tokens
	})
	require.Equal(t, 4, strings.Count(b.verdicts(), "| **not met** |"), b.verdicts())
	require.NotContains(t, string(b.csv()), "NaN")
}

func TestFiguresAreDrawnOfWhatThereIs(t *testing.T) {
	o, err := parse(append(strings.Fields("-traces synth:code -ranks 2 -slots 4 -loads closed -steps 1,10 -seeds 1 -requests 200"), "-out",
		filepath.Join(t.TempDir(), "results", "bind.md")))
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(filepath.Dir(o.out), 0o755))
	require.NoError(t, o.run(context.Background(), io.Discard, io.Discard))
	text, err := os.ReadFile(o.out)
	require.NoError(t, err)
	opening, closing := page.Markers("bind", "claim NAME=bind")
	require.Contains(t, string(text), opening+"All of the")
	require.Contains(t, string(text), closing)
	kept, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "results", "bind.csv"))
	require.NoError(t, err)
	written, err := os.ReadFile(strings.TrimSuffix(o.out, ".md") + ".csv")
	require.NoError(t, err)
	head, _, _ := strings.Cut(string(kept), "\n")
	require.True(t, strings.HasPrefix(string(written), head+"\n"), "the CSV of the docs has the same columns")
	for file, want := range map[string]string{"bind-kept.svg": "closed loop", "bind-tokens.svg": "arrival, jsq-kv"} {
		picture, err := os.ReadFile(filepath.Join(filepath.Dir(o.out), "..", "img", file))
		require.NoError(t, err)
		require.Contains(t, string(picture), want)
	}
}
