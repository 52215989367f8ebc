// Package ranks has a real engine of which two data-parallel ranks step together, the clients that
// ask it, and what these saw. Commands that measure such engines share it.
package ranks

import (
	"context"
	_ "embed"
	"fmt"
	"net"
	"strconv"

	"evenkeel/bench/rigs/real/vllm"
	"evenkeel/bench/rigs/testbed"
)

// What the engine is.
const (
	Count      = 2
	Slots      = 8 // of a rank
	ContextLen = 8192
	Block      = 64
)

//go:embed plugin.py
var plugin []byte

// Plugin writes what vLLM needs for a MoE model on data-parallel ranks, and returns the folder that
// PYTHONPATH must have.
func Plugin(w *testbed.World) (string, error) {
	site := w.File("ranks")
	return site, vllm.Plugin(site, "evenkeel_ranks", plugin)
}

// Start starts vLLM with a MoE model on two ranks, each bound to a core. It tells its settings, and
// has not answered yet. Its log, and the steps of each rank, are files of that name.
func Start(ctx context.Context, w *testbed.World, in *vllm.Installation, name string, flags ...string) (*vllm.Engine, error) {
	model, err := in.Model(ctx)
	if err != nil {
		return nil, err
	}
	site, err := Plugin(w)
	if err != nil {
		return nil, err
	}
	_, free, _ := net.SplitHostPort(testbed.FreeAddresses(1)[0]) // it came from a listener
	port, err := strconv.Atoi(free)
	if err != nil {
		return nil, err
	}
	e, err := in.Serve(model, port, w.File(name+".log"),
		[]string{
			"PYTHONPATH=" + site, "EVENKEEL_STEPS=" + w.File(name+".steps"),
			"VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=0|1", "VLLM_SERVER_DEV_MODE=1",
		},
		append([]string{
			"--data-parallel-size", fmt.Sprint(Count), "--api-server-count", "1", "--max-model-len", fmt.Sprint(ContextLen), "--max-num-seqs",
			fmt.Sprint(Slots),
			"--block-size", fmt.Sprint(Block), "--no-enable-prefix-caching",
		}, flags...)...)
	if err != nil {
		return nil, err
	}
	w.AtEnd(e.Stop)
	return e, nil
}
