package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/rigs/testbed"
)

// configPath is where the image's command looks for its config.
const configPath = "/etc/evenkeel/evenkeel.yaml"

// check runs the image in front of engines as `evenkeel demo` has them: two that prefill, and
// eight ranks that decode together.
func (b builder) check(ctx context.Context, tag, folder string, out io.Writer) (err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if b.name() == "docker" {
		defer func() { _, gone := b.do(context.WithoutCancel(ctx), "rmi", "-f", tag); err = errors.Join(err, gone) }()
	}
	var prefill []string
	for range 2 {
		e, err := refengine.Start(refengine.Config{Role: refengine.Prefill, Model: refengine.Model{Name: "demo"}})
		if err != nil {
			return err
		}
		defer e.Close()
		prefill = append(prefill, e.URLs()...)
	}
	decode, err := refengine.Start(refengine.Config{Role: refengine.Decode, Model: refengine.Model{Name: "demo"}, DPSize: 8, Slots: 16})
	if err != nil {
		return err
	}
	defer decode.Close()
	at := testbed.FreeAddresses(2)
	config := fmt.Sprintf("listen: %q\nadmin: {listen: %q}\n", at[0], at[1]) +
		testbed.Engines(testbed.EnginesAt(prefill, ""), testbed.EnginesAt(decode.URLs(), ", slots: 16"))
	file := filepath.Join(folder, "evenkeel.yaml")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		return err
	}

	cmd, how, err := b.command(ctx, tag, file, folder)
	if cmd == nil {
		if err == nil {
			fmt.Fprintf(out, "%s has the image; to run it is left out: %s\n", b.name(), how)
		}
		return err
	}
	log := filepath.Join(folder, "log")
	began := time.Now()
	p, err := testbed.Start(cmd, log)
	if err != nil {
		return err
	}
	defer p.Kill()
	answer, err := ask(ctx, p, at)
	if err == nil {
		err = p.End(20 * time.Second)
	}
	if err != nil {
		text, _ := os.ReadFile(log)
		return fmt.Errorf("%s: %w\n%s", how, err, text)
	}
	fmt.Fprintf(out, "the image, loaded by %s, run %s: it was ready, %s, and ended when it was told to; %.1f s\n", b.name(), how, answer,
		time.Since(began).Seconds())
	return nil
}

// ask waits until the proxy is ready and sends it one chat completion, whose answer is
// checked token by token.
func ask(ctx context.Context, p *testbed.Process, at []string) (string, error) {
	if err := p.Answers(ctx, 20*time.Second, "http://"+at[1]+"/readyz"); err != nil {
		return "", err
	}
	const tokens = 20
	r, err := load.Run(ctx, load.Config{
		URLs: []string{"http://" + at[0]}, Requests: []trace.Request{{Prompt: 200, Output: tokens}},
		Concurrency: 1, Chat: 1, Stream: 1, Timeout: 20 * time.Second,
	})
	if err != nil {
		return "", err
	}
	if r.OK != 1 {
		return "", fmt.Errorf("a chat completion failed: %+v", r.Failures)
	}
	return fmt.Sprintf("a chat completion had its %d tokens", tokens), nil
}

// command is what runs the image: docker or podman, or where neither can, the image's
// root filesystem with chroot. No command and no error: nothing here can.
func (b builder) command(ctx context.Context, tag, config, folder string) (cmd *exec.Cmd, how string, err error) {
	if b.name() != "buildah" {
		flags := []string{"run", "--rm", "--read-only", "--network", "host", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"}
		why := b.refuses(ctx, append(flags[:len(flags):len(flags)], tag, "version"))
		if why == "" {
			flags = append(flags, "-v", config+":"+configPath+":ro", tag)
			return exec.CommandContext(ctx, b[0], append(b[1:len(b):len(b)], flags...)...), "by " + b.name() + ", read-only", nil
		}
		tool := builder{"buildah"}.inside(folder)
		if b.name() == "docker" || tool.refuses(ctx, []string{"info"}) != "" {
			return nil, why, nil
		}
		b = tool // it reads podman's storage
	}
	return b.chroot(ctx, tag, config)
}

// refuses is why a command of the tool fails; empty: it works.
func (b builder) refuses(ctx context.Context, args []string) string {
	if _, err := b.do(ctx, args...); err != nil {
		return err.Error()
	}
	return ""
}

// chroot runs the image's command as its user in its root filesystem, which is mounted
// read-only for this process alone. It wants root's rights, and Linux.
func (b builder) chroot(ctx context.Context, tag, config string) (cmd *exec.Cmd, how string, err error) {
	if os.Getuid() != 0 || (builder{"unshare"}).refuses(ctx, []string{"--mount", "true"}) != "" {
		return nil, "no container can be started here, and without root's rights neither can chroot", nil
	}
	inspected, err := b.do(ctx, "inspect", "--type", "image", tag)
	if err != nil {
		return nil, "", err
	}
	var about struct {
		OCIv1 struct {
			Config struct {
				User            string
				Entrypoint, Cmd []string
			}
		}
	}
	if err := json.Unmarshal([]byte(inspected), &about); err != nil {
		return nil, "", fmt.Errorf("buildah inspect: %w", err)
	}
	image := about.OCIv1.Config
	if uid, _, _ := strings.Cut(image.User, ":"); uid == "" || uid == "0" || uid == "root" {
		return nil, "", fmt.Errorf("the image runs as root: its user is %q", image.User)
	}
	container, err := b.do(ctx, "from", "--pull=never", tag)
	if err != nil {
		return nil, "", err
	}
	root, err := b.do(ctx, "mount", container)
	if err != nil {
		return nil, "", err
	}
	in := filepath.Join(root, configPath)
	if err := os.MkdirAll(filepath.Dir(in), 0o755); err != nil { // as container runtimes do
		return nil, "", err
	}
	text, err := os.ReadFile(config)
	if err != nil {
		return nil, "", err
	}
	if err := os.WriteFile(in, text, 0o644); err != nil {
		return nil, "", err
	}
	const script = `mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && ! touch "$0/written" 2>/dev/null && exec chroot --userspec="$1" --groups= "$0" "${@:2}"`
	args := append([]string{"--mount", "bash", "-c", script, root, image.User}, append(image.Entrypoint, image.Cmd...)...)
	return exec.CommandContext(ctx, "unshare", args...),
		"with chroot as user " + image.User + ", read-only (no container can be started here)", nil
}
