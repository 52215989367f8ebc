package twin

import (
	"maps"
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/board"
)

// Span is how long the window is that is replayed.
const Span = 5 * time.Minute

// mostKept bounds the requests of all stretches that are kept.
const mostKept = 200_000

// Every is how long a stretch is at least where the boards hold so many requests: a copy of many is dear.
func Every(held int) time.Duration {
	return min(Span/3, 15*time.Second*time.Duration(1+held/1500))
}

// Twin judges policies by what the last minutes would have been under them.
type Twin struct {
	specs []string
	kept  []*Stretch    // whole ones that follow each other, the oldest first
	end   *board.Boards // at the end of the last one

	judging *judging
	models  map[string]*account
	whole   bool // a window was judged since the last stretch came
}

// account is what is kept of a model from verdict to verdict.
type account struct {
	until   time.Time // steps before are accounted for
	judged  int       // windows
	step    scatter   // of the replay of the policy in force, beside what was: of the mean step
	owed    scatter   // likewise of the work that is owed
	against map[string]*scatter
	lag     int32 // steps from a bind to the first token, as it was seen last; 0: never
}

// scatter is how far something is off by chance, the past fading: the mean of its square over windows of a second.
// Over longer ones it is off by less.
type scatter struct {
	square float64
	seen   bool
}

// add takes in how far it is off over a window of so many seconds, and says how far it may be off in one of twenty
// cases: twice the deviation, and at least what it is now.
func (s *scatter) add(off, seconds float64) float64 {
	now := off * off * seconds
	if !s.seen {
		s.square, s.seen = now, true
	}
	s.square += scatterWeight * (now - s.square)
	return max(math.Abs(off), 2*math.Sqrt(s.square/seconds))
}

// leastJudged is after how many windows anything is claimed: one alone may be right by chance.
const leastJudged = 4

// scatterWeight is by how much of the difference each window moves that mean.
const scatterWeight = 1. / 8

// apart is by what share one thing is more than another; nothing is not known to be apart from nothing.
func apart(replayed, really float64) float64 {
	switch {
	case really > 0:
		return replayed/really - 1
	case replayed > 0:
		return 1
	}
	return 0
}

// Verdict is what was found of one group. The groups of a model are judged together: which of them gets a request is
// part of what a policy decides.
type Verdict struct {
	Group    board.GroupKey
	From, To time.Time
	Policy   string  // in force
	Fresh    uint64  // steps of the group that no verdict before was about
	Ranks    int     // of the group
	StepMs   float64 // in the mean over the groups of the model, really, of steps that were told one by one
	TwinMs   float64 // likewise, as replayed under the policy in force
	Error    float64 // by what share of a step the twin is wrong
	Sure     bool    // enough windows were judged to know how wrong the twin is

	// Work that is owed to the requests of the model that are inside, in ms of a rank. The sooner they are served the
	// less it is.
	Owed, TwinOwed float64 // really, and as replayed under the policy in force
	OwedError      float64 // by what share of that the twin is wrong

	Against []Against // one for each other policy
}

// Against is what the model would have had under another policy.
type Against struct {
	Spec    string
	Policy  string  // its name
	StepMs  float64 // in the mean, as replayed
	SavedMs float64 // of every step, by the policy in force; below 0 it loses
	Error   float64 // by what share of a step that may be wrong: as the replay of the policy in force is, or more where it is unsteady in the window
	Claimed bool    // it is more than that
	Owed    float64 // as replayed
	Failed  error
}

// judging is a window of which replays are made, one after the other.
type judging struct {
	whole  *Window
	window *Window // the part of it in which the model had all its groups
	models []string
	spec   int // of the replay under way; -1: the policy in force
	replay *Replay
	found  []Verdict // of the model
	own    Batches   // of the policy in force
}

// New judges these policies, beside the one in force.
func New(specs []string) *Twin {
	return &Twin{specs: slices.Compact(slices.Clone(specs)), models: map[string]*account{}}
}

// Take takes in a stretch that is whole, and the boards as they were at its end.
func (t *Twin) Take(s *Stretch, end *board.Boards) {
	if s.First {
		t.kept, t.judging = nil, nil
	}
	s.came, s.left = slices.Clip(slices.Clone(s.came)), slices.Clip(slices.Clone(s.left)) // the tape had left room
	t.kept, t.end, t.whole = append(t.kept, s), end, false
	sum := 0
	for i := len(t.kept) - 1; i >= 0; i-- {
		sum += len(t.kept[i].came) + len(t.kept[i].left)
		if last := i == len(t.kept)-1; !last && (s.To.Sub(t.kept[i].From) > Span || sum > mostKept) {
			t.kept = slices.Clone(t.kept[i+1:])
			break
		}
	}
}

