// Package mixed serves requests, with lengths as they are drawn or found, with ranks that prefill
// and decode behind one barrier, in virtual time and behind the server's own boards.
package mixed

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/step"
	"evenkeel/dispatcher/virtual"
	"evenkeel/internal/stats"
)

// Contender is who chooses the ranks of requests.
type Contender struct {
	Name   string
	Spec   string     // of a policy of the server's, which holds requests in its pool
	Route  Router     // of a proxy that sends each request when it comes; nil: spec decides
	Delay  int        // passes for which the engines hold prompts
	Budget int32      // tokens of a rank in a step, that the engines were started with; 0: those of the load
	Every  int        // steps of the engines between those that compute prompts
	Rests  bool       // these steps are counted from one that computes prompts, as in SGLang
	Exact  bool       // the proxy knows how long prompts are
	Learn  bool       // it learns what a step takes; else that is told
	Form   *step.Form // that is told; nil: that of the engines
}

// Run is a policy on a load: ranks in virtual time, and the server's own board in front of them.
type Run struct {
	*Load
	Contender
	virtual.MixedEngines
	group    *virtual.MixedGroup
	budget   int32
	learner  board.Learner
	learned  bool // something was, since tables were looked at
	requests []request
	caches   []cache
	seen     []asked // what engines told of their queues, which is up to 100 ms old
	seenAt   float64
	turn     int
	err      error  // of the first decision that could not be made
	Before   func() // called before each turn, by a recorder; nil: nothing is recorded

	next      int     // request
	queue     []int32 // of those that came, those that were not let go to the board, first come first served
	pooled    int     // requests that wait on the board
	bound     int     // requests that have a slot
	came      []float64
	first     []float64
	from, to  float64 // what is measured came then, ms
	unended   int     // of those that came then
	tokens    int
	ttft      []float64
	tpot      []float64
	prefills  int // steps with one
	steps     int
	computing float64 // sum over those of the share of ranks that compute one
}

type asked struct{ running, waiting int }

// Runs are measured over so many mean stays, after some more in which they settle.
const (
	settles = 5
	lasts   = 30
	patient = 3 // times as long as that requests are waited for that came in it

	Lasts = settles + lasts
)

// model is the one that all requests are for.
const model = "m"

// Outcome is what a policy made of a load.
type Outcome struct {
	Tokens, TTFT, TTFT99, TPOT50, TPOT95 float64 // tokens/s, ms
	Prefill                              float64 // share of steps in which prompts are computed
	Empty                                float64 // share of ranks that compute none in those
	Unended                              int     // requests that were not waited for
}

// New prepares one.
func New(l *Load, p Contender) (*Run, error) {
	until := (settles + lasts) * l.Stays
	n := int(max(2/l.Gap, l.fastest)*until) + 4*l.There + 100
	s := &Run{
		Load: l, Contender: p, budget: cmp.Or(p.Budget, l.Budget), requests: l.requests(n, l.Gap), from: settles * l.Stays, to: until, seenAt: math.Inf(-1),
		caches: make([]cache, l.Ranks), seen: make([]asked, l.Ranks), came: make([]float64, n), first: make([]float64, n),
	}
	cfg := board.Config{Policy: p.Spec}
	if p.Route != nil {
		cfg.Parse = s.parse
	}
	b, err := board.New(cfg)
	if err != nil {
		return nil, err
	}
	s.Driver = virtual.NewDriver(b, time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), model)
	s.MixedEngines.Token, s.MixedEngines.Finished = s.token, s.finished
	s.OnBind, s.OnOtherEffect = s.send, s.other
	s.OnRefuse = func(e *board.Effect) { // length makes each request fit, unless a policy keeps much free
		s.err = cmp.Or(s.err, fmt.Errorf("%s: a request fits no rank: %w", p.Name, e.Err))
	}
	s.fleet()
	if l.Rho == 0 { // the first ones come over a mean stay, the others when one has left
		for i := range s.requests {
			s.requests[i].at = virtual.Never
			if i < l.There {
				s.requests[i].at = l.Stays * float64(i) / float64(l.There)
			}
		}
	}
	return s, nil
}

