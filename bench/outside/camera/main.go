// Command camera takes a picture of a page. It is for programs of the module above, which cannot
// import the browser: bench/claims/outages runs it.
//
//	go run ./bench/outside/camera                              # starts a browser and ends it, to see that there is one
//	go run ./bench/outside/camera -await SCRIPT URL FILE       # once SCRIPT is true on the page
//	go run ./bench/outside/camera -shrink docs/img/outages     # the pictures of a folder, smaller
package main

import (
	"context"
	"errors"
	"flag"
	"io"

	"evenkeel/bench/outside/browser"
	"evenkeel/bench/rigs/testbed"
)

func main() { testbed.Main("camera", run) }

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("camera", flag.ContinueOnError)
	await := flags.String("await", "true", "JavaScript that is true when the page is ready")
	scheme := flags.String("scheme", "light", "colours of the page: light or dark")
	width, height := flags.Int64("width", 1280, "of the window"), flags.Int64("height", 900, "of the window")
	shrink := flags.String("shrink", "", "folder whose pictures are made smaller; no page is visited then")
	if err := testbed.Parse(flags, args); err != nil {
		return err
	}
	if *shrink != "" {
		return browser.Shrink(*shrink, out)
	}
	if n := flags.NArg(); n != 0 && n != 2 {
		return errors.New("it takes the URL of a page and the file of the picture, or neither")
	}
	path, err := browser.Chromium()
	if err != nil {
		return err
	}
	b, err := browser.Open(ctx, path)
	if err != nil {
		return err
	}
	defer b.Close()
	if flags.NArg() == 0 {
		return nil
	}
	if err := b.Visit(flags.Arg(0), *scheme, *width, *height); err != nil {
		return err
	}
	if err := b.Await(*await); err != nil {
		return err
	}
	return b.Shoot(flags.Arg(1), false, out)
}
