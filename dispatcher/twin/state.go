package twin

import (
	"math/rand/v2"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
)

// Replay replays a window of traffic for one model under one policy. Requests come when they really came. This is not exact: under another
// policy, answers end at other times, and clients that wait for an answer before they ask again would come at other times, too.
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
	measuredFrom   float64          // in ms since the window began; steps before this time are not measured
	freshBetween   [2]float64       // in ms since the window began; no earlier verdict has counted the steps between these times (fresh)
	ends           float64          // end of the window, in ms since it began
	measured       steps            // the measured steps
	fresh          steps            // the fresh steps
	spec           string           // policy; empty: the policy in force
	begun          *Begun           // state with which the replay began; nil: that of the real boards
	marks          []float64        // times at which mark keeps its state, the next first, in ms since the window began
	Marked         []*Begun         // the states that were kept
	chance         *rand.Rand       // changes the lengths of steps, see varied
	turnsAtInstant int              // turns in a row in which no time passed
	over           bool
	failed         error
}

// job is a request of a replay.
type job struct {
	id     uint64
	prompt int32 // prompt tokens; they include the tokens that were generated on earlier ranks
	age    int32 // tokens that were generated on earlier ranks
	left   int32 // tokens that it still gets
	lag    int32 // steps that it waits for its first token
	came   came
	entry  *board.Entry // its entry in the pool, while it waits
}

type quit struct {
	at float64 // ms
	id uint64
}
