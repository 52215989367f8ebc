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

// requestLog has one JSON line per request. A nil log writes nothing. A goroutine of its own
// writes, because a disk or the reader of a pipe may hang, and requests must not.
type requestLog struct {
	queue    chan queuedLine
	stop     chan struct{}
	stopOnce sync.Once
	ended    chan struct{} // the goroutine has ended
	stalled  atomic.Bool   // a line was late; until the queue is empty, write does not wait
	dropped  atomic.Int64  // lines without room in the queue, not logged yet

	log    *zap.Logger
	closer io.Closer

	// Only run's goroutine uses these.
	out       logfile.Writer
	linesLost int // in a row
}

type queuedLine struct {
	line    []byte
	err     error         // why line could not be encoded
	written chan struct{} // closed once the line was written, or could not be
}

const (
	maxQueuedLines = 1024 // while the log hangs; a line has about 700 bytes
	// write waits so long, so that the line is usually in the log when its request ends.
	writeTimeout = time.Second
	closeTimeout = 5 * time.Second // of the proxy's end, for the queued lines
)

// notWritten is logged for the first line that is lost.
const notWritten = "the request log cannot be written; its lines are lost until it can be written again"

// errStandsStill: lines are lost while the queue is full.
var errStandsStill = errors.New("its disk or its reader takes nothing")

// openRequestLog appends; "-": stdout; empty: no log.
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
	_, brokenLine := logfile.Rest(path) // of an earlier process
	return startWriter(&requestLog{log: log, out: logfile.Writer{Log: f, EndsMidLine: len(brokenLine) > 0}, closer: f}), nil
}

func startWriter(l *requestLog) *requestLog {
	l.queue = make(chan queuedLine, maxQueuedLines)
	l.stop = make(chan struct{})
	l.ended = make(chan struct{})
	go l.run()
	return l
}

// write waits until the line is written, for writeTimeout at most, and not at all while the log is
// stalled. If the queue is full, the line is lost.
func (l *requestLog) write(f *LogEntry) {
	if l == nil {
		return
	}
	next := queuedLine{written: make(chan struct{})}
	next.line, next.err = json.Marshal(f)
	select {
	case l.queue <- next:
	default:
		if l.dropped.Add(1) == 1 { // only the first one is logged
			l.log.Error(notWritten, zap.Error(errStandsStill))
		}
		return
	}
	if l.stalled.Load() { // it would not help to wait
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

func (l *requestLog) run() {
	defer close(l.ended)
	for {
		select {
		case next := <-l.queue:
			l.handleLine(next)
			continue
		case <-l.stop: // only queued lines are written now
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

func (l *requestLog) handleLine(next queuedLine) {
	l.writeLine(next.line, next.err)
	close(next.written)
	if len(l.queue) == 0 {
		l.stalled.Store(false)
	}
}

// writeLine writes one line, unless err says why there is none. It logs the first lost line, such
// as on a full disk, and later how many were lost.
func (l *requestLog) writeLine(line []byte, err error) {
	if err == nil {
		_, err = l.out.WriteLine(append(line, '\n'))
	}
	// Lines without room are added only when the queue is empty: until then more may follow.
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

// close waits for closeTimeout at most, and returns an error if lines are lost then.
func (l *requestLog) close() (err error) {
	if l == nil {
		return nil
	}
	l.stopOnce.Do(func() { close(l.stop) })
	timeout := time.NewTimer(closeTimeout)
	defer timeout.Stop()
	select {
	case <-l.ended:
	case <-timeout.C: // it hangs in a write
		err = fmt.Errorf("the last lines of the request log are lost: %w", errStandsStill)
	}
	if l.closer == nil { // stdout stays open
		return err
	}
	return errors.Join(err, l.closer.Close())
}