// Serve is what a policy makes of a load.
func Serve(ctx context.Context, l *Load, p Contender) (Outcome, error) {
	s, err := New(l, p)
	if err != nil {
		return Outcome{}, err
	}
	return s.Do(ctx)
}

// fleet tells the board of the ranks, and of what a step takes.
func (s *Run) fleet() {
	key := board.GroupKey{Model: model, Name: "0", Barrier: true}
	ids := make([]int32, s.Ranks)
	workers := make([]board.Worker, s.Ranks)
	for i := range ids {
		ids[i] = int32(i)
		workers[i] = board.Worker{
			ID: int32(i), Name: strconv.Itoa(i), Model: model, Group: key.Name, Barrier: true, Slots: s.Slots, Capacity: s.Room, Up: true,
			Mixed: true, Budget: int(s.budget), Interval: s.Every, AfterPrompts: s.Rests,
		}
	}
	engines := virtual.Mixed{Law: s.Law, Budget: s.budget, Slots: s.Slots, KVCapacity: s.Room, Delay: s.Delay,
		Interval: int64(s.Every), AfterPrompts: s.Rests}
	s.group = s.Add(key, engines, ids, s.cached)
	s.Apply(board.SetWorkers{Workers: workers}, 0)
	if s.Learn {
		return
	}
	told := s.Law
	if s.Form != nil {
		told.Form = *s.Form
	}
	law, use := told.Assumed()
	s.Apply(board.SetStepModel{Group: key, StepModel: law, Weights: use}, 0)
}

// Do runs it. It is over when all that came in the measured time have ended, or are waited for no
// longer.
func (s *Run) Do(ctx context.Context) (Outcome, error) {
	last := s.to + patient*(s.to-s.from)
	for turns := 0; s.Now < s.to || s.unended > 0 && s.Now < last; turns++ {
		if turns%1024 == 0 && ctx.Err() != nil {
			return Outcome{}, ctx.Err()
		}
		if s.err != nil {
			return Outcome{}, s.err
		}
		if s.Before != nil {
			s.Before()
		}
		at := s.Due()
		if s.next < len(s.requests) {
			at = min(at, s.requests[s.next].at)
		}
		if at == virtual.Never {
			break
		}
		s.Now = max(s.Now, at)
		if s.group.Ends <= s.Now {
			s.step()
		}
		s.Turn(s.come)
	}
	return s.outcome(), nil
}

// come is what happens now beside the ends of steps.
func (s *Run) come() {
	if s.learned {
		s.learned = false
		built, _ := s.learner.Rebuild(s.Instant(s.Now))
		for _, t := range built {
			s.Apply(t, s.Now)
		}
	}
	for s.next < len(s.requests) && s.requests[s.next].at <= s.Now {
		s.arrive(int32(s.next))
		s.next++
	}
	s.letGo()
}

func (s *Run) outcome() Outcome {
	for job := range s.next { // who has no token yet has waited for so long at least
		if s.first[job] == 0 && s.measured(s.came[job]) {
			s.ttft = append(s.ttft, s.Now-s.came[job])
		}
	}
	slices.Sort(s.ttft)
	slices.Sort(s.tpot)
	o := Outcome{Tokens: float64(s.tokens) / (s.to - s.from) * 1000, TTFT: stats.Mean(s.ttft), Unended: s.unended}
	if len(s.ttft) > 0 {
		o.TTFT99 = stats.Percentile(s.ttft, 0.99)
	}
	if len(s.tpot) > 0 {
		o.TPOT50, o.TPOT95 = stats.Percentile(s.tpot, 0.5), stats.Percentile(s.tpot, 0.95)
	}
	if s.steps > 0 {
		o.Prefill = float64(s.prefills) / float64(s.steps)
	}
	if s.prefills > 0 {
		o.Empty = 1 - s.computing/float64(s.prefills)
	}
	return o
}

func (s *Run) measured(at float64) bool { return s.from <= at && at < s.to }

func (s *Run) step() {
	if s.measured(s.Now) {
		s.steps++
		if n := s.group.Prefilling; n > 0 {
			s.prefills++
			s.computing += float64(n) / float64(s.Load.Ranks)
		}
	}
}

