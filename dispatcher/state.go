package dispatcher

import (
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// Dispatcher is the handle others hold on the goroutine that decides.
type Dispatcher struct {
	cfg     Config
	inbox   *inbox
	metrics *metrics
	policy  atomic.Pointer[string] // canonical name, of barrier groups
	paces   sync.Map               // of *pace, by board
	done    chan struct{}
	last    board.Status // what was left at the end; read after done is closed
}

// Result is the one answer to an Enqueue: a slot, or why there is none.
type Result struct {
	Slot *Slot
	Err  error
}

// waiting is an entry with what its caller is answered with. The caller makes the slot, so that
// the tick allocates nothing.
type waiting struct {
	entry  *pool.Entry
	slot   *Slot
	result chan Result  // room for one, sent to once
	local  *board.Local // it has no hand-off, and does not wait; nil: it has one
	hits   []board.Hit  // what mixed ranks hold of its prompt
}

// owned is what the runner keeps of a board.
type owned struct {
	model  string
	slots  []*Slot      // by index; nil: free
	beyond int          // of these, bound to their engines' own queues
	counts board.Counts // of these, as they were read last
	tick   board.Tick
	arrive func(*Slot)
	pace   *published
	named  []*published // of names that not all its ranks list, in the boards' order
}

// runner owns the boards. It reads the clock, tells them what others want in its
// order, and carries out the effects that come back: it answers callers, counts, and writes the
// log and the decision log.
type runner struct {
	boards    *board.Boards
	cfg       Config
	now       time.Time // of the turn
	d         *Dispatcher
	wake      func(command) bool // has a command run in the next turn
	log       *zap.Logger
	metrics   *metrics
	learner   *learner
	twins     *twins       // nil: none
	declog    *decisionLog // nil: off
	waiting   map[*pool.Entry]waiting
	owned     map[string]*owned // by model
	inOrder   []*owned          // the same, by model
	detectors map[board.GroupKey]*stepDetector
	rejected  error // what the last event changed nothing for

	// Events that are used again and again.
	decided board.Decided
	steps   board.Steps
	release board.Release
	arrival board.Enqueue
}

// command is one event for the owner of the boards, run in its goroutine.
type command func(*runner)