// Work goes on with the judgement for so many turns, and says whether there is more to do. fresh are the
// verdicts that it came to.
func (t *Twin) Work(turns int) (fresh []Verdict, more bool) {
	j := t.judging
	if j == nil {
		if t.whole || len(t.kept) == 0 {
			return nil, false
		}
		j = &judging{whole: &Window{Stretches: slices.Clone(t.kept), End: t.end}, models: t.end.Models(), spec: -1}
		t.judging, t.whole = j, true
		return nil, true
	}
	if len(j.models) == 0 {
		t.judging = nil
		return nil, !t.whole
	}
	if j.replay == nil {
		if t.begin(j) {
			return nil, true
		}
		if len(j.found) > 0 { // of those before
			return t.after(j), true
		}
		j.next()
		return nil, true
	}
	over, err := j.replay.Run(turns)
	switch {
	case err != nil && j.spec < 0:
		j.next()
	case err != nil:
		t.fails(j, err)
		return t.after(j), true
	case over:
		t.book(j)
		return t.after(j), true
	}
	return nil, true
}

// next is the next model.
func (j *judging) next() { j.models, j.spec, j.replay, j.found = j.models[1:], -1, nil, nil }

// begin begins the replay that is next, and says whether there is one.
func (t *Twin) begin(j *judging) bool {
	spec := ""
	if j.spec >= 0 {
		spec = t.specs[j.spec]
	} else if j.window = j.whole.of(j.models[0]); j.window == nil {
		return false
	}
	if a := t.models[j.models[0]]; a != nil {
		j.window.Lag = a.lag
	}
	r, err := NewReplay(j.window, j.models[0], spec)
	switch {
	case err != nil && j.spec < 0:
		return false
	case err != nil:
		t.fails(j, err)
		j.spec++
		return j.spec < len(t.specs) && t.begin(j)
	}
	j.replay = r
	return true
}

func (t *Twin) fails(j *judging, err error) {
	for i := range j.found {
		if slices.ContainsFunc(j.found[i].Against, func(a Against) bool { return a.Policy == t.specs[j.spec] }) {
			continue
		}
		j.found[i].Against = append(j.found[i].Against, Against{Spec: t.specs[j.spec], Policy: t.specs[j.spec], Failed: err})
	}
}

// after goes on to the next policy, or ends with the model's verdicts.
func (t *Twin) after(j *judging) (fresh []Verdict) {
	j.replay = nil
	if j.spec++; j.spec < len(t.specs) && len(j.found) > 0 {
		return nil
	}
	fresh = j.found
	j.next()
	return fresh
}

// book takes in a replay that has come to its end.
func (t *Twin) book(j *judging) {
	if j.spec < 0 {
		j.found = t.real(j)
		return
	}
	name, step := j.replay.Boards.Policy(), j.replay.Steps.Mean()
	if len(j.found) == 0 || name == j.found[0].Policy || slices.ContainsFunc(j.found[0].Against, func(a Against) bool { return a.Policy == name }) {
		return
	}
	first, about := &j.found[0], t.models[j.models[0]]
	a := Against{Spec: t.specs[j.spec], Policy: name, StepMs: step, SavedMs: step - first.TwinMs, Owed: j.replay.Owed()}
	if about.against[name] == nil {
		about.against[name] = &scatter{}
	}
	a.Error = max(first.Error, about.against[name].add(j.replay.Steps.apart(&j.own)/first.TwinMs, lasts(first)))
	a.Claimed = first.Sure && step > 0 && math.Abs(a.SavedMs) > a.Error*first.StepMs
	for i := range j.found {
		j.found[i].Against = append(j.found[i].Against, a)
	}
}

// lasts is how many seconds the measured part of a window has.
func lasts(v *Verdict) float64 { return max(1, v.To.Sub(v.From).Seconds()) }

// real compares the replay of the policy in force with what was.
func (t *Twin) real(j *judging) (found []Verdict) {
	w, model := j.window, j.models[0]
	maps.DeleteFunc(t.models, func(name string, _ *account) bool { return !slices.Contains(t.end.Models(), name) })
	begun, _ := w.Measured().Boards.Groups(model)
	ended, _ := w.End.Groups(model)
	ms, steps := 0.0, 0.0
	for _, to := range ended {
		if from := viewOf(begun, to.Key); from != nil { // steps that were told as one, and those in which an engine stood still, are no policy's
			ms, steps = ms+to.Line.Taught.Ms-from.Line.Taught.Ms, steps+to.Line.Taught.Steps-from.Line.Taught.Steps
		}
	}
	step := j.replay.Steps.Mean()
	if steps == 0 || step == 0 {
		return nil
	}
	about := t.models[model]
	if about == nil {
		about = &account{against: map[string]*scatter{}}
		t.models[model] = about
	}
	about.judged++
	about.lag = w.fates(model).lag
	j.own = j.replay.Steps
	v := Verdict{
		From: w.Measured().From, To: w.To(), Policy: j.replay.Boards.Policy(), StepMs: ms / steps, TwinMs: step, Sure: about.judged >= leastJudged,
		Owed: w.owed(model, j.replay.work), TwinOwed: j.replay.Owed(),
	}
	v.Error = about.step.add(apart(step, v.StepMs), lasts(&v))
	v.OwedError = about.owed.add(apart(v.TwinOwed, v.Owed), 1) // it adds up: over a longer window it is off by no less
	fresh := w.since(about.until, v.From, model)
	for _, to := range ended {
		v.Group, v.Ranks, v.Fresh = to.Key, len(to.Workers), 0
		if then := viewOf(fresh, to.Key); then != nil {
			v.Fresh = to.Steps - then.Steps
		}
		found = append(found, v)
	}
	about.until = w.To()
	return found
}
