package twin

import (
	"math/rand/v2"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
)

// Replay replays a window of traffic for one model under one policy. Requests come when they really came. This is not exact: under another
// policy, answers end at other times, so clients that wait for an answer before they ask again would also ask at other times.
type Replay struct {
	*virtual.Driver
	engines          *decodeEngines
	history          *history     // what really became of the requests
	arrivals         arrivalQueue // requests that have yet to come
	withdrawals      []withdrawal // requests whose clients leave while they wait, the next to leave first
	rankChanges      []rankChange
	jobs             []job
	freeIndices      []int32          // unused indices of jobs, for new requests
	waiting          map[uint64]int32 // by request ID: index of its job, for requests that wait for a rank
	measuredFrom     float64          // ms since the window began; earlier steps are not measured
	uncountedBetween [2]float64       // begin and end, in ms since the window began, of the steps that no earlier verdict has counted
	endsAt           float64          // end of the window, in ms since it began
	measured         steps            // number and length of the steps since measuredFrom
	newSteps         steps            // number and length of the steps within uncountedBetween
	spec             string           // policy that is replayed, as configured; empty: the policy in force
	startedFrom      *Checkpoint      // checkpoint with which the replay began; nil: it began with the real boards
	checkpointTimes  []float64        // when to save checkpoints, in ms since the window began; the next first
	Checkpoints      []*Checkpoint    // checkpoints saved so far, for replays of later windows
	rng              *rand.Rand       // random changes of step lengths, see jittered
	turnsAtInstant   int              // turns in a row in which no simulated time passed
	reachedEnd       bool             // the replay has reached the end of the window
	failed           error            // why the replay cannot go on; nil: it can
}

// job is a request of a replay, from its arrival until it leaves the replay.
type job struct {
	id                uint64
	prompt            int32 // prompt tokens; they include the tokens that were generated on earlier ranks
	age               int32 // tokens that were generated on earlier ranks
	remaining         int32 // tokens that the request will still generate
	stepsToFirstToken int32 // steps from binding to first token
	arrival           arrival
	entry             *board.Entry // the request's entry in the pool; nil while it runs on a rank
}

// withdrawal says when the client of a waiting request leaves.
type withdrawal struct {
	at float64 // ms since the window began
	id uint64
}
