// Command image makes the container image of evenkeel from a binary, as
// configs/container/Dockerfile says, the authorities that TLS trusts and the licences. It needs no
// other tool, pulls nothing, and the same binary and SOURCE_DATE_EPOCH give the same bytes. With
// -check it also runs the image in front of reference engines, as its user and with a root
// filesystem that cannot be written, and asks it.
//
//	go run ./bench/outside/image -tag evenkeel:dev                     # make image: docker, podman or buildah has it
//	go run ./bench/outside/image -tag evenkeel:dev -out image.tar      # make release: a file for `docker load`
//	go run ./bench/outside/image -check                                # make image-check
package main

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"evenkeel/bench/rigs/testbed"
)

func main() { testbed.Main("image", run) }

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("image", flag.ContinueOnError)
	binary := flags.String("bin", "bin/evenkeel", "the program, for Linux and without cgo")
	tag := flags.String("tag", "evenkeel:check", "name of the image")
	file := flags.String("out", "", "write the image to this file, and load it nowhere")
	check := flags.Bool("check", false, "run the image, and keep nothing; end well, with a word, where it cannot be built or run")
	if err := testbed.Parse(flags, args); err != nil {
		return err
	}
	if *file != "" {
		return write(ctx, *file, *binary, *tag)
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
	archive := filepath.Join(folder, "image.tar")
	if err := write(ctx, archive, *binary, *tag); err != nil {
		return err
	}
	image, err := b.load(ctx, archive, *tag)
	if err != nil {
		return err
	}
	if !*check {
		fmt.Fprintf(out, "%s has the image %s\n", b.name(), *tag)
		return nil
	}
	return b.check(ctx, image, folder, out)
}

// write makes the archive.
func write(ctx context.Context, to, binary, tag string) (err error) {
	text, err := os.ReadFile(dockerfile)
	if err != nil {
		return err
	}
	var r recipe
	if err := r.read(string(text)); err != nil {
		return err
	}
	program, err := os.ReadFile(binary)
	if err != nil {
		return fmt.Errorf("%w; make build makes it", err)
	}
	arch, err := platform(program)
	if err != nil {
		return fmt.Errorf("%s: %w", binary, err)
	}
	at := time.Unix(0, 0)
	if epoch := os.Getenv("SOURCE_DATE_EPOCH"); epoch != "" {
		seconds, err := strconv.ParseInt(epoch, 10, 64)
		if err != nil {
			return fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
		}
		at = time.Unix(seconds, 0)
	}
	licences := exec.CommandContext(ctx, "bench/tools/release/licences.sh")
	licences.Stderr = os.Stderr
	texts, err := licences.Output()
	if err != nil {
		return fmt.Errorf("%s: %w", licences.Path, err)
	}
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return r.archive(f, map[string]file{
		"evenkeel": {0o755, program}, "ca-certificates.crt": {0o644, authorities()}, "licences.txt": {0o644, texts},
	}, tag, arch, at)
}

// platform is the architecture of a program that runs in an image without a C library.
func platform(program []byte) (arch string, err error) {
	info, err := buildinfo.Read(bytes.NewReader(program))
	if err != nil {
		return "", err
	}
	set := map[string]string{}
	for _, s := range info.Settings {
		set[s.Key] = s.Value
	}
	if set["GOOS"] != "linux" || set["CGO_ENABLED"] != "0" {
		return "", fmt.Errorf("it is for %s, with CGO_ENABLED=%s; build it with GOOS=linux CGO_ENABLED=0", set["GOOS"], set["CGO_ENABLED"])
	}
	return set["GOARCH"], nil
}
