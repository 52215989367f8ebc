package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/pyenv"
	"evenkeel/bench/rigs/testbed"
)

// Versions of what is installed. The example proxies ask for a fastapi below 0.124.
const (
	sglangRouter = "0.3.2"
	vllmRouter   = "0.1.17"
	fastapi      = "0.123.10"
)

// peer is another router.
type peer struct {
	name, version string
	connector     refengine.Connector
	missing       string                                        // why it is not run; empty: it is
	ready         string                                        // path that answers 200 when it is
	command       func(at string, e engines) (*exec.Cmd, error) // nil: it is evenkeel
}

// engines are where a router finds engines.
type engines struct {
	prefill, decode []string // URLs
	rooms           []string // bootstrap ports of those that prefill
}

// run starts it, and waits until it is ready.
func (p *peer) run(ctx context.Context, b *bench, at string, e engines) (end func(), err error) {
	if p.command == nil {
		return b.evenkeel(ctx, p.connector, at, e)
	}
	cmd, err := p.command(at, e)
	if err != nil {
		return nil, err
	}
	process, err := testbed.Start(cmd, b.world.File(strings.ReplaceAll(p.name, " ", "-")+".log"))
	if err != nil {
		return nil, err
	}
	if err := process.Answers(ctx, time.Minute, "http://"+at+p.ready); err != nil {
		process.Kill()
		return nil, err
	}
	return process.Kill, nil
}

// peers installs what is missing, and lists all.
func (b *bench) peers(ctx context.Context) ([]*peer, error) {
	env, err := pyenv.At(b.cache, "peers")
	if err != nil {
		return nil, err
	}
	if !env.Has(ctx, "sglang-router", sglangRouter, "vllm-router", vllmRouter, "fastapi", fastapi) {
		fmt.Fprintf(b.out, "routers are being installed into %s: 400 MB\n", env.Dir)
		if err := errors.Join(env.Create(ctx),
			env.Run(ctx, "python", "-m", "pip", "-q", "install", "sglang-router=="+sglangRouter, "vllm-router=="+vllmRouter,
				"fastapi=="+fastapi, "httpx", "uvicorn", "aiohttp", "orjson")); err != nil {
			return nil, fmt.Errorf("a Python package index must be there that pip can reach: %w", err)
		}
	}
	list := []*peer{
		{name: "vllm-router", version: vllmRouter, connector: refengine.NIXLPull, ready: "/health",
			command: routed(env, "vllm-router", []string{"--vllm-pd-disaggregation", "--policy", "round_robin"}, false)},
		{name: "sglang-router", version: sglangRouter, connector: refengine.SGLang, ready: "/readiness",
			command: routed(env, "smg", []string{"launch", "--pd-disaggregation", "--policy", "random"}, true)},
		{name: "sglang-router, mini", version: sglangRouter, connector: refengine.SGLang, ready: "/health",
			command: routed(env, "smg", []string{"launch", "--pd-disaggregation", "--mini-lb"}, true)},
	}
	for _, example := range []struct {
		name, file string
		connector  refengine.Connector
	}{
		{"vllm-ascend's example", "load_balance_proxy_server_example.py", refengine.AscendMooncake},
		{"vllm-ascend's layerwise example", "load_balance_proxy_layerwise_server_example.py", refengine.AscendLayerwise},
	} {
		p := &peer{name: example.name, connector: example.connector, ready: "/healthcheck"}
		list = append(list, p)
		if b.ascend == "" {
			p.missing = "name a clone of vllm-ascend with `-ascend`"
			continue
		}
		said, err := exec.CommandContext(ctx, "git", "-C", b.ascend, "log", "-1", "--format=of %cs, %h").Output()
		if err != nil {
			return nil, fmt.Errorf("-ascend %s: %w", b.ascend, err)
		}
		p.version = strings.TrimSpace(string(said))
		p.command = b.example(env, filepath.Join(b.ascend, "examples", "disaggregated_prefill_v1", example.file))
	}
	for _, c := range []refengine.Connector{refengine.NIXLPull, refengine.SGLang, refengine.AscendMooncake, refengine.AscendLayerwise} {
		list = append(list, &peer{name: "evenkeel", connector: c})
	}
	return list, nil
}

// routed starts a router whose flags are those of SGLang's, which vLLM's was made from.
func routed(env pyenv.Env, program string, flags []string, rooms bool) func(at string, e engines) (*exec.Cmd, error) {
	return func(at string, e engines) (*exec.Cmd, error) {
		host, port, err := net.SplitHostPort(at)
		if err != nil {
			return nil, err
		}
		_, metrics, err := net.SplitHostPort(testbed.FreeAddresses(1)[0])
		if err != nil {
			return nil, err
		}
		args := append(append([]string{}, flags...), "--host", host, "--port", port, "--prometheus-port", metrics)
		for i, u := range e.prefill {
			args = append(args, "--prefill", u)
			if rooms {
				args = append(args, e.rooms[i])
			}
		}
		for _, u := range e.decode {
			args = append(args, "--decode", u)
		}
		return exec.Command(env.Bin(program), args...), nil
	}
}

// example starts an example proxy of vllm-ascend. One imports a logger and a constant from packages
// that want an accelerator: it gets these two alone.
func (b *bench) example(env pyenv.Env, file string) func(at string, e engines) (*exec.Cmd, error) {
	return func(at string, e engines) (*exec.Cmd, error) {
		site := b.world.File("site")
		for path, text := range map[string]string{
			"vllm/logger.py": "import logging\n\n\ndef init_logger(name):\n    return logging.getLogger(name)\n",
			"vllm_ascend/distributed/kv_transfer/kv_p2p/sfa_pd_rd2h/protocol.py": "BATCH_KV_TRANSFER_PARAMS = \"batch_kv_transfer_params\"\n",
		} {
			if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(site, path)), 0o755),
				os.WriteFile(filepath.Join(site, path), []byte(text), 0o600)); err != nil {
				return nil, err
			}
		}
		host, port, err := net.SplitHostPort(at)
		if err != nil {
			return nil, err
		}
		args := []string{file, "--host", host, "--port", port}
		for role, urls := range map[string][]string{"prefiller": e.prefill, "decoder": e.decode} {
			hosts, ports := []string{"--" + role + "-hosts"}, []string{"--" + role + "-ports"}
			for _, text := range urls {
				u, err := url.Parse(text)
				if err != nil {
					return nil, err
				}
				hosts, ports = append(hosts, u.Hostname()), append(ports, u.Port())
			}
			args = append(append(args, hosts...), ports...)
		}
		cmd := exec.Command(env.Bin("python"), args...)
		cmd.Env = append(os.Environ(), "PYTHONPATH="+site)
		return cmd, nil
	}
}
