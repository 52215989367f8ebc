package main

import (
	"context"
	"fmt"
	"html"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"evenkeel/bench/outside/browser"
	"evenkeel/bench/rigs/testbed"
)

// drawTop takes a picture of `evenkeel top` in a terminal of 100 columns and 40
// lines, which is tmux.
func drawTop(ctx context.Context, o options, w *testbed.World, admin string, b *browser.Browser, out io.Writer) error {
	if path, _ := exec.LookPath("tmux"); path == "" {
		fmt.Fprintln(out, "no tmux here, so top.png stays as it is: apt-get install tmux")
		return nil
	}
	tmux := func(args ...string) ([]byte, error) {
		said, err := exec.CommandContext(ctx, "tmux", append([]string{"-S", w.File("tmux"), "-f", "/dev/null"}, args...)...).CombinedOutput()
		if err != nil {
			return nil, fmt.Errorf("tmux %s: %w: %s", args[0], err, said)
		}
		return said, nil
	}
	if _, err := tmux("new-session", "-d", "-x", "100", "-y", "40", "'"+w.Binary+"' top --admin '"+admin+"'"); err != nil {
		return err
	}
	var screen []byte
	for range 100 { // until it shows ranks
		time.Sleep(100 * time.Millisecond)
		var err error
		if screen, err = tmux("capture-pane", "-p"); err != nil {
			return err
		}
		if strings.Contains(string(screen), "tokens/s") {
			break
		}
	}
	if _, err := tmux("kill-server"); err != nil {
		return err
	}
	page := w.File("top.html")
	if err := os.WriteFile(page, []byte(terminalPage(string(screen))), 0o600); err != nil {
		return err
	}
	if err := b.Visit("file://"+page, "dark", 940, 100); err != nil {
		return err
	}
	return b.Shoot(filepath.Join(o.out, "top.png"), true, out)
}

const terminalHead = `<!doctype html><meta charset="utf-8"><style>
body { margin: 0; padding: 14px 18px; background: #14181d; width: max-content }
pre { margin: 0; color: #d7dde4; font: 15px/1.22 "DejaVu Sans Mono", monospace }
</style><pre>`

// terminalPage is a terminal's screen as a page, without its empty lines at the end.
func terminalPage(screen string) string {
	return terminalHead + html.EscapeString(strings.TrimRight(screen, "\n")) + "\n</pre>\n"
}
