package refengine

import (
	"io"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/rawjson"
)

// Step is one step of a decode group.
type Step struct {
	Number int64
	Start  time.Time     // when it was due to start
	Length time.Duration // c0 + c1 * the largest load, and local prefills
	Late   time.Duration // how much later than Start+Length it ended
	Ranks  []RankLoad
}

// RankLoad is what ran on a rank in a step.
type RankLoad struct {
	Running  int
	KVTokens int // of running requests only: KV that waits for a slot is capacity, not load
}

// stepLog keeps the last steps in memory and writes the trace.
type stepLog struct {
	mu    sync.Mutex
	steps []Step // ring
	added int
	size  int
	trace *stepTrace
}

func newStepLog(size int, trace *stepTrace) *stepLog { return &stepLog{size: size, trace: trace} }

func (l *stepLog) add(number int64, start time.Time, length, late time.Duration, loads []RankLoad) {
	l.mu.Lock()
	if len(l.steps) < l.size {
		l.steps = append(l.steps, Step{})
	}
	s := &l.steps[l.added%l.size]
	s.Number, s.Start, s.Length, s.Late = number, start, length, late
	s.Ranks = append(s.Ranks[:0], loads...)
	l.added++
	l.mu.Unlock()
	l.trace.add(number, start, loads)
}

// all copies the steps, oldest first.
func (l *stepLog) all() []Step {
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

// stepTrace writes one line for each step from its own goroutine, so that a
// slow disk cannot hold up the clock. What does not fit the buffer is counted.
type stepTrace struct {
	group   string
	began   time.Time
	full    chan []byte // steps on their way to the writer
	free    chan []byte
	done    chan struct{}
	dropped atomic.Int64
}

func startTrace(w io.Writer, group string) *stepTrace {
	if w == nil {
		return nil
	}
	t := &stepTrace{group: group, began: time.Now(), full: make(chan []byte, 1024), free: make(chan []byte, 1024), done: make(chan struct{})}
	go func() {
		defer close(t.done)
		failed := false
		for line := range t.full {
			if failed {
				t.dropped.Add(1)
				continue
			}
			if _, err := w.Write(line); err != nil {
				failed = true
				t.dropped.Add(1)
			}
			select {
			case t.free <- line:
			default:
			}
		}
	}()
	return t
}

func (t *stepTrace) add(step int64, start time.Time, loads []RankLoad) {
	if t == nil {
		return
	}
	var buf []byte
	select {
	case buf = <-t.free:
	default:
	}
	// Unix ms, as the decision log has them; by the clock that does not jump.
	ms := float64(t.began.UnixMilli()) + float64(start.Sub(t.began))/float64(time.Millisecond)
	buf = appendTrace(buf[:0], t.group, ms, step, loads)
	select {
	case t.full <- buf:
	default:
		t.dropped.Add(1)
	}
}

// appendTrace appends a step's lines, one a rank.
func appendTrace(dst []byte, group string, ms float64, step int64, loads []RankLoad) []byte {
	for rank, load := range loads {
		dst = strconv.AppendFloat(append(dst, `{"t_ms":`...), ms, 'f', 3, 64)
		dst = rawjson.AppendEscaped(append(dst, `,"group":"`...), group)
		dst = appendInt(append(dst, `","rank":`...), rank)
		dst = strconv.AppendInt(append(dst, `,"step":`...), step, 10)
		dst = appendInt(append(dst, `,"running":`...), load.Running)
		dst = appendInt(append(dst, `,"kv_tokens":`...), load.KVTokens)
		dst = append(dst, "}\n"...)
	}
	return dst
}

// close waits until everything is written. No step may be added after it.
func (t *stepTrace) close() {
	if t != nil {
		close(t.full)
		<-t.done
	}
}
