package twin

import (
	"math/rand/v2"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
)

// Replay is one model's part of a window under one policy. Requests come as they came, whatever became of
// those before: clients who wait for an answer before they ask again would have come at other times.
type Replay struct {
	*virtual.Driver
	engines *decoding
	fates   *fates
	came    arrivals
	quits   []quit // those that leave at their own time, whatever they got by then, the next first
	fleet   []fleet
	jobs    []job
	unused  []int32          // of these
	live    map[uint64]int32 // jobs that wait, by id
	begins  float64          // ms; steps before are not measured
	newly   [2]float64       // ms; the part between them is fresh
	ends    float64          // ms
	all     steps            // that are measured
	fresh   steps            // of these, of what is fresh
	spec    string
	begun   *Begun     // where it began; nil: with the real boards
	marks   []float64  // ms at which is kept how far it is, the next first
	Marked  []*Begun   // that
	chance  *rand.Rand // how unsteady steps are
	still   int        // turns in which no time passed
	over    bool
	failed  error
}

// job is a request of a replay.
type job struct {
	id     uint64
	prompt int32 // of the present leg, as the boards are told
	age    int32
	left   int32 // tokens it still gets
	lag    int32
	came   came
	entry  *board.Entry // that waits
}

type quit struct {
	at float64 // ms
	id uint64
}
