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
	engines engines
	mixed   bool // its ranks prefill, too
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

// engines are what a replay has behind its boards.
type engines interface {
	// build makes a group of a view, whose steps follow a law.
	build(v *board.GroupView, law board.StepModel) error
	// join has a rank take part in its group, or be as it is now.
	join(w *board.Worker)
	// keep has ranks leave that are not among these, which tell their groups. What runs on them comes again.
	keep(groups map[int32]string)
	// resume has the requests on ranks that were there from the start. Those that it returns wait for a rank anew.
	resume(anotherPolicy bool) (queued []board.Charge)
	// place gives a request to the rank that the boards bound it to, and says whether that is there.
	place(at int32, b *board.Bound) bool
	// drop takes a request off, and says whether a rank has it.
	drop(id uint64) bool
	// turn is what happens now, and due is when something does next.
	turn()
	due() float64
	// each tells of the requests on ranks, and what they still get.
	each(func(job, left int32))
}

// job is a request of a replay.
type job struct {
	id     uint64
	prompt int32 // of the present leg, as the boards are told
	real   int32 // likewise, as its engine counts it
	age    int32
	left   int32 // tokens it still gets
	lag    int32
	cached int32 // of its prompt, on the rank where a mixed one is
	came   came
	entry  *board.Entry // that waits
}

type quit struct {
	at float64 // ms
	id uint64
}
