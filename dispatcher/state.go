package dispatcher

import (
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// Dispatcher passes the calls of other goroutines to the goroutine that owns the boards, and their answers back.
type Dispatcher struct {
	cfg     Config
	inbox   *inbox
	metrics *metrics
	policy  atomic.Pointer[string] // canonical name of the policy of barrier groups
	paces   sync.Map               // *publicPace by the model of the board
	done    chan struct{}          // closed when the dispatcher has ended
	last    board.Status           // last status before the end; it may be read only after done is closed
}

// Result is the answer to an Enqueue: either a slot, or an error that says why there is none.
type Result struct {
	Slot *Slot
	Err  error
}

// waitingEntry is an entry with the slot that it may get, and the channel on which its caller gets the answer. The caller's goroutine
// allocates both, so that a round of decisions allocates nothing.
type waitingEntry struct {
	board.Enqueue
	slot   *Slot
	result chan Result // exactly one result is sent; the channel has room for it
}

// boardState is the scheduler's state for one board.
type boardState struct {
	model         string
	slots         []*Slot      // by Slot.Slot; nil: free
	inEngineQueue int          // requests that were sent to their engines' queues, because their ranks had no slot or no KV room
	counts        board.Counts // progress of the slots as it was read last
	tick          board.Tick
	reportStarted func(*Slot) // reports the first event of a slot to the board; any goroutine may call it
	pace          *publicPace
	listedPaces   []*publicPace // values for the names that only some of its ranks list, in the order of the last EffectNames
}

// scheduler owns the boards. It reads the clock, turns the calls of other goroutines into events for the boards, and carries out the
// effects that the boards return: it answers callers, updates metrics, and writes the log and the decision log.
type scheduler struct {
	boards    *board.Boards
	cfg       Config
	now       time.Time // time of the current turn
	d         *Dispatcher
	wake      func(func(*scheduler)) bool // queues a function for the next turn; false: the dispatcher has ended
	log       *zap.Logger
	metrics   *metrics
	learner   *learner
	twins     *twins       // replays the last minutes under other policies; nil: no policy is replayed
	declog    *decisionLog // nil: off
	waiting   map[*pool.Entry]waitingEntry
	byModel   map[string]*boardState
	inOrder   []*boardState // the same values, sorted by model
	detectors map[board.GroupKey]*stepDetector
	labels    map[board.GroupKey]string // labels under which the groups have their series in metrics
	rejected  error                     // why the boards rejected the last event that changes settings; nil: they accepted it

	// Events that are reused, so that they allocate nothing.
	decided board.Decided
	steps   board.Steps
	release board.Release
	arrival board.Enqueue
}
