// Package pyenv makes virtual environments of Python in cache folders, for what
// benchmarks run beside evenkeel and a Python package index has.
package pyenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Env is a folder, and the virtual environment in it.
type Env struct{ Dir string }

// At is the environment in a folder, which is made; "" is one of that name in the
// user's cache folder.
func At(dir, name string) (Env, error) {
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return Env{}, fmt.Errorf("%w; name a folder by -cache", err)
		}
		dir = filepath.Join(cache, "evenkeel", name)
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return Env{}, err
	}
	return Env{dir}, os.MkdirAll(dir, 0o755)
}

// Folder is that of the virtual environment.
func (e Env) Folder() string { return filepath.Join(e.Dir, "venv") }

// Bin is a program of the environment, such as python.
func (e Env) Bin(name string) string { return filepath.Join(e.Folder(), "bin", name) }

// Has says whether the environment holds distributions: name and version, in turn.
func (e Env) Has(ctx context.Context, pairs ...string) bool {
	return exec.CommandContext(ctx, e.Bin("python"), append([]string{"-c",
		"import sys; from importlib.metadata import version as v; a = sys.argv[1:]; assert [v(d) for d in a[::2]] == a[1::2]"},
		pairs...)...).Run() == nil
}

// Create makes the environment anew, with the first Python that is not too old.
func (e Env) Create(ctx context.Context) error {
	const check = "import sys, venv, ensurepip; assert (3, 11) <= sys.version_info[:2] < (3, 15), 'it is Python ' + sys.version"
	var tried []error
	for _, python := range []string{"python3", "python3.14", "python3.13", "python3.12", "python3.11"} {
		if err := Tool(ctx, e.Dir, python, "-c", check); err != nil {
			tried = append(tried, err)
			continue
		}
		return Tool(ctx, e.Dir, python, "-m", "venv", e.Folder())
	}
	return fmt.Errorf("this needs Python 3.11 to 3.14 with the modules venv and ensurepip (Debian's package is python3-venv): %w",
		errors.Join(tried...))
}

// Run runs a program of the environment, such as pip, in its folder. Its error has
// the end of what the program said.
func (e Env) Run(ctx context.Context, program string, args ...string) error {
	return Tool(ctx, e.Dir, e.Bin(program), args...)
}

// Tool runs a program in a folder. Its error has the end of what the program said.
func Tool(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	return Output(cmd)
}

// Output runs a command; its error has the last of what the command said.
func Output(cmd *exec.Cmd) error {
	said, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, said[max(0, len(said)-1000):])
	}
	return nil
}
