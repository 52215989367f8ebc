package gateway_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/config"
	"evenkeel/predictor"
)

// writeFit writes a fit file made from so many requests, and returns how many
// outputs are in it.
func writeFit(t *testing.T, path, kind string, outputs int, output int32) int {
	t.Helper()
	samples := make([]predictor.Sample, outputs)
	for i := range samples {
		samples[i] = predictor.Sample{At: time.Duration(i) * time.Second, Prompt: 10, Output: output + int32(i%2)}
	}
	fit, err := predictor.Train(kind, samples, predictor.Options{})
	require.NoError(t, err)
	text, err := fit.Encode()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path+".new", text, 0o600))
	require.NoError(t, os.Rename(path+".new", path))
	return fit.Outputs.Len()
}

func (c *cluster) predictor() (p struct {
	Kind          string
	Outputs, Keys int
}) {
	s := c.gw.Status(context.Background()).Dispatch.Models
	if len(s) > 0 && len(s[0].Predictors) > 0 {
		p.Kind, p.Outputs, p.Keys = s[0].Predictors[0].Kind, s[0].Predictors[0].Outputs, s[0].Predictors[0].Keys
	}
	return p
}

func (c *cluster) file(path string) []byte {
	c.Helper()
	text, err := os.ReadFile(path)
	require.NoError(c, err)
	return text
}

func TestPredictionsFromAFileThatIsSwapped(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file, secret, log := filepath.Join(dir, "fit.json"), filepath.Join(dir, "secret"), filepath.Join(dir, "decisions.jsonl")
	require.NoError(t, os.WriteFile(secret, []byte("thirty-two bytes that nobody has\n"), 0o600))
	fitted := writeFit(t, file, "survival", 70, 300)
	c := start(t, options{configure: func(cfg *config.Config) {
		cfg.Predictor = board.PredictorConfig{Kind: "exact", File: file, SecretFile: secret}
		cfg.Dispatch.Policy = "brh:horizon=80"
		cfg.Dispatch.DecisionLog.File = log
		cfg.Dispatch.StepModel = board.StepModel{C0Ms: 50, C1Ms: 0.01}
	}})
	require.Equal(t, "brh:horizon=80,predictor=exact", c.gw.Policy())
	c.Eventually("the file's outputs are learned", func() bool { return c.predictor().Outputs == fitted })

	for range 2 {
		require.Equal(t, "right", c.Judge("the same prompt", `"stream":true,`))
	}
	require.Equal(t, "right", c.Judge("another prompt", `"stream":true,`))
	c.Eventually("what finished is learned, by prompt", func() bool { p := c.predictor(); return p.Outputs == fitted+3 && p.Keys == 2 })
	c.settled(false)

	keys := map[string]int{}
	for _, r := range c.Records() {
		require.Len(t, r.PromptKey, 16)
		keys[r.PromptKey]++
	}
	require.Len(t, keys, 2, "the same prompt has the same key")

	require.NoError(t, os.WriteFile(secret, []byte("short\n"), 0o600))
	c.Eventually("a bad secret is told", func() bool {
		return c.Metric(`evenkeel_reloads_total{key="predictor.secret_file",outcome="refused"}`) == 1
	})
	promptKey := func() string {
		require.Equal(t, "right", c.Judge("the same prompt", `"stream":true,`))
		c.settled(false)
		all := c.Records()
		return all[len(all)-1].PromptKey
	}
	require.Equal(t, 2, keys[promptKey()], "the one before stays in force")
	require.NoError(t, os.WriteFile(secret, []byte("thirty-two bytes, but other ones\n"), 0o600))
	c.Eventually("another secret is in force", func() bool {
		return c.Metric(`evenkeel_reloads_total{key="predictor.secret_file",outcome="used"}`) == 1
	})
	require.Zero(t, keys[promptKey()])
	require.Contains(t, string(c.file(log)), `"in":{"policy":"brh:horizon=80,predictor=exact"`)
	require.NotContains(t, string(c.file(log)), "the same prompt")
	require.EqualValues(t, 0.05, c.Metric(`evenkeel_step_model_c0_seconds{group="main",source="configured"}`))

	fitted = writeFit(t, file, "survival", 90, 20)
	c.Eventually("the new file is read", func() bool { return c.predictor().Outputs == fitted })
	require.Equal(t, 1, c.logs.FilterMessage("predictions start anew from the fit file").Len())
	require.NoError(t, os.WriteFile(file, []byte("{}"), 0o600))
	c.Eventually("a bad file is told", func() bool {
		return c.logs.FilterMessageSnippet("a changed file is not used").Len() == 1
	})
	require.Equal(t, fitted, c.predictor().Outputs)
}
