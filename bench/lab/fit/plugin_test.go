package fit

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

const pluginFolder = "../../../configs/vllm"

// python runs python3 in the plugin's folder; the test is skipped without one.
func python(t *testing.T, env []string, args ...string) {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("there is no python3 here, so the vLLM plugin was not tested")
	}
	cmd := exec.Command(path, append([]string{"-B"}, args...)...) // -B: leave no __pycache__
	cmd.Dir = pluginFolder
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

func TestVLLMPlugin(t *testing.T) {
	python(t, nil, "-m", "unittest", "-q", "test_evenkeel_step_trace")
}

// drive is vLLM as far as the plugin sees it: two engines of one process with
// 2,000 blocks together, 300 steps of 2 ms + 1 ms per 1,000 tokens. Rank 1 has
// work for the first 200.
const drive = `
import time
from types import SimpleNamespace as O
from unittest import mock
from evenkeel_step_trace import StepTrace
both = O(cache_config=O(num_gpu_blocks=2000, block_size=16))
ranks = [StepTrace(both, 0), StepTrace(both, 1)]
now = 1763632800.0
for step in range(300):
    blocks = [200 + step % 50, 100 + 4 * (step % 70)]
    for rank, t in enumerate(ranks):
        if rank == 0 or step < 200:
            with mock.patch("time.time", return_value=now + rank * 0.0002):
                t.record(O(num_running_reqs=5, kv_cache_usage=blocks[rank] / 1000), None, engine_idx=rank)
    largest = 16 * max(blocks if step < 200 else blocks[:1])
    now += 0.002 + largest * 1e-6
`

func TestATraceOfThePluginIsFitted(t *testing.T) {
	path := filepath.Join(t.TempDir(), "steps.jsonl")
	python(t, []string{"EVENKEEL_STEP_TRACE=" + path}, "-c", drive)
	s, err := ReadStepTrace(path)
	require.NoError(t, err)
	require.Len(t, s.Groups[0].Steps, 300)
	f := StepModels(s)
	g := f.Groups[0]
	require.Empty(t, g.Refused)
	require.Equal(t, []int{2, 299}, []int{g.Ranks, g.N})
	require.InDelta(t, 2, float64(g.C0), 0.01)
	require.InEpsilon(t, 0.001, float64(g.C1), 0.01)
}
