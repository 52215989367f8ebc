package dispatcher

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/internal/logfile"
)

// maxQueuedRounds bounds the rounds that are copied and not written yet. It is small because copies
// take memory: a round of 144 ranks with 40 requests each takes 300 KB.
const maxQueuedRounds = 8

// decisionLog writes each round of decisions as a line to a file, in a goroutine of its own. It
// drops and counts rounds that come faster than it can write, so a slow disk never delays a
// decision.
type decisionLog struct {
	cfg     DecisionLogConfig
	log     *zap.Logger
	dropped prometheus.Counter
	failed  prometheus.Counter

	unusedRounds chan *board.Round // copies whose memory can be used again
	queue        chan *board.Round

	// Only the goroutine of run uses the fields below.
	file    *os.File
	size    int64
	regular bool // the file is no pipe or device
	out     logfile.Writer
	line    []byte
	outputs []int32 // output lengths in the table of the round that was written last
	version uint64  // version of the table that outputs is from
	lastOK  bool    // the last write succeeded, so a failure of the next one is logged
}

// openDecisionLog returns nil if the config names no file.
func openDecisionLog(cfg DecisionLogConfig, log *zap.Logger, m *metrics) (*decisionLog, error) {
	if cfg.File == "" {
		return nil, nil
	}
	if cfg.MaxBytes < 0 {
		return nil, fmt.Errorf("dispatcher: decision log of at most %d bytes; write a size, or 0 for %d", cfg.MaxBytes, DefaultLogBytes)
	}
	cfg.MaxBytes = cmp.Or(cfg.MaxBytes, DefaultLogBytes)
	l := &decisionLog{
		cfg: cfg, log: log, dropped: m.roundsDropped, failed: m.logFailures, lastOK: true,
		unusedRounds: make(chan *board.Round, maxQueuedRounds), queue: make(chan *board.Round, maxQueuedRounds),
	}
	for range maxQueuedRounds {
		l.unusedRounds <- &board.Round{}
	}
	return l, l.open()
}

// open opens the file for appending. Its last line may be incomplete, because the process died or
// the disk was full. open removes such a line, because a replay of the log would refuse it. It
// leaves the line if it does not look like one of this log, or if the file is append-only. The next
// line then begins after a line end.
func (l *decisionLog) open() error {
	f, err := logfile.Open(l.cfg.File)
	if err != nil {
		return fmt.Errorf("dispatcher: decision log: %w", err)
	}
	info, err := f.Stat()
	if err != nil {
		return errors.Join(fmt.Errorf("dispatcher: decision log: %w", err), f.Close())
	}
	begin, partialLine := logfile.Rest(l.cfg.File)
	l.file, l.size = f, info.Size()
	l.regular = info.Mode().IsRegular()
	l.out = logfile.Writer{Log: f, EndsMidLine: len(partialLine) > 0}
	// A short incomplete line may be a part of lineBegin.
	isOwnLine := bytes.HasPrefix(partialLine, []byte(lineBegin)) || strings.HasPrefix(lineBegin, string(partialLine))
	if l.out.EndsMidLine && isOwnLine && f.Truncate(begin) == nil { // Truncate fails on an append-only file
		l.size, l.out.EndsMidLine = begin, false
	}
	return nil
}

// close closes the file. A nil decisionLog has none.
func (l *decisionLog) close() {
	if l != nil && l.file != nil { // nil: the last write or rotation has failed
		_ = l.file.Close()
	}
}

// pipeWait is how long a write waits for the reader of a pipe, which must not delay the end of the
// process.
const pipeWait = time.Second

// record copies a round for the goroutine of run. It never waits: if all maxQueuedRounds copies are
// in use, it drops and counts the round.
func (l *decisionLog) record(round *board.Round) {
	select {
	case copied := <-l.unusedRounds:
		copied.Copy(round)
		l.queue <- copied // never blocks: the queue has room for all maxQueuedRounds rounds
	default:
		l.dropped.Inc()
	}
}

func (l *decisionLog) run(ctx context.Context) {
	defer l.close()
	for {
		select {
		case r := <-l.queue:
			l.write(r)
		case <-ctx.Done():
			for len(l.queue) > 0 {
				l.write(<-l.queue)
			}
			return
		}
	}
}

// write releases the memory of the copy. Of several failures in a row, only the first is logged.
func (l *decisionLog) write(r *board.Round) {
	if v := r.Survival.Version(); v != l.version {
		l.outputs, l.version = r.Survival.Outputs(), v
	}
	line := LogLine{
		Tick: r.Tick, TimeMs: r.At.UnixMilli(), Group: r.Group, Policy: r.Policy,
		Snapshot: &r.Snapshot, Outputs: l.outputs, Assign: r.Assign,
	}
	l.line = line.AppendJSON(l.line[:0])
	l.unusedRounds <- r // never blocks: the channel has room for all rounds
	err := l.append(l.line)
	if err == nil {
		l.lastOK = true
		return
	}
	if l.lastOK {
		l.log.Error("dispatcher: the decision log cannot be written; its rounds are lost until it can be written again",
			zap.String("file", l.cfg.File), zap.Error(err))
	}
	l.lastOK = false
	l.failed.Inc()
}

// append first starts a new file (rotate) if the line would make this one larger than half of
// MaxBytes, because FILE.1 takes the other half.
func (l *decisionLog) append(line []byte) error {
	if l.file == nil { // the last write or rotation has failed
		if err := l.open(); err != nil {
			return err
		}
	}
	tooLarge := l.size > 0 && l.size+int64(len(line)) > l.cfg.MaxBytes/2 // an empty file takes a line of any size
	if tooLarge && l.regular {
		if err := l.rotate(); err != nil {
			return err
		}
	}
	if !l.regular {
		_ = l.file.SetWriteDeadline(time.Now().Add(pipeWait)) // a device has no deadlines, so a write to it may wait longer
	}
	n, err := l.out.WriteLine(line)
	l.size += int64(n)
	if err != nil && l.regular { // open removes the part of the line that was written
		err = errors.Join(err, l.file.Close())
		l.file = nil
	}
	return err
}

// rotate renames the file to FILE.1, and opens a new one. After an error, file may be nil, and the
// next append opens it again.
func (l *decisionLog) rotate() error {
	err := l.file.Close()
	l.file = nil
	if err = errors.Join(err, os.Rename(l.cfg.File, l.cfg.File+".1")); err != nil {
		return err
	}
	return l.open()
}
