package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"evenkeel/bench/rigs/real/vllm"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/mooncake"
)

// What the rows reckon with.
const (
	model      = vllm.ModelName
	contextLen = 2048 // tokens
	blockSize  = 32
	slots      = 8
	budget     = 512 // tokens of a step, of engines that prefill and decode
	// blocks of each engine's KV cache. It is small, so that a row can have the
	// prefill engine overwrite what it held.
	blocks = 1000
)

// startPatience is how long an engine may take to start. On two idle cores four
// engines take about two minutes; beside other programs they take many more.
const startPatience = 30 * time.Minute

// engine is a vLLM, which may be started again at its address.
type engine struct {
	*vllm.Engine // nil before the first start
	name, log    string
	port         int
	side         int    // the port of NIXL's side channel
	ranks        int    // of an engine that is several; else 0
	mixture      bool   // its model is a mixture of experts, whose ranks step together
	plugins      string // further folders for PYTHONPATH
	flags        []string
	installed    *vllm.Installation
	answered     bool // since its last start
}

// connectors are those that rows run before, by what a profile calls them and by what vLLM does.
// With none of them, engines prefill and decode.
var connectors = map[string]string{mooncake.NIXLPull: "NixlConnector", mooncake.NIXLPush: "NixlPushConnector", mooncake.None: ""}

// handsOver is the flag that makes an engine hand KV over.
func (o *options) handsOver(role string) []string {
	return []string{"--kv-transfer-config", `{"kv_connector":"` + connectors[o.connector] + `","kv_role":"` + role + `","kv_buffer_device":"cpu"}`}
}

func (e *engine) url() string { return fmt.Sprintf("http://127.0.0.1:%d", e.port) }

// start starts the engine and does not wait for it.
func (e *engine) start() (err error) {
	e.answered = false
	folder := "tiny"
	if e.mixture {
		folder = "moe"
	}
	flags := e.flags
	if e.ranks > 0 {
		flags = append(flags, "--data-parallel-size", fmt.Sprint(e.ranks))
	}
	e.Engine, err = e.installed.Serve(filepath.Join(e.installed.Dir, folder), e.port, e.log,
		[]string{
			"PYTHONPATH=" + filepath.Join(e.installed.Dir, "plugin") + e.plugins, "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_SERVER_DEV_MODE=1",
			"VLLM_CPU_OMP_THREADS_BIND=nobind",
			"UCX_TLS=tcp,self,sm", "UCX_NET_DEVICES=lo", "UCX_RCACHE_MAX_UNRELEASED=1024",
			"VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1", fmt.Sprint("VLLM_NIXL_SIDE_CHANNEL_PORT=", e.side),
		},
		append([]string{
			"--max-model-len", fmt.Sprint(contextLen), "--max-num-seqs", fmt.Sprint(slots), "--block-size", fmt.Sprint(blockSize),
			"--num-gpu-blocks-override", fmt.Sprint(blocks), "--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
			// Clients that say nothing of it get answers that can be compared.
			"--override-generation-config", `{"temperature":0}`,
		}, flags...)...)
	return err
}

// ready waits until the engine answers.
func (e *engine) ready(ctx context.Context) error {
	if err := e.Ready(ctx, startPatience); err != nil {
		return fmt.Errorf("engine %s: %w", e.name, err)
	}
	e.answered = true
	return nil
}

// series is what the engine's /metrics says.
func (e *engine) series(ctx context.Context) (map[string]float64, error) {
	got := ask(ctx, "GET", e.url()+"/metrics", nil)
	if got.Status != 200 {
		return nil, errors.Join(got.Err, fmt.Errorf("%s: /metrics answered %d", e.name, got.Status))
	}
	return testbed.Series(got.Body), nil
}

// gauge adds up the series of one vLLM metric.
func gauge(series map[string]float64, name string) (sum float64) {
	for key, v := range series {
		if strings.HasPrefix(key, "vllm:"+name+"{") {
			sum += v
		}
	}
	return sum
}

// held are the gauges that are 0 while an engine has nothing to do.
var held = []string{"num_requests_running", "num_requests_waiting", kvUsage}

const kvUsage = "kv_cache_usage_perc" // a share of 1
