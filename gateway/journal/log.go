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

// lines is the request log: facts as JSON lines. A nil log writes nothing. The lines of a log that openLines returns are written by a
// goroutine of its own, because a disk or the reader of a pipe may stand still, and requests must not.
type lines struct {
	queue    chan queued
	stop     chan struct{}
	stopOnce sync.Once     // closes stop
	ended    chan struct{} // closed when the goroutine has ended
	late     atomic.Bool   // a line was not written in time. As long as lines are queued, write does not wait until its own line is written
	dropped  atomic.Int64  // lines that found no room in the queue, and whose number was not logged yet

	log    *zap.Logger
	closer io.Closer

	// Only the goroutine uses what follows.
	out       logfile.Writer
	linesLost int // lines in a row that could not be written
}

// queued is a line on its way to the log.
type queued struct {
	line    []byte
	err     error         // why there is no line; nil: there is one
	written chan struct{} // closed once the line was written, or could not be written
}

const (
	mostQueued = 1024            // lines that wait for a log that stands still; a line has about 700 bytes
	writeWait  = time.Second     // for one line, so that it is usually in the log when its request ends
	closeWait  = 5 * time.Second // for the lines that wait when the proxy ends
)

// notWritten is the message of the log for the first line that is lost.
const notWritten = "the request log cannot be written; its lines are lost until it can be written again"

// errStandsStill is the reason why lines are lost while the queue is full.
var errStandsStill = errors.New("its disk or its reader takes nothing")

// openLines opens a request log for appending; "-": stdout; empty: there is no request log.
func openLines(path string, log *zap.Logger) (*lines, error) {
	switch path {
	case "":
		return nil, nil
	case "-":
		return started(&lines{log: log, out: logfile.Writer{Log: os.Stdout}}), nil
	}
	f, err := logfile.Open(path)
	if err != nil {
		return nil, err
	}
	_, rest := logfile.Rest(path)
	return started(&lines{log: log, out: logfile.Writer{Log: f, EndsMidLine: len(rest) > 0}, closer: f}), nil
}

// started makes the queue of l, starts the goroutine that writes its lines, and returns l.
func started(l *lines) *lines {
	l.queue = make(chan queued, mostQueued)
	l.stop = make(chan struct{})
	l.ended = make(chan struct{})
	go l.run()
	return l
}

// write appends the facts of a request. It waits for the log for writeWait at most, and not at all while the log is late. If the queue is
// full, the line is lost.
func (l *lines) write(f *LogEntry) {
	if l == nil {
		return
	}
	next := queued{written: make(chan struct{})}
	next.line, next.err = json.Marshal(f)
	select {
	case l.queue <- next:
	default:
		if l.dropped.Add(1) == 1 {
			l.log.Error(notWritten, zap.Error(errStandsStill))
		}
		return
	}
	if l.late.Load() { // the log stands still, so this request need not wait to find that out
		return
	}
	patience := time.NewTimer(writeWait)
	defer patience.Stop()
	select {
	case <-next.written:
	case <-patience.C:
		l.late.Store(true)
	}
}

// run writes the lines of the queue until close is called and the queue is empty.
func (l *lines) run() {
	defer close(l.ended)
	for {
		select {
		case next := <-l.queue:
			l.handle(next)
			continue
		case <-l.stop:
		}
		for {
			select {
			case next := <-l.queue:
				l.handle(next)
			default:
				return
			}
		}
	}
}

// handle writes one line, and tells the request that waits for it. When the queue is empty, the log is no longer late.
func (l *lines) handle(next queued) {
	l.put(next.line, next.err)
	close(next.written)
	if len(l.queue) == 0 {
		l.late.Store(false)
	}
}

// put writes one line, unless err says why there is none. If that fails, e.g. because the disk is full, it logs an error for the first line
// only, and not for every request.
func (l *lines) put(line []byte, err error) {
	if err == nil {
		_, err = l.out.WriteLine(append(line, '\n'))
	}
	if err == nil && len(l.queue) == 0 { // while lines wait, more may be dropped, and each of them would be logged
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

// close writes the lines that wait, and closes the log. It waits for a log that stands still for closeWait.
func (l *lines) close() (err error) {
	if l == nil {
		return nil
	}
	l.stopOnce.Do(func() { close(l.stop) })
	patience := time.NewTimer(closeWait)
	defer patience.Stop()
	select {
	case <-l.ended:
	case <-patience.C: // the goroutine still hangs in a write
		err = fmt.Errorf("the last lines of the request log are lost: %w", errStandsStill)
	}
	if l.closer == nil { // stdout stays open
		return err
	}
	return errors.Join(err, l.closer.Close())
}
