// Package browser shows pages to a headless Chromium, and takes pictures that are small enough for
// a repository.
package browser

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

// Browser is a headless Chromium.
type Browser struct {
	tab    context.Context // chromedp's contexts are its tabs
	cancel []context.CancelFunc
}

// Chromium is the path of the browser.
func Chromium() (string, error) {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("no Chromium here, so nothing was drawn: apt-get install chromium")
}

// Open starts the browser.
func Open(ctx context.Context, path string) (*Browser, error) {
	allocator, cancel := chromedp.NewExecAllocator(ctx,
		append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]), chromedp.ExecPath(path), chromedp.NoSandbox)...)
	tab, cancelTab := chromedp.NewContext(allocator)
	b := &Browser{tab, []context.CancelFunc{cancelTab, cancel}}
	if err := chromedp.Do(tab); err != nil {
		b.Close()
		return nil, fmt.Errorf("%s does not start: %w", path, err)
	}
	return b, nil
}

// Close ends the browser.
func (b *Browser) Close() {
	for _, c := range b.cancel {
		c()
	}
}

// Visit shows a page in a colour scheme and a window.
func (b *Browser) Visit(url, scheme string, width, height int64) error {
	media := emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}}
	return chromedp.Do(b.tab,
		chromedp.EmulateViewport(width, height),
		chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
			_, err := cdp.Call(ctx, t, emulation.SetEmulatedMedia, media)
			return err
		}),
		chromedp.Navigate(url))
}

// Await waits until JavaScript says true.
func (b *Browser) Await(script string) error {
	for range 300 {
		said, err := b.Eval(script)
		if err != nil || said == "true" {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
	return fmt.Errorf("after 30 s this is not so: %s", script)
}

// Eval is what JavaScript says.
func (b *Browser) Eval(script string) (string, error) {
	return chromedp.Run(b.tab, chromedp.Evaluate[string]("String("+script+")"))
}

// Shoot writes what is in the window, or the whole page.
func (b *Browser) Shoot(file string, whole bool, out io.Writer) error {
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
