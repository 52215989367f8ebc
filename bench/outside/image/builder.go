package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
)

// builder is the command that every call of a tool begins with.
type builder []string

// find is the first tool that works here. docker may be installed without its daemon.
func find(ctx context.Context) (b builder, why string) {
	var tried []string
	for _, tool := range []struct{ name, works string }{{"docker", "version"}, {"podman", "info"}, {"buildah", "info"}} {
		if _, err := exec.LookPath(tool.name); err != nil {
			continue
		}
		if err := exec.CommandContext(ctx, tool.name, tool.works).Run(); err == nil {
			return builder{tool.name}, ""
		}
		tried = append(tried, fmt.Sprintf("%s is installed, but `%s %s` fails", tool.name, tool.name, tool.works))
	}
	return nil, strings.Join(append(tried, "neither docker, podman nor buildah works here"), "; ")
}

func (b builder) name() string { return b[0] }

// inside has the tool keep images and containers in a folder that goes away with the
// check. docker's daemon has a place of its own.
func (b builder) inside(folder string) builder {
	if b.name() == "docker" {
		return b
	}
	return builder{b.name(), "--root", filepath.Join(folder, "store"), "--runroot", filepath.Join(folder, "run"), "--storage-driver", "vfs"}
}

// do runs a command of the tool and returns what it prints.
func (b builder) do(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, b[0], append(b[1:len(b):len(b)], args...)...)
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = fmt.Errorf("%s %s: %w: %s", b.name(), args[0], err, exit.Stderr)
	}
	return strings.TrimSpace(string(out)), err
}

// load has the tool read the archive, and returns the name by which it knows the image.
func (b builder) load(ctx context.Context, archive, tag string) (string, error) {
	if b.name() == "buildah" {
		return b.do(ctx, "pull", "--quiet", "docker-archive:"+archive)
	}
	_, err := b.do(ctx, "load", "--quiet", "--input", archive)
	return tag, err
}
