package decode

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/vectors"
	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
)

func TestAPolicyAgreesWithItsOwnLog(t *testing.T) {
	for _, spec := range []string{"jsq", "pjsq", "prr", "br0:window=4,theta=0", "br0:paper", "brh:horizon=30", "brh", "evenkeel:kappa=0",
		"evenkeel"} {
		t.Run(spec, func(t *testing.T) {
			f := Uniform(4, 4, 20_000)
			w := drawn(t, Source{Trace: azure(1200)}, 150)
			r, err := newRun(&f, Load{Pool: 12}, w, by(spec))
			require.NoError(t, err)
			var log []byte
			r.round = func(round *board.Round) { // as the dispatcher writes it
				line := dispatcher.LogLine{
					Tick: round.Tick, TimeMs: round.At.UnixMilli(), Group: round.Group, Policy: round.Policy, Snapshot: &round.Snapshot,
					Outputs: round.Survival.Outputs(), Assign: round.Assign,
				}
				log = line.AppendJSON(log)
			}
			require.NoError(t, r.all(context.Background()))
			runs, _, err := vectors.Replay(context.Background(), bytes.NewReader(log), "log", []string{spec, "random"}, nil)
			require.NoError(t, err)
			require.Greater(t, runs[0].Metrics[report.Rounds].Mean, 20.)
			require.InDelta(t, 1, runs[1].Metrics[report.Agreement].Mean, 1e-9)
			require.Less(t, runs[2].Metrics[report.Agreement].Mean, 0.9)
		})
	}
}
