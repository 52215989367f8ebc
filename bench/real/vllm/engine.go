package vllm

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"evenkeel/bench/process"
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

// Engine is a process of `vllm serve` with those it started, one process group.
type Engine struct {
	*process.Process
	URL string
	Log string // its file
}

// Serve starts an engine at a port of the loopback interface. It has not
// answered yet. env comes after the environment that all engines have.
func (i *Installation) Serve(model string, port int, log string, env []string, flags ...string) (*Engine, error) {
	cmd := exec.Command(filepath.Join(i.venv(), "bin", "vllm"), append([]string{
		"serve", model, "--served-model-name", ModelName, "--host", "127.0.0.1", "--port", strconv.Itoa(port),
		"--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
	}, flags...)...)
	cmd.Env = append(append(append(os.Environ(), "PATH="+i.venv()+"/bin:"+os.Getenv("PATH")), environment...), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p, err := process.Start(cmd, log)
	if err != nil {
		return nil, err
	}
	return &Engine{Process: p, URL: "http://127.0.0.1:" + strconv.Itoa(port), Log: log}, nil
}

// Ready waits until the engine answers: one to five minutes, since it loads a
// compiler, a model and a worker for each rank.
func (e *Engine) Ready(ctx context.Context, limit time.Duration) error {
	err := process.Await(ctx, limit, e.URL+" is healthy", func() bool {
		select {
		case <-e.Gone():
			return true
		default:
		}
		ask, stop := context.WithTimeout(ctx, 2*time.Second)
		defer stop()
		req, err := http.NewRequestWithContext(ask, http.MethodGet, e.URL+"/health", nil)
		if err != nil {
			return false
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	select {
	case <-e.Gone():
		err = fmt.Errorf("the engine ended: %w", e.Err())
	default:
	}
	if err != nil {
		return fmt.Errorf("%w; its log is %s", err, e.Log)
	}
	return nil
}

// Signal goes to the engine and to all that it started.
func (e *Engine) Signal(s syscall.Signal) error { return syscall.Kill(-e.Pid, s) }

// Stop ends the engine and returns once it is gone. Nil was never started.
func (e *Engine) Stop() {
	if e == nil {
		return
	}
	_ = e.Signal(syscall.SIGTERM) // an error: it has ended
	select {
	case <-e.Gone():
	case <-time.After(15 * time.Second):
	}
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if err := e.Signal(syscall.SIGKILL); errors.Is(err, syscall.ESRCH) {
			break // nobody of the group is left
		}
	}
	<-e.Gone()
}
