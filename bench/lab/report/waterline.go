package report

import (
	"fmt"
	"html"
	"io"
	"strings"
	"time"
)

// Against is the policy that the animation compares the last one with, where it ran.
const Against = "jsq-kv"

// The animation: so many frames of the measured part, drawn in so many units. Many
// ranks have fewer frames, so that the file stays below 300 KB.
const (
	mostFrames  = 60
	mostHeights = 1800 // of the columns of a pane, in all its frames
	lasts       = 12 * time.Second
	paneWide    = 460
	paneHigh    = 200
	paneTop     = 58
	paneGap     = 40
	pageWide    = 2*paneWide + paneGap
	pageHigh    = paneTop + paneHigh + 30
	styleText   = `.wl{font:13px "Liberation Sans",Arial,Helvetica,sans-serif}.wl text{fill:var(--ink,#1b1f24)}.wl .m{fill:var(--muted,#57606a)}.wl .r{transform-box:fill-box;transform-origin:50% 100%}` +
		`.wl .r,.wl .l{animation-duration:12s;animation-timing-function:linear;animation-iteration-count:infinite}.wl:hover .r,.wl:hover .l{animation-play-state:paused}` +
		`@media (prefers-reduced-motion:reduce){.wl .r,.wl .l{animation:none!important}}`
)

