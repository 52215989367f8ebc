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
	groups  map[board.GroupKey]*account
	whole   bool // a window was judged since the last stretch came
}

// account is what is kept of a group from verdict to verdict.
type account struct {
	until  time.Time // steps before are accounted for
	judged int       // windows
	error  wrong     // of the step
	inside wrong     // of the requests inside
}

// wrong is how far the replay of the policy in force was off in the mean, the past fading.
type wrong struct {
	mean float64
	seen bool
}

// add takes in what was replayed and what was, and says by what share the twin may be wrong.
func (w *wrong) add(replayed, really float64) float64 {
	off := 0.0
	switch {
	case really > 0:
		off = math.Abs(replayed/really - 1)
	case replayed > 0:
		off = 1
	}
	if !w.seen {
		w.mean, w.seen = off, true
	}
	w.mean += errorWeight * (off - w.mean)
	return max(off, w.mean)
}

// leastJudged is after how many windows anything is claimed: one alone may be right by chance.
const leastJudged = 4

// errorWeight is by how much of the difference each window moves that mean.
const errorWeight = 1. / 8

// Verdict is what was found of one group.
type Verdict struct {
	Group    board.GroupKey
	From, To time.Time
	Policy   string  // in force
	Steps    uint64  // really
	StepMs   float64 // in the mean, really
	TwinMs   float64 // in the mean, as replayed under the policy in force
	Error    float64 // by what share of a step the twin is wrong
	Fresh    uint64  // of the steps, those that no verdict before was about
	Sure     bool    // enough windows were judged to know how wrong the twin is
	Ranks    int     // of the group

	// Of the model: requests on ranks and in the pool, in the mean. As many as come, so many more or less of them
	// are inside as each stays longer or less long.
	Inside, TwinInside float64 // really, and as replayed under the policy in force
	InsideError        float64 // by what share of these the twin is wrong

	Against []Against // one for each other policy
}

// Against is what a group would have had under another policy.
type Against struct {
	Spec    string
	Policy  string  // its name
	StepMs  float64 // in the mean, as replayed
	SavedMs float64 // of every step, by the policy in force; below 0 it loses
	Claimed bool    // that is more than the twin is wrong by
	Inside  float64 // requests of the model, as replayed
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
}

// New judges these policies, beside the one in force.
func New(specs []string) *Twin {
	return &Twin{specs: slices.Compact(slices.Clone(specs)), groups: map[board.GroupKey]*account{}}
}

// Take takes in a stretch that is whole, and the boards as they were at its end.
func (t *Twin) Take(s *Stretch, end *board.Boards) {
	if s.First {
		t.kept, t.judging = nil, nil
	}
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
	for i := range j.found {
		v := &j.found[i]
		name := j.replay.Boards.Policy()
		if name != v.Policy && !slices.ContainsFunc(v.Against, func(a Against) bool { return a.Policy == name }) {
			step, _ := j.replay.Mean(v.Group.Name)
			a := Against{Spec: t.specs[j.spec], Policy: name, StepMs: step, SavedMs: step - v.TwinMs, Inside: j.replay.Inside()}
			a.Claimed = v.Sure && step > 0 && math.Abs(a.SavedMs) > v.Error*v.StepMs
			v.Against = append(v.Against, a)
		}
	}
}

// real compares the replay of the policy in force with what was.
func (t *Twin) real(j *judging) (found []Verdict) {
	w, model := j.window, j.models[0]
	inside := w.Inside(model)
	maps.DeleteFunc(t.groups, func(key board.GroupKey, _ *account) bool {
		all, _ := w.End.Groups(key.Model)
		return viewOf(all, key) == nil
	})
	begun, _ := w.Measured().Boards.Groups(model)
	ended, _ := w.End.Groups(model)
	for _, to := range ended {
		from := viewOf(begun, to.Key)
		step, _ := j.replay.Mean(to.Key.Name)
		if from == nil || step == 0 || to.Steps <= from.Steps {
			continue
		}
		v := Verdict{Group: to.Key, From: w.Measured().From, To: w.To(), Policy: j.replay.Boards.Policy(), Steps: to.Steps - from.Steps, TwinMs: step, Ranks: len(to.Workers)}
		v.StepMs = (to.Seconds - from.Seconds) * 1000 / float64(v.Steps)
		a := t.groups[to.Key]
		if a == nil {
			a = &account{}
			t.groups[to.Key] = a
		}
		a.judged++
		v.Sure = a.judged >= leastJudged
		v.Inside, v.TwinInside = inside, j.replay.Inside()
		v.Error, v.InsideError = a.error.add(step, v.StepMs), a.inside.add(v.TwinInside, v.Inside)
		for _, s := range w.Stretches {
			if !s.From.Before(a.until) && !s.From.Before(v.From) {
				groups, _ := s.Boards.Groups(model)
				if then := viewOf(groups, to.Key); then != nil {
					v.Fresh = to.Steps - then.Steps
				}
				break
			}
		}
		a.until = w.To()
		found = append(found, v)
	}
	return found
}
