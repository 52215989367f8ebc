package dispatcher

import (
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// Dispatcher is the handle for other goroutines: it passes their calls to the goroutine that owns the boards, and the answers back.
type Dispatcher struct {
	cfg     Config
	inbox   *inbox
	metrics *metrics
	policy  atomic.Pointer[string] // canonical name of the policy of the groups whose ranks step together
	paces   sync.Map               // values are *publicPace, keys the models of the boards
	done    chan struct{}          // closed when the dispatcher has ended
	last    board.Status           // last status before the end; it may be read only after done is closed
}

// Result is the answer to an Enqueue: either a slot, or an error that says why there is none.
type Result struct {
	Slot *Slot
	Err  error
}

// waitingEntry is an entry with the slot that it may get, and the channel for the answer to its caller. The goroutine of the caller
// allocates both, so that a round of decisions allocates nothing.
type waitingEntry struct {
	board.Enqueue
	slot   *Slot
	result chan Result // gets exactly one result, for which it has room
}

// boardState is what the scheduler keeps for one board.
type boardState struct {
	model         string
	slots         []*Slot      // slots in use, by index (Binding.Slot); nil: free
	inEngineQueue int          // number of requests that were sent to the queues of engines, because a rank had no slot or no KV room
	counts        board.Counts // progress of the slots as the scheduler read it last
	tick          board.Tick
	reportStarted func(*Slot) // reports the first event of a slot to the board; any goroutine may call it
	pace          *publicPace
	// listedPaces has one value for each model name that only some ranks of the board list, in the order of the last EffectNames.
	listedPaces []*publicPace
}

// scheduler owns the boards. It reads the clock, turns the calls of other goroutines into events for the boards, and carries out the
// effects that the boards return: it answers callers, updates metrics, and writes the log and the decision log.
type scheduler struct {
	boards    *board.Boards
	cfg       Config
	now       time.Time // time at which the current turn began; all events of the turn get this time
	d         *Dispatcher
	wake      func(func(*scheduler)) bool // queues a function for the next turn; false: the dispatcher has ended
	log       *zap.Logger
	metrics   *metrics
	learner   *learner
	declog    *decisionLog // writes rounds to the decision log; nil: there is none
	waiting   map[*pool.Entry]waitingEntry
	byModel   map[string]*boardState
	inOrder   []*boardState // values of byModel, sorted by model
	detectors map[board.GroupKey]*stepDetector
	labels    map[board.GroupKey]string // label of each group in metrics
	// rejected says why the boards rejected the last event that changes settings; nil: they accepted it.
	rejected error

	// Memory for events that come often, so that these allocate nothing.
	decided board.Decided
	steps   board.Steps
	release board.Release
	arrival board.Enqueue
}
