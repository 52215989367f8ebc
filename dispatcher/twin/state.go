package twin

import (
	"math/rand/v2"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
)

// Replay is a replay of a window for one model under one policy. Requests come when they really came, whatever happens to
// earlier requests. This is not exact: clients that wait for an answer before they ask again would have come at other times.
type Replay struct {
	*virtual.Driver
	engines        *decoding
	fates          *fates
	came           arrivals
	quits          []quit // requests whose clients leave at a fixed time, the next first
	fleet          []fleet
	jobs           []job
	unused         []int32          // free indices of jobs
	waiting        map[uint64]int32 // by ID: indices of the jobs that wait for a rank
	measuredFrom   float64          // ms; steps before this time are not measured
	freshBetween   [2]float64       // ms; the steps between these times are fresh
	ends           float64          // ms; end of the window
	measured       steps            // the measured steps
	fresh          steps            // the fresh steps
	spec           string
	begun          *Begun     // the state with which it began; nil: that of the real boards
	marks          []float64  // times at which its state is kept, the next first, ms
	Marked         []*Begun   // the states that were kept
	chance         *rand.Rand // changes the lengths of steps
	turnsAtInstant int        // turns in which no time passed
	over           bool
	failed         error
}

// job is a request of a replay.
type job struct {
	id     uint64
	prompt int32 // prompt of the present leg, as the boards have it
	age    int32
	left   int32 // tokens it still gets
	lag    int32
	came   came
	entry  *board.Entry // its entry in the pool, while it waits
}

type quit struct {
	at float64 // ms
	id uint64
}
