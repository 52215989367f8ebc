package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"evenkeel/bench/rigs/pyenv"
)

// aiconfigurator has the times of kernels. Its wheels are those for Linux on x86-64.
const aiconfigurator = "0.12.0"

var wheels = []struct{ name, sha256 string }{
	{"aiconfigurator", "95ef03bfdf2560072e5c47404cbec2fcdd73b8dcdfba72951322e7f1c03de3a9"},
	{"aiconfigurator-core", "aadc4aad0a00bf8a61c477c62bef43de479849c3aa0b1c3078068e08309eccc4"},
}

//go:embed grid.py
var gridProgram []byte

// grid is which steps are asked for. Those whose KV does not fit into a GPU are left out.
type grid struct {
	GPU      string   `json:"gpu"`
	Engines  []string `json:"engines"`
	Models   []string `json:"models"`
	Ranks    []int    `json:"ranks"`
	Rows     []int    `json:"rows"`
	Contexts []int    `json:"contexts"`
	Prompts  []int    `json:"prompts"`
}

// gpus are those that are asked for, by the name that aiconfigurator has for them.
var gpus = map[string]string{"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200", "gb200": "GB200", "b300_sxm": "B300"}

// wanted is the grid of one GPU.
func wanted(gpu string) grid {
	g := grid{
		GPU: gpu, Engines: []string{"vllm", "sglang"}, Ranks: []int{4, 8, 16, 32, 64},
		Rows: []int{8, 16, 32, 64, 128, 256}, Contexts: []int{1000, 4000, 16_000, 64_000}, Prompts: []int{512, 1024, 2048, 4096, 8192},
	}
	for _, m := range models {
		g.Models = append(g.Models, m.name)
	}
	return g
}

// point is a step of the grid, or why there is none.
type point struct {
	GPU     string `json:"gpu"`
	Engine  string `json:"engine"`
	Model   string `json:"model"`
	Ranks   int    `json:"ranks"`
	Phase   string `json:"phase"` // decode or prompt
	Version string `json:"version"`
	Sends   string `json:"sends"` // by which all-to-all; empty: none is needed beside what the engine does anyway
	Rows    int    `json:"rows"`
	Tokens  int    `json:"tokens"` // of each request's context, or of the prompt

	KVBytes   float64 `json:"kv_bytes"` // of each request
	Attention part    `json:"attention"`
	Dense     part    `json:"dense"`
	Sending   part    `json:"sending"`
	Experts   part    `json:"experts"`

	Why string `json:"why"`
}

// part is what a part of a step takes: all of it, and how much of that was measured, in ms.
type part [2]float64

func (p *point) ms() float64 { return p.Attention[0] + p.Dense[0] + p.Sending[0] + p.Experts[0] }

// install has the packages in a cache folder. What is downloaded is checked before any of it runs.
func install(ctx context.Context, cache string, out io.Writer) (env pyenv.Env, err error) {
	if env, err = pyenv.At(cache, "laws"); err != nil {
		return env, err
	}
	if env.Has(ctx, "aiconfigurator", aiconfigurator, "aiconfigurator-core", aiconfigurator) {
		return env, nil
	}
	fmt.Fprintf(out, "aiconfigurator is being installed into %s: 1 GB\n", env.Dir)
	if err := env.Create(ctx); err != nil {
		return env, err
	}
	from := filepath.Join(env.Dir, "wheels")
	args := []string{"-m", "pip", "-q", "install"}
	for _, w := range wheels {
		if err := env.Run(ctx, "python", "-m", "pip", "-q", "download", "--no-deps", "--only-binary=:all:", "-d", from,
			w.name+"=="+aiconfigurator); err != nil {
			return env, fmt.Errorf("a Python package index must be there that pip can reach: %w", err)
		}
		files, err := filepath.Glob(filepath.Join(from, strings.ReplaceAll(w.name, "-", "_")+"-"+aiconfigurator+"-*.whl"))
		if err != nil || len(files) != 1 {
			return env, fmt.Errorf("%s has %d wheels of %s %s, not one: remove the folder", from, len(files), w.name, aiconfigurator)
		}
		wheel, err := os.ReadFile(files[0])
		if err != nil {
			return env, err
		}
		if sum := sha256.Sum256(wheel); hex.EncodeToString(sum[:]) != w.sha256 {
			return env, fmt.Errorf("%s has SHA-256 %x, not %s: it is another wheel than the one the page was made with", files[0], sum, w.sha256)
		}
		args = append(args, files[0])
	}
	return env, env.Run(ctx, "python", args...)
}

// ask has the steps of all GPUs, as many GPUs at once as there are processors. Their order is
// always the same.
func ask(ctx context.Context, env pyenv.Env, out io.Writer) (all []point, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	systems := slices.Sorted(maps.Keys(gpus))
	points := make([][]point, len(systems))
	var workers sync.WaitGroup
	free := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i, system := range systems {
		workers.Go(func() {
			free <- struct{}{}
			defer func() { <-free }()
			var err error
			if points[i], err = askOne(ctx, env, wanted(system)); err != nil {
				cancel(fmt.Errorf("%s: %w", system, err))
				return
			}
			fmt.Fprintf(out, "%s: %d steps\n", gpus[system], len(points[i]))
		})
	}
	workers.Wait()
	return slices.Concat(points...), context.Cause(ctx)
}

func askOne(ctx context.Context, env pyenv.Env, g grid) ([]point, error) {
	told, err := json.Marshal(g)
	if err != nil {
		return nil, err
	}
	var said, trouble bytes.Buffer
	cmd := exec.CommandContext(ctx, env.Bin("python"), "-", string(told))
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = env.Dir, bytes.NewReader(gridProgram), &said, &trouble
	if err := cmd.Run(); err != nil {
		text := trouble.Bytes()
		return nil, fmt.Errorf("grid.py: %w: %s", err, text[max(0, len(text)-1000):])
	}
	return parse(&said)
}

// parse reads what grid.py prints. What libraries print between is left out.
func parse(from *bytes.Buffer) (all []point, err error) {
	for line := range strings.Lines(from.String()) {
		if !strings.HasPrefix(line, "{") {
			continue
		}
		var p point
		if err := json.Unmarshal([]byte(line), &p); err != nil {
			return nil, fmt.Errorf("grid.py printed %q: %w", line, err)
		}
		if p.GPU = gpus[p.GPU]; p.GPU == "" {
			return nil, fmt.Errorf("grid.py printed a GPU that it was not asked for: %q", line)
		}
		all = append(all, p)
	}
	if len(all) == 0 {
		return nil, errors.New("grid.py printed no steps")
	}
	return all, nil
}
