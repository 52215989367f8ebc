package main

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strconv"

	"evenkeel/bench/world"
)

// bandsOnly leaves of a report the plots of the first and the last policy, side
// by side, and says how high that is.
const bandsOnly = `(() => {
	const legend = document.querySelector('.legend');
	const loads = [...document.querySelectorAll('figure')].filter((f) => f.querySelector('h3'));
	const row = document.createElement('div');
	row.style.cssText = 'display: grid; grid-template-columns: 1fr 1fr; gap: 1.5rem';
	row.append(loads[0], loads.at(-1));
	document.body.style.cssText = 'max-width: none; padding: 1rem 1.25rem 0';
	document.body.replaceChildren(legend, row);
	return document.body.scrollHeight;
})()`

// drawDemo runs the demo, which writes a report, and takes pictures of that. Its
// steps take twice as long as by default, so that a machine which draws keeps up.
func drawDemo(ctx context.Context, o options, w *world.World, b *browser, out io.Writer) error {
	fmt.Fprintf(out, "the demo, %d requests a policy\n", o.requests)
	folder := w.File("demo")
	cmd := exec.CommandContext(ctx, w.Binary, "demo", "--out", folder, "--policies", "jsq,jsq-kv,br0,evenkeel", "--requests", strconv.Itoa(o.requests),
		"--c0", "10ms", "--c1", "400ns", "--prefill-base", "18ms", "--prefill-per-token", "18us")
	if said, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, said)
	}
	if err := b.visit("file://"+filepath.Join(folder, "report.html"), "light", 1180, 1640); err != nil {
		return err
	}
	if err := b.shoot(filepath.Join(o.out, "demo-report.png"), false, out); err != nil {
		return err
	}
	if err := b.resize(1280, 900); err != nil {
		return err
	}
	said, err := b.eval(bandsOnly)
	if err != nil {
		return fmt.Errorf("the report has no two plots to set side by side: %w", err)
	}
	height, err := strconv.ParseInt(said, 10, 64)
	if err != nil {
		return err
	}
	if err := b.resize(1280, height); err != nil {
		return err
	}
	return b.shoot(filepath.Join(o.out, "bands.png"), false, out)
}
