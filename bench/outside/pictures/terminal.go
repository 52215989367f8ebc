package main

import (
	"cmp"
	"context"
	"fmt"
	"html"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"evenkeel/bench/outside/browser"
	"evenkeel/bench/rigs/testbed"
)

// drawTop takes a picture of `evenkeel top` in a terminal of 80 columns and 24
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
	if _, err := tmux("new-session", "-d", "-x", "80", "-y", "24", "COLORTERM=truecolor '"+w.Binary+"' top --admin '"+admin+"'"); err != nil {
		return err
	}
	var screen []byte
	for range 100 { // until it shows ranks
		time.Sleep(100 * time.Millisecond)
		var err error
		if screen, err = tmux("capture-pane", "-p", "-e"); err != nil {
			return err
		}
		if strings.Contains(string(screen), "tok/s") {
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
	if err := b.Visit("file://"+page, "dark", 760, 100); err != nil {
		return err
	}
	return b.Shoot(filepath.Join(o.out, "top.png"), true, out)
}

const terminalHead = `<!doctype html><meta charset="utf-8"><style>
body { margin: 0; padding: 14px 18px; background: #14181d; width: max-content }
pre { margin: 0; color: #d7dde4; font: 15px/1.22 "DejaVu Sans Mono", monospace }
</style><pre>`

// terminalPage is a terminal's screen as a page: text with SGR sequences.
func terminalPage(screen string) string {
	var page strings.Builder
	page.WriteString(terminalHead)
	var p pen
	for screen != "" {
		text, rest, found := strings.Cut(screen, "\x1b[")
		p.write(&page, text)
		if !found {
			break
		}
		end := strings.IndexFunc(rest, func(r rune) bool { return r >= '@' && r <= '~' })
		if end < 0 {
			break
		}
		if rest[end] == 'm' {
			p.set(rest[:end])
		}
		screen = rest[end+1:]
	}
	page.WriteString("</pre>\n")
	return page.String()
}

// pen is what SGR sequences have set.
type pen struct {
	fore, back                           string // CSS colours; empty: the terminal's own
	bold, faint, italic, under, inverted bool
}

func (p *pen) write(page *strings.Builder, text string) {
	if text == "" {
		return
	}
	fore, back := p.fore, p.back
	if p.inverted {
		fore, back = cmp.Or(back, "#14181d"), cmp.Or(fore, "#d7dde4")
	}
	var css strings.Builder
	for _, rule := range []struct {
		on   bool
		text string
	}{{fore != "", "color:" + fore}, {back != "", "background:" + back}, {p.bold, "font-weight:bold"}, {p.faint, "opacity:.6"}, {p.italic, "font-style:italic"},
		{p.under, "text-decoration:underline"}} {
		if rule.on {
			css.WriteString(rule.text + ";")
		}
	}
	fmt.Fprintf(page, `<span style="%s">%s</span>`, css.String(), html.EscapeString(text))
}

// set takes the numbers of an SGR sequence; those it does not know change
// nothing.
func (p *pen) set(codes string) {
	var numbers []int
	for c := range strings.FieldsFuncSeq(codes, func(r rune) bool { return r == ';' || r == ':' }) {
		n, err := strconv.Atoi(c)
		if err != nil {
			return
		}
		numbers = append(numbers, n)
	}
	if len(numbers) == 0 {
		numbers = []int{0}
	}
	styles := map[int]*bool{1: &p.bold, 2: &p.faint, 3: &p.italic, 4: &p.under, 7: &p.inverted}
	for i := 0; i < len(numbers); i++ {
		switch n := numbers[i]; {
		case n == 0:
			*p = pen{}
		case n == 22: // neither bold nor faint
			p.bold, p.faint = false, false
		case styles[n] != nil:
			*styles[n] = true
		case n != 21 && styles[n-20] != nil:
			*styles[n-20] = false
		case n >= 30 && n <= 37:
			p.fore = indexed(n - 30)
		case n == 39:
			p.fore = ""
		case n >= 40 && n <= 47:
			p.back = indexed(n - 40)
		case n == 49:
			p.back = ""
		case n >= 90 && n <= 97:
			p.fore = indexed(n - 90 + 8)
		case n >= 100 && n <= 107:
			p.back = indexed(n - 100 + 8)
		case n == 38 || n == 48:
			color, used := extended(numbers[i+1:])
			i += used
			if n == 38 {
				p.fore = color
			} else {
				p.back = color
			}
		}
	}
}

// extended is the colour of what follows 38 or 48, and how many numbers it took.
func extended(numbers []int) (color string, used int) {
	switch {
	case len(numbers) >= 2 && numbers[0] == 5:
		return indexed(numbers[1]), 2
	case len(numbers) >= 4 && numbers[0] == 2:
		return fmt.Sprintf("rgb(%d,%d,%d)", numbers[1], numbers[2], numbers[3]), 4
	}
	return "", len(numbers)
}

var sixteen = [16]string{"#1d2228", "#e5646a", "#6cc27a", "#d9b35c", "#5fa8e6", "#c48ad6", "#58c0c9", "#c9d1d9", "#6b7682", "#ff8086", "#8be39a", "#f2cf7a", "#83c3ff",
	"#dfa8f0", "#7fe0e8", "#f5f8fa"}

// indexed is a colour of the usual 256.
func indexed(n int) string {
	switch {
	case n < 0 || n > 255:
		return ""
	case n < 16:
		return sixteen[n]
	}
	r, g, b, _ := ansi.IndexedColor(n).RGBA()
	return fmt.Sprintf("rgb(%d,%d,%d)", r>>8, g>>8, b>>8)
}
