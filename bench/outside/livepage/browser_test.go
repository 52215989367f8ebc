package livepage

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// browser is a headless Chromium and what it complained of.
type browser struct {
	context.Context
	t *testing.T

	mu         sync.Mutex
	complaints []string
	hosts      map[string]bool
}

func chromium(t *testing.T) *browser {
	t.Helper()
	if testing.Short() {
		t.Skip("a browser takes seconds")
	}
	path := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if p, err := exec.LookPath(name); err == nil {
			path = p
			break
		}
	}
	if path == "" {
		t.Skip("no Chromium here, so the page is not tried in one: apt-get install chromium")
	}
	t.Parallel() // a page mostly waits for the next second
	opts := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]), chromedp.ExecPath(path), chromedp.NoSandbox,
		chromedp.WindowSize(1360, 1000))
	allocator, cancel := chromedp.NewExecAllocator(context.Background(), opts...)
	t.Cleanup(cancel)
	ctx, cancelTab := chromedp.NewContext(allocator)
	t.Cleanup(cancelTab)
	b := &browser{t: t, hosts: map[string]bool{}}
	require.NoError(t, chromedp.Do(ctx)) // it lives as long as this context
	var cancelAll context.CancelFunc
	b.Context, cancelAll = context.WithTimeout(ctx, 10*time.Minute+*soak)
	t.Cleanup(cancelAll)
	require.NoError(t, chromedp.Listen(b, b.hear))
	b.do(command(network.Enable, network.EnableParams{}), command(log.Enable, cdp.Empty{}), command(runtime.Enable, cdp.Empty{}))
	return b
}

// hear notes what the page complains of and whom it asks.
func (b *browser) hear(event any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		b.complaints = append(b.complaints,
			fmt.Sprint(e.ExceptionDetails.Text, " line ", e.ExceptionDetails.LineNumber+1, " ", e.ExceptionDetails.Exception.Description))
	case *runtime.EventConsoleAPICalled:
		b.complaints = append(b.complaints, fmt.Sprintf("console.%s: %v", e.Type, e.Args))
	case *log.EventEntryAdded:
		b.complaints = append(b.complaints, e.Entry.Text+" "+e.Entry.URL)
	case *network.EventRequestWillBeSent:
		if u, err := url.Parse(e.Request.URL); err == nil {
			b.hosts[u.Host] = true
		}
	}
}

func command[P, R any](c cdp.Command[P, R], params P) chromedp.Action[chromedp.Void] {
	return chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := cdp.Call(ctx, t, c, params)
		return err
	})
}

func (b *browser) do(actions ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	require.NoError(b.t, chromedp.Do(b, actions...))
}

func (b *browser) visit(s *site) {
	b.t.Helper()
	b.do(chromedp.Navigate("http://" + s.addr + "/"))
}

// eval evaluates JavaScript.
func (b *browser) eval(script string) string {
	b.t.Helper()
	text, err := chromedp.Run(b, chromedp.Evaluate[string]("String("+script+")"))
	require.NoError(b.t, err, script)
	return text
}

func (b *browser) eventually(what, script string) {
	b.t.Helper()
	for end := time.Now().Add(30 * time.Second); b.eval(script) != "true"; time.Sleep(50 * time.Millisecond) {
		require.True(b.t, time.Now().Before(end), "in vain: %s; the page says %s", what, b.eval("document.body.innerText.slice(0, 600)"))
	}
}

func (b *browser) press(key string) { b.do(chromedp.KeyEvent(key)) }

func (b *browser) scheme(name string) {
	b.do(command(emulation.SetEmulatedMedia,
		emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}}))
}

// shoot writes a picture where they are wanted.
func (b *browser) shoot(name string) {
	if *shots == "" {
		return
	}
	b.do(chromedp.Sleep(300 * time.Millisecond))
	picture, err := chromedp.Run(b, chromedp.FullScreenshot(100))
	require.NoError(b.t, err)
	require.NoError(b.t, os.MkdirAll(*shots, 0o755))
	require.NoError(b.t, os.WriteFile(filepath.Join(*shots, name+".png"), picture, 0o644))
}

// calm holds that the page complained of nothing and asked nobody else.
func (b *browser) calm(s *site, but ...string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.complaints {
		require.True(b.t, slices.ContainsFunc(but, func(ok string) bool { return strings.Contains(c, ok) }), "the page complains: %s", c)
	}
	require.Equal(b.t, map[string]bool{s.addr: true}, b.hosts, "hosts that were asked")
}
