package dispatcher

import (
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// Dispatcher is the handle to the goroutine that owns the boards and decides.
type Dispatcher struct {
	cfg     Config
	inbox   *inbox
	metrics *metrics
	policy  atomic.Pointer[string] // canonical name of the policy of barrier groups
	paces   sync.Map               // of *published, by model of the board
	done    chan struct{}
	last    board.Status // what the boards held at the end; read only after done is closed
}

// Result is the answer to an Enqueue: either a slot, or an error that says why there is none.
type Result struct {
	Slot *Slot
	Err  error
}

// waiting is an entry with the slot and the channel that answer its caller. The caller's goroutine
// allocates both, so that the tick allocates nothing.
type waiting struct {
	entry  *pool.Entry
	slot   *Slot
	result chan Result  // has room for one result; one is sent
	local  *board.Local // ranks that may compute a prompt without a hand-off, which does not wait; nil: any other entry
	hits   []board.Hit  // what ranks hold of its prompt
}

// owned is what the runner keeps of a board.
type owned struct {
	model         string
	slots         []*Slot      // by Slot.Slot; nil: free
	beyond        int          // slots that were bound beyond the slots or KV room of their ranks
	counts        board.Counts // progress of the slots as it was read last
	tick          board.Tick
	reportStarted func(*Slot) // reports the first event of a slot to the board; any goroutine may call it
	pace          *published
	named         []*published // for the names that only some of its ranks list, in the order of the last EffectNames
}

// runner owns the boards. It reads the clock, gives them the commands of other goroutines in order
// as events, and carries out the effects that come back: it answers callers, updates metrics, and writes the
// log and the decision log.
type runner struct {
	boards    *board.Boards
	cfg       Config
	now       time.Time // time of the current turn
	d         *Dispatcher
	wake      func(command) bool // queues a command for the next turn; false: the dispatcher has ended
	log       *zap.Logger
	metrics   *metrics
	learner   *learner
	twins     *twins       // nil: no policies are replayed
	declog    *decisionLog // nil: off
	waiting   map[*pool.Entry]waiting
	owned     map[string]*owned // by model
	inOrder   []*owned          // the same, in order of the model
	detectors map[board.GroupKey]*stepDetector
	rejected  error // why the boards rejected the last event that changes settings; nil: they took it

	// Events that are reused, so that they allocate nothing.
	decided board.Decided
	steps   board.Steps
	release board.Release
	arrival board.Enqueue
}

// command is what another goroutine wants done. The runner's goroutine calls it.
type command func(*runner)
