package fit

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/predictor"
)

// csv is a trace of n requests, two kinds that prompt length tells apart.
func csv(n int) string {
	rng := rand.New(rand.NewPCG(3, 4))
	var b strings.Builder
	b.WriteString("TIMESTAMP,ContextTokens,GeneratedTokens\n")
	for i := range n {
		prompt, output := 100+rng.IntN(50), 10+rng.IntN(30)
		if rng.IntN(2) == 0 {
			prompt, output = 4000+rng.IntN(500), 300+rng.IntN(100)
		}
		fmt.Fprintf(&b, "%s,%d,%d\n", start.Add(time.Duration(i)*300*time.Millisecond).Format("2006-01-02 15:04:05.0000000"), prompt, output)
	}
	return b.String()
}

var made = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

func train(t *testing.T, kind string, h *History) (*Prediction, *predictor.Fit) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "fit.json")
	p, err := Train(kind, h, predictor.Options{Horizon: 80, Created: made}, out)
	require.NoError(t, err)
	b, err := os.ReadFile(out)
	require.NoError(t, err)
	f, err := predictor.ParseFit(b)
	require.NoError(t, err)
	return p, f
}

func TestAFitFileComesBack(t *testing.T) {
	text := csv(800)
	path := write(t, "trace.csv", text)
	h, err := FromTrace(path)
	require.NoError(t, err)
	sum := sha256.Sum256([]byte(text))
	for _, kind := range []string{"survival", "exact"} {
		t.Run(kind, func(t *testing.T) {
			p, f := train(t, kind, h)
			require.Equal(t, predictor.Kind(kind), f.Kind)
			require.Equal(t, predictor.Source{
				File: path, SHA256: hex.EncodeToString(sum[:]), Rows: 800,
				From: "2026-11-20T10:00:00Z", To: "2026-11-20T10:03:59.7Z",
			}, f.Source)
			require.Equal(t, made, f.Created)
			require.Equal(t, []int{600, 200}, []int{p.TrainedOn, p.HeldOut})
			require.Equal(t, p.Scores, f.Holdout.Scores)
			require.Greater(t, float64(p.Scores.AUC), 0.6)
			require.Less(t, float64(p.Scores.Brier), float64(p.Base.Brier))
			got, _, err := f.Build()
			require.NoError(t, err)
			out := make([]predictor.Prediction, 1)
			got.Predict(80, []predictor.Query{{Prompt: 120, Age: 20}}, out)
			require.InDelta(t, 1, out[0].P, 0.6)
		})
	}
}

func TestAutoTakesTheBest(t *testing.T) {
	h, err := FromTrace(write(t, "trace.csv", csv(800)))
	require.NoError(t, err)
	p, f := train(t, "auto", h)
	require.Len(t, p.Compared, 2)
	require.Equal(t, p.Kind, f.Kind)
	for _, c := range p.Compared {
		require.LessOrEqual(t, float64(p.Scores.Brier), float64(c.Brier))
	}
	require.NotEqual(t, predictor.KindSurvival, p.Kind, "prompt length tells the answers apart")
}

func TestMooncakesClockIsNoDate(t *testing.T) {
	var b strings.Builder
	for i := range 100 {
		fmt.Fprintf(&b, `{"timestamp":%d,"input_length":600,"output_length":%d,"hash_ids":[%d,7]}`+"\n", 3000*i, 10+i%50, i%2)
	}
	h, err := FromTrace(write(t, "trace.jsonl", b.String()))
	require.NoError(t, err)
	require.Equal(t, []string{"0s", "4m57s"}, []string{h.Source.From, h.Source.To})
	require.NotZero(t, h.Samples[0].Key, "recurring prompts have a key")
	require.Equal(t, h.Samples[0].Key, h.Samples[2].Key)
	require.NotEqual(t, h.Samples[0].Key, h.Samples[1].Key)
}

func TestALogTeachesWhatEndedByItself(t *testing.T) {
	ok := logLine{model: "m", prompt: 100, output: 30, totalMs: 2000, attempts: 1, outcome: "ok"}
	left, again, empty, keyed, other := ok, ok, ok, ok, ok
	left.outcome, left.output = "client_closed", 5
	again.attempts = 2
	empty.output = 0
	keyed.at, keyed.key = 3*time.Second, "0000000000000abc"
	other.at, other.model = time.Second, "n"
	h, err := FromLog(write(t, "log", joined([]logLine{ok, left, again, empty, keyed, other})))
	require.NoError(t, err)
	require.Equal(t, []predictor.Sample{
		{End: 2 * time.Second, Prompt: 100, Output: 30},
		{At: time.Second, End: 3 * time.Second, Prompt: 100, Output: 30},
		{At: 3 * time.Second, End: 5 * time.Second, Prompt: 100, Output: 30, Key: 0xabc},
	}, h.Samples)
	require.Equal(t, []string{"2026-11-20T10:00:00Z", "2026-11-20T10:00:03Z"}, []string{h.Source.From, h.Source.To})
	require.Equal(t, []string{
		"the log has 2 models, m, n; they were fitted together",
		"2 requests were cancelled, failed or made no token, and were left out",
		"1 requests of several attempts were left out: their tokens may be those of several answers",
	}, h.Notes)

	_, err = FromLog(write(t, "log", joined([]logLine{left, again})))
	require.ErrorContains(t, err, "none of 2 requests ended by itself at the first attempt")
	h, err = FromLog(write(t, "log", joined([]logLine{ok})))
	require.NoError(t, err)
	require.Contains(t, h.Notes[0], "no prompt_key")
}

