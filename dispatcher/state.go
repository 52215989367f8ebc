package dispatcher

import (
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// Dispatcher passes calls to the goroutine that owns the boards, and the answers back.
type Dispatcher struct {
	cfg     Config
	inbox   *inbox
	metrics *metrics
	policy  atomic.Pointer[string] // canonical name of the policy of barrier groups
	paces   sync.Map               // values are *publicPace, keys the models
	done    chan struct{}          // closed when the dispatcher has ended
	last    board.Status           // last status; it may be read only after done is closed
}

// Result is the answer to an Enqueue.
type Result struct {
	Slot *Slot
	Err  error
}

// waitingEntry is an entry with the slot that it may get. The goroutine of the caller allocates
// both, so that a round of decisions allocates nothing.
type waitingEntry struct {
	board.Enqueue
	slot   *Slot
	result chan Result // gets one result, for which it has room
}

type boardState struct {
	model         string
	slots         []*Slot      // slots in use, by Binding.Slot; nil: free
	inEngineQueue int          // requests that wait in the queues of engines
	counts        board.Counts // progress of the slots as it was read last
	tick          board.Tick
	reportStarted func(*Slot) // reports the first event of a slot; any goroutine may call it
	pace          *publicPace
	// listedPaces has one value for each model name that only some ranks list, in the order of the
	// last EffectNames.
	listedPaces []*publicPace
}

// scheduler owns the boards. It reads the clock, turns calls into events for the boards, and
// carries out the effects that they return.
type scheduler struct {
	boards    *board.Boards
	cfg       Config
	now       time.Time // when the current turn began; all its events get this time
	d         *Dispatcher
	wake      func(func(*scheduler)) bool // queues a function for the next turn; false: the dispatcher has ended
	log       *zap.Logger
	metrics   *metrics
	learner   *learner
	declog    *decisionLog // nil: none
	waiting   map[*pool.Entry]waitingEntry
	byModel   map[string]*boardState
	inOrder   []*boardState // values of byModel, by model
	detectors map[board.GroupKey]*stepDetector
	labels    map[board.GroupKey]string // label of each group in metrics
	// rejected says why the boards rejected the last settings; nil: they did not.
	rejected error

	// Memory for events that come often.
	decided board.Decided
	steps   board.Steps
	release board.Release
	arrival board.Enqueue
}
