// Command pictures makes the pictures of docs/img from real runs: the live page
// and the terminal view of a proxy under load while one of its ranks is down,
// and the report of a demo. What others have drawn there (bench/outside/dashboards) it
// only makes smaller.
//
//	go run ./bench/outside/pictures               # make pictures
//	go run ./bench/outside/pictures -only demo
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"evenkeel/bench/outside/browser"
	"evenkeel/bench/rigs/testbed"
)

func main() { testbed.Main("pictures", run) }

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	o, err := parse(args)
	if err != nil {
		return err
	}
	path, err := browser.Chromium()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	w, err := testbed.New(ctx, "pictures", testbed.Options{Bin: o.binary})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close(true)) }()
	b, err := browser.Open(ctx, path)
	if err != nil {
		return err
	}
	defer b.Close()
	for _, p := range []struct {
		name string
		make func(context.Context, options, *testbed.World, *browser.Browser, io.Writer) error
	}{{"live", drawLive}, {"demo", drawDemo}} {
		if o.only == "" || o.only == p.name {
			if err := p.make(ctx, o, w, b, out); err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
		}
	}
	return browser.Shrink(o.out, out)
}
