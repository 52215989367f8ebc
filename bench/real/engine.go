package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/process"
)

// What the rows reckon with.
const (
	model      = "tiny"
	contextLen = 2048 // tokens
	blockSize  = 32
	slots      = 8
	// blocks of each engine's KV cache. It is small, so that a row can have the
	// prefill engine overwrite what it held.
	blocks = 1000
)

// startPatience is how long an engine may take to start. On two idle cores four
// engines take about two minutes.
const startPatience = 10 * time.Minute

// engine is a vLLM, with all of its processes.
type engine struct {
	name    string
	port    int
	side    int // the port of NIXL's side channel
	flags   []string
	cache   string
	log     string
	process *process.Process
}

// connector is the flag that makes an engine hand KV over.
func connector(role string) []string {
	return []string{"--kv-transfer-config", `{"kv_connector":"NixlConnector","kv_role":"` + role + `","kv_buffer_device":"cpu"}`}
}

func (e *engine) url() string { return fmt.Sprintf("http://127.0.0.1:%d", e.port) }

// start starts the engine and does not wait for it.
func (e *engine) start() (err error) {
	args := []string{"serve", filepath.Join(e.cache, "tiny"), "--served-model-name", model, "--host", "127.0.0.1", "--port", fmt.Sprint(e.port),
		"--dtype", "float32", "--max-model-len", fmt.Sprint(contextLen), "--max-num-seqs", fmt.Sprint(slots), "--block-size", fmt.Sprint(blockSize),
		"--num-gpu-blocks-override", fmt.Sprint(blocks), "--enforce-eager", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
		"--enable-auto-tool-choice", "--tool-call-parser", "hermes",
		// Clients that say nothing of it get answers that can be compared.
		"--override-generation-config", `{"temperature":0}`}
	cmd := exec.Command(filepath.Join(e.cache, "venv/bin/vllm"), append(args, e.flags...)...)
	cmd.Env = append(os.Environ(),
		"PATH="+filepath.Join(e.cache, "venv/bin")+":"+os.Getenv("PATH"), "PYTHONPATH="+filepath.Join(e.cache, "plugin"),
		"VLLM_TARGET_DEVICE=cpu", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES=",
		"HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1",
		"VLLM_HOST_IP=127.0.0.1", "GLOO_SOCKET_IFNAME=lo", "UCX_TLS=tcp,self,sm", "UCX_NET_DEVICES=lo", "UCX_RCACHE_MAX_UNRELEASED=1024",
		"VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1", fmt.Sprint("VLLM_NIXL_SIDE_CHANNEL_PORT=", e.side))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // its workers get its signals too
	e.process, err = process.Start(cmd, e.log)
	return err
}

// running says whether the engine was started and has not ended.
func (e *engine) running() bool {
	if e.process == nil {
		return false
	}
	select {
	case <-e.process.Gone():
		return false
	default:
		return true
	}
}

// ready waits until the engine answers.
func (e *engine) ready(ctx context.Context) error {
	for end := time.Now().Add(startPatience); ; {
		short, cancel := context.WithTimeout(ctx, 2*time.Second)
		got := ask(short, "GET", e.url()+"/health", nil)
		cancel()
		switch {
		case got.status == 200:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case !e.running():
			return fmt.Errorf("engine %s ended while it started: %s", e.name, e.lastWords())
		case time.Now().After(end):
			return fmt.Errorf("engine %s does not answer after %v: %s", e.name, startPatience, e.lastWords())
		}
		if err := process.Pause(ctx, 300*time.Millisecond); err != nil {
			return err
		}
	}
}

// lastWords are the last lines of its log that tell of an error.
func (e *engine) lastWords() string {
	text, err := os.ReadFile(e.log)
	if err != nil {
		return err.Error()
	}
	var last []string
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, "Error") {
			last = append(last, strings.TrimSpace(line))
		}
	}
	return strings.Join(last[max(0, len(last)-3):], " / ") + " (" + e.log + " has the rest)"
}

// signal sends a signal to all processes of the engine.
func (e *engine) signal(s syscall.Signal) {
	if e.process != nil {
		_ = syscall.Kill(-e.process.Pid, s) // an error: there is none left
	}
}

// kill is kill -9 of all processes of the engine.
func (e *engine) kill() {
	if e.process != nil {
		e.signal(syscall.SIGKILL)
		<-e.process.Gone()
	}
}

// end ends the engine as an operator would, and kills what is left.
func (e *engine) end() {
	if e.process == nil {
		return
	}
	e.signal(syscall.SIGCONT)
	_ = e.process.Signal(syscall.SIGTERM)
	select {
	case <-e.process.Gone():
	case <-time.After(15 * time.Second):
	}
	e.kill()
	e.process = nil
}

// series is what the engine's /metrics says.
func (e *engine) series(ctx context.Context) (map[string]float64, error) {
	got := ask(ctx, "GET", e.url()+"/metrics", nil)
	if got.status != 200 {
		return nil, errors.Join(got.err, fmt.Errorf("%s: /metrics answered %d", e.name, got.status))
	}
	return process.Series(got.body), nil
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
var held = []string{"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
