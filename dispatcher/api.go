package dispatcher

import "evenkeel/dispatcher/board"

type (
	// Worker is one decode rank as the operator or discovery describes it.
	Worker = board.Worker
	// Outcome is what became of a request that leaves its rank.
	Outcome = board.Outcome
	// Kind is how a request left its rank.
	Kind = board.Kind
	// Local is what a decode rank may compute of a prompt that comes without a hand-off.
	Local = board.Local
	// LocalRank is a rank with what it would have to compute.
	LocalRank = board.LocalRank
	// Grounds are what a rank was chosen on.
	Grounds = board.Grounds
	// StepModel is how long a step of a barrier group takes.
	StepModel = board.StepModel
	// PredictorConfig says where predictions of output lengths come from.
	PredictorConfig = board.PredictorConfig
	// Settings are what a running dispatcher may change.
	Settings = board.Settings
	// Status is a copy of what the boards hold.
	Status = board.Status
	// ModelStatus is one board.
	ModelStatus = board.ModelStatus
	// WorkerStatus is one decode rank.
	WorkerStatus = board.WorkerStatus
	// Loads is a sample of all boards, as little as one can cost: in no order.
	Loads = board.Loads
	// Load is what one decode rank holds.
	Load = board.Load
	// GroupCompared is a group with its shadows.
	GroupCompared = board.GroupCompared
	// ComparedPolicy is how level a group is right after each round under one policy.
	ComparedPolicy = board.ComparedPolicy
)

// The ways to leave a rank.
const (
	Finished  = board.Finished
	Cancelled = board.Cancelled
	Failed    = board.Failed
)

// What a Result may say instead of a slot.
var (
	ErrPoolTimeout = board.ErrPoolTimeout
	ErrExpired     = board.ErrExpired
	ErrTooLarge    = board.ErrTooLarge
	ErrNoWorkers   = board.ErrNoWorkers
	ErrWithdrawn   = board.ErrWithdrawn
	ErrDraining    = board.ErrDraining
	ErrDuplicate   = board.ErrDuplicate
	ErrNotLocal    = board.ErrNotLocal
)

// DefaultWindow is how long the first freed slot of a burst waits for the others.
const DefaultWindow = board.DefaultWindow

// PoolAgeSeconds bound the classes of ModelStatus.PoolAges.
var PoolAgeSeconds = board.PoolAgeSeconds
