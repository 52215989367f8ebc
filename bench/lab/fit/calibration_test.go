package fit

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	prefillfit "evenkeel/prefill/fit"
	"evenkeel/prefill/policy"
)

// What `fit ttft` prints from a log is what the proxy learns of the same
// requests while it runs, and takes as its start.
func TestTheProxyLearnsTheLineThatALogShows(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	learned := prefillfit.NewCalibration(policy.Latency{}, 1_000_000) // it forgets nothing
	log := &RequestLog{}
	for range 300 {
		prompt := 500 + rng.IntN(20_000)
		cached := rng.IntN(prompt / 2)
		took := (150 + 0.09*float64(prompt-cached)) * (0.95 + 0.1*rng.Float64())
		r := Request{Model: "m", Prefill: "p0/0", Prompt: prompt, Cached: cached, ProbeMs: took, Attempts: 1}
		log.Requests = append(log.Requests, r)
		learned.Add(prefillfit.Sample{New: float64(prompt - cached), Hit: float64(cached), Ms: took})
	}
	shown, err := PrefillLines(log)
	require.NoError(t, err)
	latency, known := learned.Latency()
	require.True(t, known)
	require.Empty(t, shown.Fits[0].Refused)
	require.InEpsilon(t, float64(shown.Fits[0].B), latency.TPMs, 1e-3)
	require.InEpsilon(t, float64(shown.Fits[0].A), latency.T0Ms, 1e-2)
	require.InDelta(t, float64(shown.Fits[0].R2), learned.R2(), 1e-3)
}
