// Package steplog keeps what ran in each step of a group of ranks.
package steplog

import (
	"io"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/internal/rawjson"
)

// Step is one step of a group.
type Step struct {
	Number int64
	Start  time.Time     // when it was due to start
	Length time.Duration // c0, what the slowest rank takes for its load, and prefills
	Late   time.Duration // how much later than Start+Length it ended
	Ranks  []RankLoad
}

// RankLoad is what ran on a rank in a step.
type RankLoad struct {
	Running  int
	KVTokens int // of running requests only: KV that waits for a slot is capacity, not load
	Prefill  int // tokens of prompts that a rank of an aggregated engine computed; their requests are not among those that run
}

// Log keeps the last steps in memory. If there is a writer, it also writes a line
// for each rank and step, from a goroutine of its own, so that a slow disk cannot
// hold up the clock.
type Log struct {
	group string
	began time.Time

	mu    sync.Mutex
	steps []Step // ring
	added int
	size  int

	lines   chan []byte   // of steps, on their way to the writer; nil: there is none
	written chan struct{} // closed when the writer has ended
	close   sync.Once
	dropped atomic.Int64
}

// New is a log of so many steps. The writer may be nil.
func New(size int, group string, w io.Writer) *Log {
	l := &Log{size: size, group: group, began: time.Now()}
	if w != nil {
		l.lines, l.written = make(chan []byte, 1024), make(chan struct{})
		go l.write(w)
	}
	return l
}

func (l *Log) write(w io.Writer) {
	defer close(l.written)
	failed := false
	for lines := range l.lines {
		if !failed {
			_, err := w.Write(lines)
			failed = err != nil
		}
		if failed {
			l.dropped.Add(1)
		}
	}
}

// Add adds a step. Its ranks are copied.
func (l *Log) Add(s Step) {
	l.mu.Lock()
	if len(l.steps) < l.size {
		l.steps = append(l.steps, Step{})
	}
	to := &l.steps[l.added%l.size]
	to.Number, to.Start, to.Length, to.Late = s.Number, s.Start, s.Length, s.Late
	to.Ranks = append(to.Ranks[:0], s.Ranks...)
	l.added++
	l.mu.Unlock()
	if l.lines == nil {
		return
	}
	// Unix ms, as the decision log has them; by the clock that does not jump.
	ms := float64(l.began.UnixMilli()) + float64(s.Start.Sub(l.began))/float64(time.Millisecond)
	select {
	case l.lines <- l.appendLines(nil, s, ms):
	default:
		l.dropped.Add(1)
	}
}

// All copies the steps, oldest first.
func (l *Log) All() []Step {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]Step, 0, len(l.steps))
	first := max(0, l.added-len(l.steps))
	for i := range l.steps {
		s := l.steps[(first+i)%len(l.steps)]
		s.Ranks = slices.Clone(s.Ranks)
		out = append(out, s)
	}
	return out
}

// appendLines appends a step's lines, one for each rank, as of that time in ms.
func (l *Log) appendLines(dst []byte, s Step, ms float64) []byte {
	for rank, load := range s.Ranks {
		dst = strconv.AppendFloat(append(dst, `{"t_ms":`...), ms, 'f', 3, 64)
		dst = rawjson.AppendString(append(dst, `,"group":`...), l.group)
		dst = strconv.AppendInt(append(dst, `,"rank":`...), int64(rank), 10)
		dst = strconv.AppendInt(append(dst, `,"step":`...), s.Number, 10)
		dst = strconv.AppendInt(append(dst, `,"running":`...), int64(load.Running), 10)
		dst = strconv.AppendInt(append(dst, `,"kv_tokens":`...), int64(load.KVTokens), 10)
		if load.Prefill > 0 {
			dst = strconv.AppendInt(append(dst, `,"prefill_tokens":`...), int64(load.Prefill), 10)
		}
		dst = append(dst, "}\n"...)
	}
	return dst
}

// Dropped counts the steps that were lost to a slow or broken writer.
func (l *Log) Dropped() int64 { return l.dropped.Load() }

// Close waits until everything is written. No step may be added after it.
func (l *Log) Close() {
	if l.lines != nil {
		l.close.Do(func() { close(l.lines) })
		<-l.written
	}
}
