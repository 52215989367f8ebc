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

// maxQueuedRounds bounds the number of rounds that are copied and not written yet, because copies take memory: a round of 144 ranks with 40
// requests each takes 300 KB.
const maxQueuedRounds = 8

// decisionLog writes rounds to a file in a goroutine of its own. It drops and counts rounds that come faster than it can write, so a slow
// disk loses lines but never delays a decision.
type decisionLog struct {
	cfg     DecisionLogConfig
	log     *zap.Logger
	dropped prometheus.Counter
	failed  prometheus.Counter

	unusedRounds chan *board.Round // rounds whose memory can be used again
	queue        chan *board.Round

	// Only the goroutine of run uses these.
	file    *os.File
	size    int64
	regular bool // the file is no pipe or device
	out     logfile.Writer
	line    []byte
	outputs []int32 // output lengths of the survival table of the last round
	version uint64  // version of this table
	lastOK  bool    // the last write succeeded, so the next failure is logged
}

// openDecisionLog opens the file. It returns nil if the config names none.
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

// open opens the file to append to it, and notes its present size. If the last line was written only in part, because the process died or
// the disk was full, open removes this part, because a replay of this log refuses a line that it cannot read. If the part does not look
// like the begin of a line of this log, or if the file may only grow, the part stays, and the next line begins behind a line end.
func (l *decisionLog) open() error {
	f, err := logfile.Open(l.cfg.File)
	if err != nil {
		return fmt.Errorf("dispatcher: decision log: %w", err)
	}
	info, err := f.Stat()
	if err != nil {
		return errors.Join(fmt.Errorf("dispatcher: decision log: %w", err), f.Close())
	}
	begin, rest := logfile.Rest(l.cfg.File) // the part of a line at the end of the file, and where it begins
	l.file, l.size = f, info.Size()
	l.regular = info.Mode().IsRegular()
	l.out = logfile.Writer{Log: f, EndsMidLine: len(rest) > 0}
	// The rest may be shorter than lineBegin.
	isOwnLine := bytes.HasPrefix(rest, []byte(lineBegin)) || strings.HasPrefix(lineBegin, string(rest))
	if l.out.EndsMidLine && isOwnLine && f.Truncate(begin) == nil { // Truncate fails if the file may only grow
		l.size, l.out.EndsMidLine = begin, false
	}
	return nil
}

// pipeWait is how long a line waits for the reader of a pipe, so that a reader that stands still does not hold the end of the process up.
const pipeWait = time.Second

// record copies a round for the goroutine of run, which writes it. If all maxQueuedRounds copies still wait to be written, the round is
// dropped and counted. record never waits.
func (l *decisionLog) record(round *board.Round) {
	select {
	case copied := <-l.unusedRounds:
		copied.Copy(round)
		l.queue <- copied // never blocks: the queue has room for all maxQueuedRounds rounds
	default:
		l.dropped.Inc()
	}
}

// run writes rounds until ctx ends, and then the rounds that are still queued.
func (l *decisionLog) run(ctx context.Context) {
	defer func() {
		if l.file != nil {
			_ = l.file.Close()
		}
	}()
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

// write writes one round as a line of the file. The memory of the round can then be used for another copy. Each failure is counted, but
// only the first of several in a row is logged.
func (l *decisionLog) write(r *board.Round) {
	if v := r.Survival.Version(); v != l.version { // a newer table than in the last round
		l.outputs, l.version = r.Survival.Outputs(), v
	}
	line := LogLine{
		Tick: r.Tick, TimeMs: r.At.UnixMilli(), Group: r.Group, Policy: r.Policy,
		Snapshot: &r.Snapshot, Outputs: l.outputs, Assign: r.Assign,
	}
	l.line = line.AppendJSON(l.line[:0])
	l.unusedRounds <- r
	err := l.append(l.line)
	if err == nil {
		l.lastOK = true
		return
	}
	if l.lastOK { // this is the first of several failures in a row
		l.log.Error("dispatcher: the decision log cannot be written; its rounds are lost until it can be written again",
			zap.String("file", l.cfg.File), zap.Error(err))
	}
	l.lastOK = false
	l.failed.Inc()
}

// append writes one line. If the line would make the file larger than half of MaxBytes, append first rotates the file.
func (l *decisionLog) append(line []byte) error {
	if l.file == nil {
		if err := l.open(); err != nil {
			return err
		}
	}
	tooLarge := l.size > 0 && l.size+int64(len(line)) > l.cfg.MaxBytes/2 // an empty file takes any line
	if tooLarge && l.regular {
		if err := l.rotate(); err != nil {
			return err
		}
	}
	if !l.regular {
		_ = l.file.SetWriteDeadline(time.Now().Add(pipeWait)) // a device has no deadlines, and is waited for
	}
	n, err := l.out.WriteLine(line)
	l.size += int64(n)
	if err != nil && l.regular { // the next open removes the part of the line that was written
		err = errors.Join(err, l.file.Close())
		l.file = nil
	}
	return err
}

// rotate renames the file to FILE.1, which replaces the former FILE.1, and opens a new file. After an error, no file may be open.
func (l *decisionLog) rotate() error {
	err := l.file.Close()
	l.file = nil
	if err = errors.Join(err, os.Rename(l.cfg.File, l.cfg.File+".1")); err != nil {
		return err
	}
	return l.open()
}
