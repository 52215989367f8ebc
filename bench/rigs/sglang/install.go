package main

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"evenkeel/bench/rigs/pyenv"
	"evenkeel/bench/rigs/real/vllm"
)

// version is of SGLang.
const version = "0.5.23"

// beside is what SGLang imports and an installation of vLLM lacks.
var beside = []string{"orjson", "py-spy", "python-dateutil", "scipy", "xxhash", "zstandard", "soundfile==0.13.1", "gguf"}

//go:embed python/*.py
var scripts embed.FS

// install makes an environment with SGLang's Python files, on top of an installation of vLLM, which
// has torch and all else that they import. What only GPUs use stays away: python/absent.py stands
// in for it.
func install(ctx context.Context, dir string, out io.Writer) (env pyenv.Env, model string, err error) {
	base, err := vllm.Install(ctx, "", out)
	if err != nil {
		return env, "", err
	}
	if model, err = base.Model(ctx); err != nil {
		return env, "", err
	}
	if env, err = pyenv.At(dir, "sglang"); err != nil {
		return env, "", err
	}
	if !env.Has(ctx, "sglang", version) {
		fmt.Fprintf(out, "SGLang %s is being installed into %s: 300 MB\n", version, env.Dir)
		if err := lay(ctx, env, base); err != nil {
			return env, "", fmt.Errorf("SGLang %s cannot be installed: %w", version, err)
		}
	}
	return env, model, write(env)
}

// onto.py has an environment see the packages of another one, behind its own.
const onto = `
import os, subprocess, sys, sysconfig
site = sysconfig.get_paths()["purelib"]
other = subprocess.run([sys.argv[1], "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], check=True, capture_output=True, text=True).stdout
open(os.path.join(site, "onto.pth"), "w").write(other)
`

func lay(ctx context.Context, env pyenv.Env, base *vllm.Installation) error {
	err := errors.Join(os.RemoveAll(env.Folder()), pyenv.Tool(ctx, env.Dir, base.Python(), "-m", "venv", env.Folder()))
	if err != nil {
		return err
	}
	if err := env.Run(ctx, "python", "-c", onto, base.Python()); err != nil {
		return err
	}
	for _, packages := range [][]string{beside, {"sglang==" + version}} {
		if err := env.Run(ctx, "python", append([]string{"-m", "pip", "-q", "install", "--no-deps"}, packages...)...); err != nil {
			return fmt.Errorf("a Python package index must be there that pip can reach: %w", err)
		}
	}
	return nil
}

// write writes the scripts of this program, which may be other ones than last time.
func write(env pyenv.Env) error {
	return fs.WalkDir(scripts, "python", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := scripts.ReadFile(name)
		return errors.Join(err, os.WriteFile(filepath.Join(env.Dir, path.Base(name)), text, 0o600))
	})
}
