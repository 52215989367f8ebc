package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/process"
	"evenkeel/bench/real/vllm"
	"evenkeel/bench/refengine"
)

// What the decode engine is.
const (
	ranks      = 2
	slots      = 8 // of a rank
	contextLen = 8192
	block      = 64
	blocks     = 1000 // of a rank; eight of the longest prompts need 650
)

//go:embed plugin.py
var plugin []byte

// world is the engines, and evenkeel before them.
type world struct {
	options
	dir     string
	decode  *vllm.Engine
	prefill *refengine.Engine
	proxy   *process.Process
	listen  string
	admin   string
}

// newWorld starts the engines and waits until they answer.
func newWorld(ctx context.Context, o options) (_ *world, err error) {
	w := &world{options: o, dir: o.keep}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.dir, err = process.Folder(o.keep, "barrier"); err != nil {
		return nil, err
	}
	if w.binary, err = process.Evenkeel(ctx, o.binary, w.dir); err != nil {
		return nil, err
	}
	if err := w.startDecode(ctx); err != nil {
		return nil, err
	}
	w.prefill, err = refengine.Start(refengine.Config{
		Role: refengine.Prefill, Model: vllm.ModelName, MaxModelLen: contextLen, Version: vllm.Version, Connector: refengine.NIXLPull,
		PrefillBase: time.Nanosecond, PrefillPerToken: time.Nanosecond, PrefillConcurrency: 64, KVTokens: 1 << 24, PromptTokensDetails: true,
	})
	return w, err
}

// startDecode starts a MoE model on two ranks, each bound to a core. Its KV comes
// from vLLM's own connector for such measurements, which takes every prompt as
// transferred: a rank computes the last token of a prompt and nothing before it,
// as it does after a real transfer.
func (w *world) startDecode(ctx context.Context) error {
	if w.engine != "" { // it runs already
		w.decode = &vllm.Engine{URL: w.engine}
		return nil
	}
	in, err := vllm.Install(ctx, w.cache, os.Stderr)
	if err != nil {
		return err
	}
	model, err := in.Model(ctx)
	if err != nil {
		return err
	}
	site := filepath.Join(w.dir, "plugin")
	if err := errors.Join(
		vllm.Metadata(site, "evenkeel_barrier", "1", "[vllm.general_plugins]\nevenkeel_barrier = evenkeel_barrier:register\n"),
		os.WriteFile(filepath.Join(site, "evenkeel_barrier.py"), plugin, 0o600),
	); err != nil {
		return err
	}
	port, err := strconv.Atoi(process.FreePort())
	if err != nil {
		return err
	}
	began := time.Now()
	w.decode, err = in.Serve(model, port, filepath.Join(w.dir, "decode.log"),
		[]string{"PYTHONPATH=" + site, "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=0|1"},
		"--data-parallel-size", fmt.Sprint(ranks), "--api-server-count", "1", "--max-model-len", fmt.Sprint(contextLen), "--max-num-seqs", fmt.Sprint(slots),
		"--max-num-batched-tokens", "2048", "--block-size", fmt.Sprint(block), "--num-gpu-blocks-override", fmt.Sprint(blocks), "--no-enable-prefix-caching",
		"--kv-transfer-config", `{"kv_connector":"DecodeBenchConnector","kv_role":"kv_both","kv_connector_extra_config":{"startup_fill":true}}`,
	)
	if err != nil {
		return err
	}
	w.say("the engine starts: one to five minutes")
	if err := w.decode.Ready(ctx, 10*time.Minute); err != nil {
		return err
	}
	w.say("the engine answers after %.0f s", time.Since(began).Seconds())
	return nil
}

// free is an address of the loopback interface that nobody listens on.
func free() string { return net.JoinHostPort("127.0.0.1", process.FreePort()) }

// serve starts evenkeel with a policy, new, so that it has learned nothing yet.
func (w *world) serve(ctx context.Context, policy string) (err error) {
	w.listen, w.admin = "http://"+free(), "http://"+free()
	config := filepath.Join(w.dir, "evenkeel.yaml")
	if err := os.WriteFile(config, fmt.Appendf(nil, `listen: %q
admin: {listen: %q}
self_test: false
profiles:
  prefill: {connector: nixl-pull, kv_hold_timeout: 30s}
  decode: {connector: nixl-pull, kv_hold_timeout: 30s, dp_mode: internal}
engines:
  prefill: [{url: %q, profile: prefill}]
  decode: [{url: %q, profile: decode, group: main, slots: %d, ranks: %d}]
dispatch: {policy: %q}
prefill: {scrape: {timeout: 5s}}
`, strings.TrimPrefix(w.listen, "http://"), strings.TrimPrefix(w.admin, "http://"), w.prefill.URLs()[0], w.decode.URL, slots, ranks, policy), 0o600); err != nil {
		return err
	}
	w.proxy, err = process.Start(exec.Command(w.binary, "serve", "--config", config), filepath.Join(w.dir, "evenkeel.log"))
	if err != nil {
		return err
	}
	return w.proxy.Answers(ctx, w.admin+"/readyz")
}

// stop ends evenkeel.
func (w *world) stop() error {
	if err := w.proxy.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	<-w.proxy.Gone()
	return w.proxy.Err()
}

func (w *world) close() {
	w.proxy.Kill()
	if w.engine == "" {
		w.decode.Stop()
	}
	if w.prefill != nil {
		w.prefill.Close()
	}
}
