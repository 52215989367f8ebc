package journal

import (
	"encoding/json"
	"io"
	"os"
	"sync"

	"go.uber.org/zap"
)

// lines is the request log: facts as JSON lines. A nil log writes nothing.
type lines struct {
	log       *zap.Logger
	mu        sync.Mutex
	w         io.Writer
	closer    io.Closer
	linesLost int // lines in a row that could not be written
}

// openLines opens a request log for appending; "-": stdout; empty: there is no request log.
func openLines(path string, log *zap.Logger) (*lines, error) {
	switch path {
	case "":
		return nil, nil
	case "-":
		return &lines{log: log, w: os.Stdout}, nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o640)
	if err != nil {
		return nil, err
	}
	return &lines{log: log, w: f, closer: f}, nil
}

// write appends the facts of a request. If that fails, e.g. because the disk is full, it logs an error for the
// first line only, and not for every request.
func (l *lines) write(f *Facts) {
	if l == nil {
		return
	}
	line, err := json.Marshal(f)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil {
		_, err = l.w.Write(append(line, '\n')) // one write per line, so that the lines of two processes do not mix
	}
	switch {
	case err != nil:
		if l.linesLost++; l.linesLost == 1 {
			l.log.Error("the request log cannot be written; its lines are lost until it can be written again", zap.Error(err))
		}
	case l.linesLost > 0:
		l.log.Warn("the request log can be written again", zap.Int("lines_lost", l.linesLost))
		l.linesLost = 0
	}
}

func (l *lines) close() error {
	if l == nil || l.closer == nil {
		return nil
	}
	return l.closer.Close()
}
