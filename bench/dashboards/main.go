// Command dashboards writes Grafana's dashboards from panels.go, and holds them
// against a running system: two regions before reference engines, under load,
// scraped by a real Prometheus, which must have an answer to every panel.
//
//	go run ./bench/dashboards -write configs/grafana
//	go run ./bench/dashboards                          # make dashboards-check
//	go run ./bench/dashboards -pictures docs/img       # and a picture of each dashboard
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "dashboards:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("dashboards", flag.ContinueOnError)
	write := flags.String("write", "", "folder to write the dashboards into, and do nothing else")
	pictures := flags.String("pictures", "", "folder for a picture of each dashboard; empty: none")
	rules := flags.String("rules", "configs/prometheus/rules.yaml", "rules that Prometheus evaluates beside")
	last := flags.Duration("duration", 45*time.Second, "of the load")
	binary := flags.String("bin", "", "the proxy to run; empty: it is built")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *write != "" {
		return writeAll(*write)
	}
	if _, err := exec.LookPath("prometheus"); err != nil {
		return fmt.Errorf("%w; install Debian's package prometheus, nothing was checked", err)
	}
	w, err := begin(ctx, *binary, *rules)
	defer w.close()
	if err != nil {
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
