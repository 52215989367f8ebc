// Command image makes the container image of evenkeel from a binary and the list of
// authorities that TLS trusts. It is from scratch, so that nothing is pulled and no
// registry is asked. With -check it also runs the image in front of reference engines, as
// its user and with a root filesystem that cannot be written, and asks it.
//
//	go run ./bench/tools/release/image -tag evenkeel:dev            # make image
//	go run ./bench/tools/release/image -check                       # make image-check
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"evenkeel/bench/rigs/testbed"
)

const dockerfile = "configs/container/Dockerfile"

func main() { testbed.Main("image", run) }

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("image", flag.ContinueOnError)
	binary := flags.String("bin", "bin/evenkeel", "the program, for Linux and without cgo")
	tag := flags.String("tag", "evenkeel:check", "name of the image")
	check := flags.Bool("check", false, "run the image, and keep nothing; end well, with a word, where it cannot be built or run")
	if err := flags.Parse(args); err != nil {
		return err
	}
	folder, err := os.MkdirTemp("", "evenkeel-image-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	b, why := find(ctx)
	if b == nil {
		if *check {
			fmt.Fprintf(out, "image-check is left out: %s\n", why)
			return nil
		}
		return fmt.Errorf("%s; on Debian: apt-get install buildah", why)
	}
	if *check {
		b = b.inside(folder)
	}
	if err := b.build(ctx, *binary, *tag, folder); err != nil {
		return err
	}
	if !*check {
		fmt.Fprintf(out, "%s has the image %s\n", b.name(), *tag)
		return nil
	}
	return b.check(ctx, *tag, folder, out)
}

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

// bundles are where systems keep the authorities that TLS trusts: Debian and Alpine,
// Fedora, macOS.
var bundles = []string{"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"}

// build lays what the image has into a folder and has the tool make the image of it.
func (b builder) build(ctx context.Context, binary, tag, folder string) error {
	lie := filepath.Join(folder, "context")
	if err := os.Mkdir(lie, 0o755); err != nil {
		return err
	}
	if err := copyFile(filepath.Join(lie, "evenkeel"), 0o755, binary); err != nil {
		return fmt.Errorf("%w; make build makes it", err)
	}
	if err := copyFile(filepath.Join(lie, "ca-certificates.crt"), 0o644, bundles...); err != nil {
		return fmt.Errorf("%w; install the package ca-certificates", err)
	}
	_, err := b.do(ctx, "build", "-t", tag, "-f", dockerfile, lie)
	return err
}

// copyFile copies the first of the files that is there.
func copyFile(to string, mode os.FileMode, from ...string) error {
	var text []byte
	err := os.ErrNotExist
	for _, f := range from {
		if text, err = os.ReadFile(f); err == nil {
			return os.WriteFile(to, text, mode)
		}
	}
	return err
}
