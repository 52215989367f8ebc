package vllm

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/rigs/testbed"
)

// offline keeps Python from asking anything of the network.
var offline = []string{"HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1"}

// environment of every engine: a CPU, one thread a worker, and nothing but the
// loopback interface.
var environment = append([]string{
	"VLLM_TARGET_DEVICE=cpu", "CUDA_VISIBLE_DEVICES=", "OMP_NUM_THREADS=1", "VLLM_HOST_IP=127.0.0.1", "GLOO_SOCKET_IFNAME=lo",
}, offline...)

// ModelName is what every engine calls its model.
const ModelName = "tiny"

// TokenIDs are n random token ids, none of them special.
func TokenIDs(n int, rng *rand.Rand) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = 10 + rng.IntN(990)
	}
	return list
}

// Engine is a process of `vllm serve` with those it started, one process group.
type Engine struct {
	*testbed.Process
	URL string
	Log string // its file
}

// Serve starts an engine at a port of the loopback interface. It has not
// answered yet. env comes after the environment that all engines have.
func (i *Installation) Serve(model string, port int, log string, env []string, flags ...string) (*Engine, error) {
	cmd := exec.Command(i.Bin("vllm"), append([]string{
		"serve", model, "--served-model-name", ModelName, "--host", "127.0.0.1", "--port", strconv.Itoa(port),
		"--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
	}, flags...)...)
	cmd.Env = append(append(append(os.Environ(), "PATH="+filepath.Dir(i.Python())+":"+os.Getenv("PATH")), environment...), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p, err := testbed.Start(cmd, log)
	if err != nil {
		return nil, err
	}
	return &Engine{Process: p, URL: "http://127.0.0.1:" + strconv.Itoa(port), Log: log}, nil
}

// Ready waits until the engine answers: one to five minutes, since it loads a
// compiler, a model and a worker for each rank.
func (e *Engine) Ready(ctx context.Context, limit time.Duration) error {
	if err := e.Answers(ctx, limit, e.URL+"/health"); err != nil {
		return fmt.Errorf("%w; its last errors are %q; its log is %s", err, e.lastErrors(), e.Log)
	}
	return nil
}

// lastErrors are the last lines of its log that tell of an error.
func (e *Engine) lastErrors() (last []string) {
	text, err := os.ReadFile(e.Log)
	if err != nil {
		return []string{err.Error()}
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, "Error") {
			last = append(last, strings.TrimSpace(line))
		}
	}
	return last[max(0, len(last)-3):]
}

// Running says whether the engine was started and has not ended.
func (e *Engine) Running() bool { return e != nil && e.Process.Running() }

// Signal goes to the engine and to all that it started.
func (e *Engine) Signal(s syscall.Signal) {
	_ = syscall.Kill(-e.Pid, s) // an error: none of them is left
}

// Kill is kill -9 of the engine and of all that it started; it returns once they
// are gone. Nil was never started.
func (e *Engine) Kill() {
	if e == nil {
		return
	}
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if err := syscall.Kill(-e.Pid, syscall.SIGKILL); errors.Is(err, syscall.ESRCH) {
			break // nobody of the group is left
		}
	}
	<-e.Gone()
}

// Stop ends the engine as an operator would, and kills what is left. Nil was
// never started.
func (e *Engine) Stop() {
	if e == nil {
		return
	}
	e.Signal(syscall.SIGCONT)
	e.Signal(syscall.SIGTERM)
	select {
	case <-e.Gone():
	case <-time.After(15 * time.Second):
	}
	e.Kill()
}

// SignalCore goes to the processes of the engine that compute, and not to its API server,
// which goes on answering /health and /metrics. It fails where the engine has none.
func (e *Engine) SignalCore(s syscall.Signal) error {
	found := false
	names, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return err
	}
	for _, name := range names {
		comm, err := os.ReadFile(name)
		if err != nil || !strings.HasPrefix(string(comm), "VLLM") {
			continue // a process that has ended, or another program's
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if err != nil {
			return err
		}
		if group, err := syscall.Getpgid(pid); err != nil || group != e.Pid {
			continue
		}
		if err := syscall.Kill(pid, s); err != nil {
			return fmt.Errorf("process %d of the engine: %w", pid, err)
		}
		found = true
	}
	if !found {
		return fmt.Errorf("the engine with process group %d has no process whose name begins with VLLM", e.Pid)
	}
	return nil
}