func (s *Run) arrive(job int32) {
	s.came[job] = s.Now
	if s.measured(s.Now) {
		s.unended++
	}
	s.queue = append(s.queue, job)
}

// letGo lets requests go to the board: as many as there are free slots, and half as many again. A
// router has each at once.
func (s *Run) letGo() {
	free := s.Load.Ranks*s.Slots - s.bound
	for len(s.queue) > 0 && (s.Route != nil || s.pooled < max(1, free+free/2)) {
		job := s.queue[0]
		s.queue = s.queue[1:]
		q := &s.requests[job]
		now := s.Instant(s.Now)
		s.pooled++
		s.Apply(board.Enqueue{
			Entry: &board.Entry{ID: uint64(job) + 1, Model: model, Aggregated: true, Prompt: int(s.length(q)), Arrival: now, Entered: now},
			Hits:  s.hits(q),
		}, s.Now)
		if s.Route != nil { // it knows of those before
			s.Tick(s.Now)
		}
	}
}

// length is what the proxy takes a prompt for: not for more than a rank has room for, or the board
// would turn it away.
func (s *Run) length(q *request) int32 {
	n := q.prompt
	if !s.Exact {
		n = max(1, int32(float64(q.prompt)*q.guessed))
	}
	if s.Room > 0 {
		n = min(n, int32(0.95*float64(s.Room)))
	}
	return n
}

// send puts a request on its way to the rank that the board chose.
func (s *Run) send(e *board.Effect) {
	job := int32(e.Entry.ID - 1)
	q := &s.requests[job]
	s.pooled--
	s.bound++
	s.Send(s.group, int(e.Bound.Worker), virtual.MixedRequest{Job: job, Slot: e.Bound.Slot, Prompt: q.prompt, Left: q.output}, q.late)
}

// other learns how long answers are, as the server does.
func (s *Run) other(e *board.Effect) {
	switch e.Kind {
	case board.EffectNewPredictor:
		if err := s.learner.Follow(e.Predictor, e.Fit); err != nil {
			panic(err) // it begins with nothing
		}
	case board.EffectOutputSample:
		s.learner.Learn(&e.Sample)
		s.learned = true
	case board.EffectInvalid, board.EffectFallback:
		s.err = cmp.Or(s.err, fmt.Errorf("%s: %s: %w", s.Name, e.Label, e.Err))
	}
}

func (s *Run) cached(rank int, w *virtual.MixedRequest) int32 {
	q := &s.requests[w.Job]
	if q.shared == 0 {
		return 0
	}
	return min(q.shared, s.caches[rank].holds(q.chat)) / block * block
}

func (s *Run) token(_ *virtual.MixedGroup, rank int, w *virtual.MixedRequest) {
	q := &s.requests[w.Job]
	if s.measured(s.Now) {
		s.tokens++
	}
	if w.Gen == 1 {
		s.Apply(board.Recount{Model: model, Slot: w.Slot, Prompt: int(w.Prompt)}, s.Now)
		s.first[w.Job] = s.Now
		if s.measured(s.came[w.Job]) {
			s.ttft = append(s.ttft, s.Now-s.came[w.Job])
		}
		s.keep(rank, q, w.Prompt)
	}
}

func (s *Run) keep(rank int, q *request, tokens int32) {
	if s.Chats == 0 {
		return
	}
	room := int64(math.MaxInt64)
	if s.Room > 0 {
		room = s.Room - s.group.Ranks[rank].KV
	}
	s.caches[rank].keep(q.chat, tokens, room)
}

func (s *Run) finished(_ *virtual.MixedGroup, rank int, w *virtual.MixedRequest) {
	q := &s.requests[w.Job]
	s.bound--
	s.keep(rank, q, w.Prompt+w.Gen)
	if s.measured(s.came[w.Job]) {
		s.unended--
		if w.Gen > 1 {
			s.tpot = append(s.tpot, (s.Now-s.first[w.Job])/float64(w.Gen-1))
		}
	}
	if s.Rho == 0 {
		for i := s.next; i < len(s.requests); i++ {
			if s.requests[i].at == virtual.Never {
				s.requests[i].at = s.Now
				break
			}
		}
	}
}
