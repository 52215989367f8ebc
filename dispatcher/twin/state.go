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
	engines         *decodeEngines
	history         *history     // what really became of the requests
	arrivals        arrivalQueue // requests that have yet to come
	withdrawals     []withdrawal // requests whose clients leave at a fixed time, the next first
	rankChanges     []rankChange
	jobs            []job
	freeIndices     []int32          // free indices of jobs
	waiting         map[uint64]int32 // by ID: indices of the jobs that wait for a rank
	measuredFrom    float64          // in ms since the window began; steps before this time are not measured
	newBetween      [2]float64       // in ms since the window began; no earlier verdict has counted the steps between these times
	endsAt          float64          // end of the window, in ms since it began
	measured        steps            // the measured steps
	newSteps        steps            // the steps within newBetween
	spec            string           // policy; empty: the policy in force
	startedFrom     *Checkpoint      // state with which the replay began; nil: that of the real boards
	checkpointTimes []float64        // in ms since the window began, the next first: saveCheckpoint is called then
	Checkpoints     []*Checkpoint    // those that were saved so far
	rng             *rand.Rand       // changes the lengths of steps, see jittered
	turnsAtInstant  int              // turns in a row in which no time passed
	over            bool             // the replay has reached the end of the window
	failed          error            // why the replay cannot go on; nil: it can
}

// job is a request of a replay.
type job struct {
	id                uint64
	prompt            int32 // prompt tokens; they include the tokens that were generated on earlier ranks
	age               int32 // tokens that were generated on earlier ranks
	remaining         int32 // tokens that it still gets
	stepsToFirstToken int32 // from its binding to its first token
	arrival           arrival
	entry             *board.Entry // its entry in the pool, while it waits
}

// withdrawal is the time at which the client of a request leaves.
type withdrawal struct {
	at float64 // in ms since the window began
	id uint64
}