func TestTrainErrors(t *testing.T) {
	h, err := FromTrace(write(t, "trace.csv", csv(40)))
	require.NoError(t, err)
	folder := t.TempDir()
	for _, tc := range []struct {
		name, kind, out, says string
	}{
		{"too few requests", "survival", "fit.json", "want at least 50"},
		{"a file where the plot goes", "survival", "fit.svg", "the reliability plot goes there"},
		{"a kind nobody can train", "oracle", "fit.json", `kind "oracle" cannot be trained`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Train(tc.kind, h, predictor.Options{}, filepath.Join(folder, tc.out))
			require.ErrorContains(t, err, tc.says)
		})
	}
	h, err = FromTrace(write(t, "trace.csv", csv(100)))
	require.NoError(t, err)
	_, err = Train("survival", h, predictor.Options{}, filepath.Join(folder, "none", "fit.json"))
	require.ErrorIs(t, err, os.ErrNotExist)
	left, err := os.ReadDir(folder)
	require.NoError(t, err)
	require.Empty(t, left, "nothing half written stays")
}

func TestPredictionAsTextAndJSON(t *testing.T) {
	h, err := FromTrace(write(t, "trace.csv", csv(800)))
	require.NoError(t, err)
	p, _ := train(t, "auto", h)
	var b bytes.Buffer
	require.NoError(t, p.WriteText(&b))
	for _, want := range []string{"800 requests from 2026-11-20T10:00:00Z", "sha256 ", "ROC-AUC", "survival", "exact", "base rate",
		"predicted   ended     rows", "plot: "} {
		require.Contains(t, b.String(), want)
	}
	require.Equal(t, 1, strings.Count(b.String(), "<- "+p.File), "the one kind that was written is marked")

	data, err := json.Marshal(p)
	require.NoError(t, err)
	var got map[string]any
	require.NoError(t, json.Unmarshal(data, &got))
	require.ElementsMatch(t, []string{"kind", "horizon", "source", "trained_on", "held_out", "holdout", "base", "compared", "reliability",
		"file", "plot"}, slices.Sorted(maps.Keys(got)))
	scores := []string{"rows", "auc", "brier", "conditional_mae"}
	require.ElementsMatch(t, scores, slices.Sorted(maps.Keys(got["holdout"].(map[string]any))))
	require.ElementsMatch(t, scores, slices.Sorted(maps.Keys(got["base"].(map[string]any))))
	require.ElementsMatch(t, append(scores, "kind"), slices.Sorted(maps.Keys(got["compared"].([]any)[0].(map[string]any))))
}

func TestScoresThatAreNotDefined(t *testing.T) { // every answer ends within the horizon: one class
	var b strings.Builder
	b.WriteString("TIMESTAMP,ContextTokens,GeneratedTokens\n")
	for i := range 100 {
		fmt.Fprintf(&b, "%d,100,%d\n", i, 1+i%10)
	}
	h, err := FromTrace(write(t, "trace.csv", b.String()))
	require.NoError(t, err)
	p, _ := train(t, "survival", h)
	var out bytes.Buffer
	require.NoError(t, p.WriteText(&out))
	require.Regexp(t, `survival +- +0\.0000`, out.String())
	data, err := json.Marshal(p)
	require.NoError(t, err)
	require.Contains(t, string(data), `"auc":null`)
}

func TestReliabilityPlot(t *testing.T) {
	h, err := FromTrace(write(t, "trace.csv", csv(800)))
	require.NoError(t, err)
	p, _ := train(t, "survival", h)
	require.Equal(t, strings.TrimSuffix(p.File, ".json")+".svg", p.Plot)
	svg, err := os.ReadFile(p.Plot)
	require.NoError(t, err)
	d := xml.NewDecoder(bytes.NewReader(svg))
	for {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
	}
	for _, want := range []string{"predicted probability to end within the horizon", "share that did", "survival, horizon 80"} {
		require.Contains(t, string(svg), want)
	}
}

func TestReliabilityInATerminal(t *testing.T) {
	var b bytes.Buffer
	writeReliability(&b, []predictor.Reliability{{Rows: 10, P: 0, Ended: 0.5}, {Rows: 7, P: 0.5, Ended: 0.1}, {Rows: 3, P: 1, Ended: 1}})
	require.Equal(t, "\n"+
		"predicted   ended     rows  0                                                 1\n"+
		"    0.000   0.500       10  |########################\n"+
		"    0.500   0.100        7  #####                    |\n"+
		"    1.000   1.000        3  ##################################################|\n", b.String())
}

func TestThePlotStandsBesideTheFile(t *testing.T) {
	for _, tc := range []struct{ name, out, plot string }{
		{"the ending is replaced", "a/fit.json", "a/fit.svg"},
		{"no ending", "fit", "fit.svg"},
		{"a dot in the folder", "a.b/fit", "a.b/fit.svg"},
		{"several dots", "conv.2026.json", "conv.2026.svg"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := plotPath(tc.out)
			require.NoError(t, err)
			require.Equal(t, tc.plot, got)
		})
	}
}
