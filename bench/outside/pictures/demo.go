package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"evenkeel/bench/outside/browser"
	"evenkeel/bench/rigs/testbed"
)

// drawDemo runs the demo, which writes a report, and takes pictures of that. Its
// steps take twice as long as by default, so that a machine which draws keeps up.
func drawDemo(ctx context.Context, o options, w *testbed.World, b *browser.Browser, out io.Writer) error {
	fmt.Fprintf(out, "the demo, %d requests a policy\n", o.requests)
	folder := w.File("demo")
	cmd := exec.CommandContext(ctx, w.Binary, "demo", "--out", folder, "--policies", "jsq-kv,jsq,br0,evenkeel", "--requests",
		strconv.Itoa(o.requests),
		"--c0", "10ms", "--c1", "400ns", "--prefill-base", "18ms", "--prefill-per-token", "18us")
	said, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, said)
	}
	fmt.Fprintf(out, "%s\n", said) // README has the table of this run
	for name, scheme := range map[string]string{"demo-report": "light", "demo-report-dark": "dark"} {
		if err := b.Visit("file://"+filepath.Join(folder, "report.html"), scheme, 1180, 1640); err != nil {
			return err
		}
		if err := b.Shoot(filepath.Join(o.out, name+".png"), false, out); err != nil {
			return err
		}
	}
	moving, err := os.ReadFile(filepath.Join(folder, "waterline.svg"))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(o.out, "waterline.svg"), moving, 0o644)
}
