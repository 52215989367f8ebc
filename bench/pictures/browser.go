package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
)

// browser is a headless Chromium.
type browser struct {
	tab    context.Context // chromedp's contexts are its tabs
	cancel []context.CancelFunc
}

func chromium() (string, error) {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("no Chromium here, so nothing was drawn: apt-get install chromium")
}

func open(ctx context.Context, path string) (*browser, error) {
	allocator, cancel := chromedp.NewExecAllocator(ctx, append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]), chromedp.ExecPath(path), chromedp.NoSandbox)...)
	tab, cancelTab := chromedp.NewContext(allocator)
	b := &browser{tab, []context.CancelFunc{cancelTab, cancel}}
	if err := chromedp.Do(tab); err != nil {
		b.close()
		return nil, fmt.Errorf("%s does not start: %w", path, err)
	}
	return b, nil
}

func (b *browser) close() {
	for _, c := range b.cancel {
		c()
	}
}

// visit shows a page in a colour scheme and a window.
func (b *browser) visit(url, scheme string, width, height int64) error {
	media := emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}}
	return chromedp.Do(b.tab,
		chromedp.EmulateViewport(width, height),
		chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
			_, err := cdp.Call(ctx, t, emulation.SetEmulatedMedia, media)
			return err
		}),
		chromedp.Navigate(url))
}

// await waits until JavaScript says true.
func (b *browser) await(script string) error {
	for range 300 {
		said, err := b.eval(script)
		if err != nil || said == "true" {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
	return fmt.Errorf("after 30 s this is not so: %s", script)
}

func (b *browser) eval(script string) (string, error) {
	return chromedp.Run(b.tab, chromedp.Evaluate[string]("String("+script+")"))
}

// shoot writes what is in the window, or the whole page.
func (b *browser) shoot(file string, whole bool, out io.Writer) error {
	shot := chromedp.CaptureScreenshot()
	if whole {
		shot = chromedp.FullScreenshot(100)
	}
	picture, err := chromedp.Run(b.tab, shot)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, file)
	return os.WriteFile(file, picture, 0o644)
}
