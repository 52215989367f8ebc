package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/internal/logfile"
)

// requestLog is the request log, with one JSON line per request. A nil log writes nothing. The lines of a log that openRequestLog returns
// are written by a goroutine of its own, because a disk or the reader of a pipe may hang, and requests must not hang with it.
type requestLog struct {
	queue    chan queuedLine
	stop     chan struct{}
	stopOnce sync.Once     // closes stop
	ended    chan struct{} // closed when the goroutine has ended
	stalled  atomic.Bool   // a line was not written in time. As long as lines are queued, write does not wait until its own line is written
	dropped  atomic.Int64  // lines that found no room in the queue, and whose number was not logged yet

	log    *zap.Logger
	closer io.Closer

	// Only the goroutine of run uses the fields below.
	out       logfile.Writer
	linesLost int // lines in a row that could not be written
}

// queuedLine is a line on its way to the log.
type queuedLine struct {
	line    []byte
	err     error         // why line could not be encoded; nil: line is valid
	written chan struct{} // closed once the line was written, or could not be written
}

const (
	maxQueuedLines = 1024            // lines that wait while the log hangs; a line has about 700 bytes
	writeTimeout   = time.Second     // how long write waits for its line, so that the line is usually in the log when its request ends
	closeTimeout   = 5 * time.Second // how long the end of the proxy waits for the queued lines
)

// notWritten is the message of the log for the first line that is lost.
const notWritten = "the request log cannot be written; its lines are lost until it can be written again"

// errStandsStill is the reason why lines are lost while the queue is full.
var errStandsStill = errors.New("its disk or its reader takes nothing")

// openRequestLog opens a request log for appending; "-": stdout; empty: there is no request log.
func openRequestLog(path string, log *zap.Logger) (*requestLog, error) {
	switch path {
	case "":
		return nil, nil
	case "-":
		return startWriter(&requestLog{log: log, out: logfile.Writer{Log: os.Stdout}}), nil
	}
	f, err := logfile.Open(path)
	if err != nil {
		return nil, err
	}
	_, brokenLine := logfile.Rest(path) // the beginning of a line that an earlier process did not finish; empty: there is none
	return startWriter(&requestLog{log: log, out: logfile.Writer{Log: f, EndsMidLine: len(brokenLine) > 0}, closer: f}), nil
}

// startWriter makes the queue of l, starts the goroutine that writes its lines, and returns l.
func startWriter(l *requestLog) *requestLog {
	l.queue = make(chan queuedLine, maxQueuedLines)
	l.stop = make(chan struct{})
	l.ended = make(chan struct{})
	go l.run()
	return l
}

// write appends the facts of a request. It waits until the line is written, but for writeTimeout at most, and not at all while the log is
// stalled. If the queue is full, the line is lost.
func (l *requestLog) write(f *LogEntry) {
	if l == nil { // there is no request log
		return
	}
	next := queuedLine{written: make(chan struct{})}
	next.line, next.err = json.Marshal(f)
	select {
	case l.queue <- next:
	default:
		if l.dropped.Add(1) == 1 { // only the first of the lost lines is logged
			l.log.Error(notWritten, zap.Error(errStandsStill))
		}
		return
	}
	if l.stalled.Load() { // the log hangs, so waiting for this line would not help
		return
	}
	timeout := time.NewTimer(writeTimeout)
	defer timeout.Stop()
	select {
	case <-next.written:
	case <-timeout.C:
		l.stalled.Store(true)
	}
}

// run writes the lines of the queue until close is called and the queue is empty.
func (l *requestLog) run() {
	defer close(l.ended)
	for {
		select {
		case next := <-l.queue:
			l.handleLine(next)
			continue
		case <-l.stop: // close was called, so only the lines that are queued already are written
		}
		for {
			select {
			case next := <-l.queue:
				l.handleLine(next)
			default:
				return
			}
		}
	}
}

// handleLine writes one line, and wakes the request that waits for it. When the queue is empty, the log is no longer stalled.
func (l *requestLog) handleLine(next queuedLine) {
	l.writeLine(next.line, next.err)
	close(next.written)
	if len(l.queue) == 0 {
		l.stalled.Store(false)
	}
}

// writeLine writes one line, unless err says why there is none, and counts it as lost if it cannot be written, e.g. because the disk is
// full. It logs an error for the first lost line only. Once a line can be written again, it logs how many lines were lost.
func (l *requestLog) writeLine(line []byte, err error) {
	if err == nil {
		_, err = l.out.WriteLine(append(line, '\n'))
	}
	// Lines that found no room in the queue are lost, too. They are added only when the queue is empty: until then more may follow.
	if err == nil && len(l.queue) == 0 {
		l.linesLost += int(l.dropped.Swap(0))
	}
	switch {
	case err != nil:
		if l.linesLost++; l.linesLost == 1 {
			l.log.Error(notWritten, zap.Error(err))
		}
	case l.linesLost > 0:
		l.log.Warn("the request log can be written again", zap.Int("lines_lost", l.linesLost))
		l.linesLost = 0
	}
}

// close writes the lines that wait, and closes the log. It waits for closeTimeout at most, and returns an error if lines are lost then.
func (l *requestLog) close() (err error) {
	if l == nil { // there is no request log
		return nil
	}
	l.stopOnce.Do(func() { close(l.stop) })
	timeout := time.NewTimer(closeTimeout)
	defer timeout.Stop()
	select {
	case <-l.ended:
	case <-timeout.C: // the goroutine still hangs in a write
		err = fmt.Errorf("the last lines of the request log are lost: %w", errStandsStill)
	}
	if l.closer == nil { // stdout stays open
		return err
	}
	return errors.Join(err, l.closer.Close())
}
