package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/real/ranks"
	"evenkeel/bench/rigs/real/vllm"
	"evenkeel/bench/rigs/testbed"
)

const blocks = 1000 // of a rank's KV cache; eight of the longest prompts need 650

// site is the engines, and evenkeel in front of them.
type site struct {
	*testbed.World
	options
	decode  *vllm.Engine
	prefill *refengine.Engine
	proxy   *testbed.Proxy
}

// build starts the engines and waits until they answer.
func (w *site) build(ctx context.Context) error {
	if err := w.startDecode(ctx); err != nil {
		return err
	}
	engines, err := w.Engines(refengine.Config{
		Role: refengine.Prefill, Model: refengine.Model{Name: vllm.ModelName, MaxLen: ranks.ContextLen}, Version: vllm.Version,
		Connector: refengine.NIXLPull,
		Prompts:   refengine.Prompts{Base: time.Nanosecond, PerToken: time.Nanosecond, Concurrency: 64}, KV: refengine.KV{Tokens: 1 << 24},
		Answers: refengine.Answers{PromptTokensDetails: true},
	})
	if err != nil {
		return err
	}
	w.prefill = engines[0]
	return nil
}

// startDecode starts a MoE model on two ranks, each bound to a core. Its KV comes
// from vLLM's own connector for such measurements, which takes every prompt as
// transferred: a rank computes the last token of a prompt and nothing before it,
// as it does after a real transfer.
func (w *site) startDecode(ctx context.Context) error {
	in, err := vllm.Install(ctx, w.Cache, os.Stderr)
	if err != nil {
		return err
	}
	began := time.Now()
	w.decode, err = ranks.Start(ctx, w.World, in, "decode", "--max-num-batched-tokens", "2048", "--num-gpu-blocks-override",
		fmt.Sprint(blocks),
		"--kv-transfer-config", `{"kv_connector":"DecodeBenchConnector","kv_role":"kv_both","kv_connector_extra_config":{"startup_fill":true}}`)
	if err != nil {
		return err
	}
	w.Logf("the engine starts: one to five minutes")
	if err := w.decode.Ready(ctx, 10*time.Minute); err != nil {
		return err
	}
	w.Logf("the engine answers after %.0f s", time.Since(began).Seconds())
	return nil
}

// serve starts evenkeel with a policy, new, so that it has learned nothing yet.
func (w *site) serve(ctx context.Context, policy string) error {
	w.proxy = w.Proxies("evenkeel")[0]
	return w.proxy.ServeWith(ctx, fmt.Sprintf(`listen: %q
admin: {listen: %q}
self_test: false
profiles:
  prefill: {connector: nixl-pull, kv_hold_timeout: 30s}
  decode: {connector: nixl-pull, kv_hold_timeout: 30s, dp_mode: internal}
dispatch: {policy: %q}
prefill: {scrape: {timeout: 5s}}
%s`, w.proxy.Clients, w.proxy.Address, policy, testbed.Engines(
		testbed.EnginesAt(w.prefill.URLs(), ", profile: prefill"),
		testbed.EnginesAt([]string{w.decode.URL}, ", profile: decode, group: main, slots: %d, ranks: %d", ranks.Slots, ranks.Count))))
}
