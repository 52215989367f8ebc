package dispatcher

import "evenkeel/dispatcher/board"

// Worker and the types below are those of the boards: what the dispatcher is told and what it tells.
type (
	Worker          = board.Worker
	Outcome         = board.Outcome
	Kind            = board.Kind
	Local           = board.Local
	LocalRank       = board.LocalRank
	Grounds         = board.Grounds
	StepModel       = board.StepModel
	PredictorConfig = board.PredictorConfig
	Settings        = board.Settings
	Status          = board.Status
	ModelStatus     = board.ModelStatus
	WorkerStatus    = board.WorkerStatus
	Loads           = board.Loads
	Load            = board.Load
	GroupCompared   = board.GroupCompared
	ComparedPolicy  = board.ComparedPolicy
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
