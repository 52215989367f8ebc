package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"evenkeel/bench/lab/load"
)

// progress shows the progress of a long run: as a bar, or as a line of text every five seconds.
type progress struct {
	out        io.Writer
	bar        *progressbar.ProgressBar // nil: lines of text are written instead
	lastLineAt time.Time                // when the last line was written
	total      int
}

// newProgress returns a progress that shows a bar if out is a terminal, and otherwise writes lines.
func newProgress(out io.Writer) *progress {
	p := newLineProgress(out)
	if f, ok := out.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		p.bar = progressbar.NewOptions(-1, progressbar.OptionSetWriter(out), progressbar.OptionShowCount(),
			progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())
	}
	return p
}

// newLineProgress returns a progress that writes lines even to a terminal.
func newLineProgress(out io.Writer) *progress { return &progress{out: out, lastLineAt: time.Now()} }

// update shows that done of total steps are complete; total <= 0: the total is not known. line is
// the text to write if there is no bar.
func (p *progress) update(done, total int, line string) {
	if p.bar == nil { // a line every five seconds
		if time.Since(p.lastLineAt) >= 5*time.Second {
			p.lastLineAt = time.Now()
			fmt.Fprintln(p.out, line)
		}
		return
	}
	if p.total != total && total > 0 { // the total is known now, or has changed
		p.bar.ChangeMax(total)
	}
	p.total = total
	_ = p.bar.Set(done) // an error of the terminal must not end the run
}

// showLoad shows how many requests of a load have ended, failed and are in flight.
func (p *progress) showLoad(now load.Progress) {
	of := ""
	if now.Total > 0 {
		of = fmt.Sprintf(" of %d", now.Total)
	}
	if p.bar != nil {
		p.bar.Describe(fmt.Sprintf("%d ok, %d failed, %d in flight", now.OK, now.Failed, now.Sent-now.Ended))
	}
	p.update(now.Ended, now.Total, fmt.Sprintf("%d%s ended: %d ok, %d failed, %d cancelled, %d in flight",
		now.Ended, of, now.OK, now.Failed, now.Cancelled, now.Sent-now.Ended))
}

// showTrial shows how many requests of a block of a trial have ended. what is the name of the
// block.
func (p *progress) showTrial(now load.Progress, what string) {
	if p.bar != nil {
		p.bar.Describe(what)
	}
	p.update(now.Ended, now.Total, fmt.Sprintf("%s: %d of %d requests ended, %d failed", what, now.Ended, now.Total, now.Failed))
}

// finish removes the bar from the terminal. Lines stay.
func (p *progress) finish() {
	if p.bar != nil {
		_ = p.bar.Finish()
	}
}
