// Command dashboards writes Grafana's dashboards from panels.go, and holds them
// against a running system: two regions in front of reference engines, under load,
// scraped by a real Prometheus, which must have an answer to every panel.
//
//	go run ./bench/outside/dashboards -write configs/grafana
//	go run ./bench/outside/dashboards                          # every panel and rule is asked for
//	go run ./bench/outside/dashboards -pictures docs/img       # and a picture of each dashboard
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"time"

	"evenkeel/bench/rigs/testbed"
)

func main() { testbed.Main("dashboards", run) }

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("dashboards", flag.ContinueOnError)
	write := flags.String("write", "", "folder to write the dashboards into, and do nothing else")
	pictures := flags.String("pictures", "", "folder for a picture of each dashboard; empty: none")
	rules := flags.String("rules", "configs/prometheus/rules.yaml", "rules that Prometheus evaluates beside")
	last := flags.Duration("duration", 90*time.Second, "of the load; advice wants a minute")
	binary := flags.String("bin", "", "the proxy to run; empty: it is built")
	if err := testbed.Parse(flags, args); err != nil {
		return err
	}
	if *write != "" {
		return writeAll(*write)
	}
	if _, err := exec.LookPath("prometheus"); err != nil {
		return fmt.Errorf("%w; install Debian's package prometheus, nothing was checked", err)
	}
	rulesFile, err := filepath.Abs(*rules)
	if err != nil {
		return err
	}
	w := &site{}
	if w.World, err = testbed.New(ctx, "dashboards", testbed.Options{Bin: *binary}); err != nil {
		return err
	}
	defer func() { _ = w.Close(true) }()
	if err := w.build(ctx, rulesFile); err != nil {
		return err
	}
	fmt.Fprintf(out, "two regions under load for %v\n", *last)
	if err := w.load(ctx, *last); err != nil {
		return err
	}
	if err := w.check(ctx, out); err != nil {
		return err
	}
	if *pictures == "" {
		return nil
	}
	return w.draw(ctx, *pictures, out)
}
