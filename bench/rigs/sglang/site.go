package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/rigs/pyenv"
	"evenkeel/bench/rigs/testbed"
)

// startPatience is how long all servers together may take to start. On two idle cores it is two
// minutes.
const startPatience = 30 * time.Minute

// The servers, by their places in the command line of servers.py.
const (
	plain   = iota // is asked directly
	first          // these two are behind one evenkeel,
	second         //
	prefill        // and these behind another one
	decode
	servers
)

// site is the servers, and two evenkeels in front of them.
type site struct {
	*testbed.World
	port   int
	env    pyenv.Env
	launch io.WriteCloser // what the process that starts servers reads
	alone  *testbed.Proxy // in front of the two that prefill and decode
	pair   *testbed.Proxy
}

func (w *site) url(server int) string { return fmt.Sprintf("http://127.0.0.1:%d", w.port+server) }

// bootstrap is the port of the prefill engine's bootstrap server.
func (w *site) bootstrap() int { return w.port + servers }

func newSite(ctx context.Context, o options, env pyenv.Env, model string) (_ *site, err error) {
	w := &site{port: o.port, env: env}
	if w.World, err = testbed.New(ctx, "sglang", o.Options); err != nil {
		return nil, err
	}
	list := w.Proxies("alone", "pair")
	w.alone, w.pair = list[0], list[1]
	if err := w.start(ctx, model); err != nil {
		return nil, errors.Join(err, w.Close(false))
	}
	return w, nil
}

func (w *site) start(ctx context.Context, model string) error {
	args := []string{w.env.Dir + "/servers.py"}
	for server := range servers {
		line := fmt.Sprintf("--model-path %s --served-model-name %s --lora-paths %s=nowhere --device cpu --host 127.0.0.1 --port %d "+
			"--context-length 2048 --skip-server-warmup --enable-metrics --enable-cache-report",
			model, base, adapter, w.port+server)
		switch server {
		case prefill:
			line += fmt.Sprintf(" --disaggregation-mode prefill --disaggregation-bootstrap-port %d", w.bootstrap())
		case decode:
			line += " --disaggregation-mode decode"
		}
		args = append(args, line)
	}
	cmd := exec.Command(w.env.Bin("python"), args...)
	cmd.Dir = w.Dir
	cmd.Env = append(os.Environ(), "OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1", "EVENKEEL_ROOMS="+w.File("rooms"))
	var err error
	if w.launch, err = cmd.StdinPipe(); err != nil {
		return err
	}
	process, err := w.Start("servers", cmd)
	if err != nil {
		return err
	}
	w.AtEnd(w.killAll)
	for server := range servers {
		if err := process.Answers(ctx, startPatience, w.url(server)+"/model_info"); err != nil {
			return fmt.Errorf("%w; %s says why", err, w.File("servers.log"))
		}
	}
	head := func(p *testbed.Proxy) string {
		return fmt.Sprintf("listen: %q\nadmin: {listen: %q}\nprofiles:\n  sgl: {connector: sglang, bootstrap_port: %d}\nlimits: {answers: 512}\n",
			p.Clients, p.Address, w.bootstrap())
	}
	both := []string{w.url(first), w.url(second)}
	if err := w.alone.ServeWith(ctx,
		head(w.alone)+testbed.Aggregated(testbed.EnginesAt(both, ", profile: sgl, slots: 16, barrier: none"))); err != nil {
		return err
	}
	return w.pair.ServeWith(ctx, head(w.pair)+testbed.Engines(
		testbed.EnginesAt([]string{w.url(prefill)}, ", profile: sgl"),
		testbed.EnginesAt([]string{w.url(decode)}, ", profile: sgl, group: main, slots: 16")))
}

// pids are the processes of the servers: those of the last starts.
func (w *site) pids() (list [servers]int) {
	text, _ := os.ReadFile(w.File("servers.log")) // without it there are none
	for line := range strings.Lines(string(text)) {
		var server, pid int
		if n, err := fmt.Sscanf(line, "%d %d\n", &server, &pid); err == nil && n == 2 && server >= 0 && server < servers &&
			len(strings.Fields(line)) == 2 {
			list[server] = pid
		}
	}
	return list
}

func (w *site) kill(server int) {
	if pid := w.pids()[server]; pid > 0 {
		_ = syscall.Kill(pid, syscall.SIGKILL) // an error: it has ended
	}
}

func (w *site) killAll() {
	for server := range servers {
		w.kill(server)
	}
}

// again starts a server anew, and waits until it answers.
func (w *site) again(ctx context.Context, server int) error {
	if _, err := fmt.Fprintln(w.launch, "start", server); err != nil {
		return err
	}
	return testbed.Await(ctx, startPatience, "the server answers again", func() bool {
		return ask(ctx, "GET", w.url(server)+"/model_info", nil).Status == 200
	})
}