// Waterline draws a run of Against, else of the first policy, and one of the last policy side by
// side, moving: a column of KV tokens for each rank, and the line at the fullest, which
// every step waits for. It is a file of SVG that needs nothing beside it, and stands
// still for those who want no motion, and while it is pointed at. It is empty where
// there are no two runs with steps.
func (r *Report) Waterline() string {
	var plotted []Run
	for _, run := range r.Runs {
		if len(run.Steps) > 0 && run.Window.Length() > 0 {
			plotted = append(plotted, run)
		}
	}
	if len(plotted) < 2 {
		return ""
	}
	first, last := plotted[0], plotted[len(plotted)-1]
	for _, run := range plotted[:len(plotted)-1] {
		if run.Policy == Against {
			first = run
		}
	}
	panes := [2]pane{newPane(first), newPane(last)}
	top := 1.1 * max(panes[0].top, panes[1].top, 1)
	var s strings.Builder
	title := html.EscapeString(fmt.Sprintf("KV tokens of the ranks under %s and under %s, on the same load: the line at the fullest rank, "+
		"which every step waits for, and hatched what the others are below it", first.Policy, last.Policy))
	fmt.Fprintf(&s, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -4 %d %d" class="wl" role="img" aria-label="%s"><title>%s</title><style>%s`, pageWide+16, pageHigh+8, title, title, styleText)
	for i, p := range panes {
		p.keyframes(&s, i, top)
	}
	fmt.Fprintf(&s, `</style><rect width="%d" height="%d" fill="var(--paper,#fff)"/>`, pageWide, pageHigh)
	for i, p := range panes {
		p.draw(&s, i, top, r.Model)
	}
	s.WriteString("</svg>\n")
	return s.String()
}

// WriteWaterline writes it as a file, which is dark where its reader's screen is.
func (r *Report) WriteWaterline(w io.Writer) error {
	_, err := io.WriteString(w, onDark(r.Waterline(), `.wl{--ink:#e6edf3;--muted:#9da7b1;--paper:#0d1117;--shade:#161b22;background:#0d1117}`))
	return err
}

// pane is one run.
type pane struct {
	run    Run
	frames [][]int // KV tokens by rank
	top    float64
}

func newPane(run Run) pane {
	p := pane{run: run}
	at, frames := 0, max(2, min(mostFrames, mostHeights/max(1, len(run.Steps[0].KVTokens))))
	for f := range frames {
		t := run.Window.From + time.Duration(float64(run.Window.Length())*float64(f)/float64(frames-1))
		for at < len(run.Steps)-1 && run.Steps[at+1].Start <= t {
			at++
		}
		p.frames = append(p.frames, run.Steps[at].KVTokens)
		largest, _, _ := run.Steps[at].load()
		p.top = max(p.top, float64(largest))
	}
	return p
}

// keyframes are the heights of columns and line over time. A column is scaled, the line
// is moved.
func (p *pane) keyframes(s *strings.Builder, pane int, top float64) {
	for rank := range p.frames[0] {
		fmt.Fprintf(s, "@keyframes wl%d-%d{", pane, rank)
		for f := range p.frames {
			fmt.Fprintf(s, "%s{transform:scaleY(%.3f)}", p.share(f), p.height(f, rank, top))
		}
		s.WriteString("}")
	}
	fmt.Fprintf(s, "@keyframes wl%d-l{", pane)
	for f := range p.frames {
		fmt.Fprintf(s, "%s{transform:translateY(%.1fpx)}", p.share(f), p.line(f, top))
	}
	s.WriteString("}")
}

// share of the animation after which a frame is seen.
func (p *pane) share(frame int) string {
	return strings.TrimSuffix(fmt.Sprintf("%.1f", 100*float64(frame)/float64(len(p.frames)-1)), ".0") + "%"
}

// height of a rank's column, of 1.
func (p *pane) height(frame, rank int, top float64) float64 {
	if rank >= len(p.frames[frame]) {
		return 0
	}
	return float64(p.frames[frame][rank]) / top
}

// line is how far below the top of the pane the fullest rank stands.
func (p *pane) line(frame int, top float64) float64 {
	most := 0
	for _, load := range p.frames[frame] {
		most = max(most, load)
	}
	return paneHigh * (1 - float64(most)/top)
}

func (p *pane) draw(s *strings.Builder, pane int, top float64, model StepModel) {
	still := len(p.frames) / 2 // what is seen where nothing moves
	left := pane * (paneWide + paneGap)
	var lost, length float64
	n := 0.0
	for _, step := range p.run.Steps {
		if step.Start < p.run.Window.From || step.End() > p.run.Window.To || len(step.KVTokens) == 0 {
			continue
		}
		largest, _, sum := step.load()
		lost += (float64(largest) - float64(sum)/float64(len(step.KVTokens))) * millis(model.C1)
		length += millis(float64(step.Length))
		n++
	}
	n = max(1, n)
	fmt.Fprintf(s, `<text x="%d" y="20" font-size="16" font-weight="bold">%s</text><text x="%d" y="42" class="m">Each %.2f ms step spends %.2f ms waiting for the fullest rank.</text>`,
		left, html.EscapeString(p.run.Policy), left, length/n, lost/n)
	fmt.Fprintf(s, `<svg x="%d" y="%d" width="%d" height="%d" overflow="hidden"><path stroke="#d98d78" stroke-width="2" d="`, left, paneTop, paneWide, paneHigh)
	for x := -paneHigh; x < paneWide; x += 11 {
		fmt.Fprintf(s, "M%d %dl%d -%d", x, paneHigh, paneHigh, paneHigh)
	}
	s.WriteString(`"/>`)
	ranks := len(p.frames[0])
	wide := float64(paneWide) / float64(max(1, ranks))
	gap := min(2, wide/4)
	for rank := range ranks {
		fmt.Fprintf(s, `<rect class="r" x="%.1f" width="%.1f" height="%d" fill="#4a90c2" stroke="var(--paper,#fff)" style="transform:scaleY(%.3f);animation-name:wl%d-%d"/>`,
			float64(rank)*wide+gap/2, max(0.5, wide-gap), paneHigh, p.height(still, rank, top), pane, rank)
	}
	fmt.Fprintf(s, `<g class="l" style="transform:translateY(%.1fpx);animation-name:wl%d-l"><rect y="-%d" width="%d" height="%d" fill="var(--shade,#f6f8fa)"/><rect y="-1" width="%d" height="2.5" fill="#0062a0"/></g></svg>`,
		p.line(still, top), pane, paneHigh, paneWide, paneHigh, paneWide)
	fmt.Fprintf(s, `<text x="%d" y="%d" class="m" font-size="12">%d ranks; %.1f s of the run in %.0f s</text>`, left, paneTop+paneHigh+20, ranks, p.run.Window.Length().Seconds(), lasts.Seconds())
}
