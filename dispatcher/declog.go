package dispatcher

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
)

// roundsMost bounds the rounds that are copied and not yet written, since copies take memory:
// a round of 144 ranks with 40 requests each takes 300 KB.
const roundsMost = 8

// decisionLog writes rounds in a goroutine of its own. Rounds that come faster than it can
// write are dropped and counted: a slow disk loses lines and never delays a tick.
type decisionLog struct {
	cfg     DecisionLogConfig
	log     *zap.Logger
	dropped prometheus.Counter
	failed  prometheus.Counter

	free  chan *board.Round // rounds whose memory can be used again
	queue chan *board.Round

	// Only the goroutine of run uses these.
	file    *os.File
	size    int64
	line    []byte
	outputs []int32 // the outputs of the survival table that has the version in the next field
	version uint64
	lastOK  bool // the last write succeeded
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
		free: make(chan *board.Round, roundsMost), queue: make(chan *board.Round, roundsMost),
	}
	for range roundsMost {
		l.free <- &board.Round{}
	}
	return l, l.open()
}

// open opens the file to append to it, and notes its present size.
func (l *decisionLog) open() error {
	f, err := os.OpenFile(l.cfg.File, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o640)
	if err != nil {
		return fmt.Errorf("dispatcher: decision log: %w", err)
	}
	info, err := f.Stat()
	if err != nil {
		return errors.Join(fmt.Errorf("dispatcher: decision log: %w", err), f.Close())
	}
	l.file, l.size = f, info.Size()
	return nil
}

// record copies a round for the goroutine of run, which writes it. If all roundsMost copies still wait to be written, the round is
// dropped and counted.
func (l *decisionLog) record(round *board.Round) {
	select {
	case copied := <-l.free:
		copied.Copy(round)
		l.queue <- copied // never blocks: the queue has room for all roundsMost rounds
	default:
		l.dropped.Inc()
	}
}

// run writes rounds until ctx ends, and then those that are still queued.
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

// write writes one round as a line of the file, and then gives the memory of the round back for the next copy. Each failure is counted,
// and only the first of several in a row is logged.
func (l *decisionLog) write(r *board.Round) {
	if v := r.Survival.Version(); v != l.version { // the table is another one than that of the last round
		l.outputs, l.version = r.Survival.Outputs(), v
	}
	line := LogLine{
		Tick: r.Tick, TimeMs: r.At.UnixMilli(), Group: r.Group, Policy: r.Policy,
		Snapshot: &r.Snapshot, Outputs: l.outputs, Assign: r.Assign,
	}
	l.line = line.AppendJSON(l.line[:0])
	l.free <- r
	err := l.append(l.line)
	switch {
	case err == nil:
		l.lastOK = true
		return
	case l.lastOK: // log only the first of several failures in a row
		l.log.Error("dispatcher: the decision log cannot be written; its rounds are lost until it can be written again",
			zap.String("file", l.cfg.File), zap.Error(err))
	}
	l.lastOK = false
	l.failed.Inc()
}

// append writes one line. If the line would make the file larger than half the bound, the file first becomes FILE.1, the older half.
func (l *decisionLog) append(line []byte) error {
	if l.file == nil {
		if err := l.open(); err != nil {
			return err
		}
	}
	if l.size > 0 && l.size+int64(len(line)) > l.cfg.MaxBytes/2 {
		err := l.file.Close()
		l.file = nil
		if err = errors.Join(err, os.Rename(l.cfg.File, l.cfg.File+".1")); err != nil {
			return err
		}
		if err = l.open(); err != nil {
			return err
		}
	}
	n, err := l.file.Write(line)
	l.size += int64(n)
	return err
}
