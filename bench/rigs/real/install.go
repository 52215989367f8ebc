package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"evenkeel/bench/rigs/pyenv"
	"evenkeel/bench/rigs/real/vllm"
)

// nodeClient is the official client for Node.
const nodeClient = "openai@6.49.0"

const memoryNeeded = 9 << 30 // of four engines and what runs them

//go:embed python/model.py
var modelScript []byte

//go:embed python/evenkeel_real.py
var plugin []byte

// product is a file or folder of the cache that is made once. What makes it
// does so last, so that a half is not taken for the whole.
type product struct {
	path, what string
	make       func(ctx context.Context, i *vllm.Installation) error
}

var products = []product{
	{"tiny/config.json", "a model of two layers", makeModel},
	{"examples", "the Python client's examples", fetchExamples},
}

// install makes what is missing in the cache folder. The plugin is a file of this
// program and is written anew each time.
func install(ctx context.Context, cache string, out io.Writer) (*vllm.Installation, error) {
	if err := memoryFree(); err != nil {
		return nil, err
	}
	i, err := vllm.Install(ctx, cache, out)
	if err != nil {
		return nil, err
	}
	for _, p := range products {
		if exists(filepath.Join(cache, p.path)) {
			continue
		}
		fmt.Fprintf(out, "installing %s into %s\n", p.what, cache)
		if err := p.make(ctx, i); err != nil {
			return nil, fmt.Errorf("%s could not be installed: %w", p.what, err)
		}
	}
	return i, vllm.Plugin(filepath.Join(cache, "plugin"), "evenkeel_real", plugin)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

func makeModel(ctx context.Context, i *vllm.Installation) error {
	script := filepath.Join(i.Dir, "model.py")
	if err := os.WriteFile(script, modelScript, 0o600); err != nil {
		return err
	}
	return i.Run(ctx, "python", script, "tiny")
}

// fetchExamples unpacks the source distribution of the Python client, which has
// examples that the installed package lacks.
func fetchExamples(ctx context.Context, i *vllm.Installation) error {
	if err := i.Run(ctx, "pip", "download", "--quiet", "--no-deps", "--no-binary", "openai", "--dest", "sdist",
		"openai=="+vllm.OpenAI); err != nil {
		return fmt.Errorf("a Python package index must be there that pip can reach: %w", err)
	}
	archive := "openai-" + vllm.OpenAI
	sources := filepath.Join(i.Dir, "sdist")
	if err := pyenv.Tool(ctx, sources, "tar", "-xzf", archive+".tar.gz"); err != nil {
		return err
	}
	return os.Rename(filepath.Join(sources, archive, "examples"), filepath.Join(i.Dir, "examples"))
}

// memoryFree asks Linux whether the engines fit. Other systems are not asked.
func memoryFree() error {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return nil //nolint:nilerr // there is no such file
	}
	for line := range strings.Lines(string(text)) {
		var kb int64
		if _, err := fmt.Sscanf(line, "MemAvailable: %d kB", &kb); err == nil && kb<<10 < memoryNeeded {
			return fmt.Errorf("%.1f GB of memory are available; the engines want %d GB", float64(kb)/(1<<20), memoryNeeded>>30)
		}
	}
	return nil
}
