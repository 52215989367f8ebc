package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"

	"evenkeel/bench/lab/trial"
)

// trial has evenkeel's own command play its short form to the first engine, as somebody would who
// has such ranks. It is not measured there: the figures of seconds say nothing. It must tell
// everything, and have an answer for each request.
func (w *site) trial(ctx context.Context, out io.Writer) error {
	file := w.File("trial.json")
	cmd := exec.CommandContext(ctx, w.Binary, "survey", "--trial", "--short", "--engines", w.engines[0].URL, "--out", file)
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("evenkeel survey --trial: %w; what it said stands above, and the engine's log is %s", err, w.engines[0].Log)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var r trial.Report
	if err := json.Unmarshal(text, &r); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if !r.Complete {
		return fmt.Errorf("%s is of a trial that is not the whole: %s", file, r.Why)
	}
	for _, l := range r.Loads {
		for _, p := range l.Pairs {
			for _, b := range []trial.Block{p.Engine, p.Evenkeel} {
				if b.OK != l.Requests {
					return fmt.Errorf("%s, %s: %d of %d requests were answered", l.Name, b.Way, b.OK, l.Requests)
				}
			}
		}
	}
	w.Logf("the file of the trial is %s", file)
	return nil
}
