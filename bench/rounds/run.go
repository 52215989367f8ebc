package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
	"evenkeel/stats"
)

// contender is who chooses the ranks of requests.
type contender struct {
	name  string
	spec  string // of a policy of the server's, which holds requests in its pool
	route router // of a proxy that sends each request when it comes; nil: spec decides
	delay int    // passes for which the engines hold prompts
	every int    // steps of the engines between those that compute prompts
	exact bool   // the proxy knows how long prompts are
	learn bool   // it learns what a step takes; else that is told
}

// run is a policy on a load: ranks in virtual time, and the server's own board before them.
type run struct {
	*load
	contender
	virtual.Mixes
	group    *virtual.MixedGroup
	learner  board.Learner
	learned  bool // something was, since tables were looked at
	requests []request
	caches   []cache
	seen     []asked // what engines told of their queues, which is up to 100 ms old
	seenAt   float64
	turn     int
	cut      func() // before each turn, for who keeps what happens; nil: nobody does

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
)

// model is the one that all requests are for.
const model = "m"

// outcome is what a policy made of a load.
type outcome struct {
	tokens, ttft, ttft99, tpot50, tpot95 float64 // tokens/s, ms
	prefill                              float64 // share of steps in which prompts are computed
	empty                                float64 // share of ranks that compute none in those
	cut                                  int     // requests that were not waited for
}

func newRun(l *load, p contender) (*run, error) {
	until := (settles + lasts) * l.stays
	n := int(until/l.gap*2) + 4*l.there + 100
	s := &run{
		load: l, contender: p, requests: l.requests(n, l.gap), from: settles * l.stays, to: until, seenAt: math.Inf(-1),
		caches: make([]cache, l.ranks), seen: make([]asked, l.ranks), came: make([]float64, n), first: make([]float64, n),
	}
	cfg := board.Config{Policy: p.spec}
	if p.route != nil {
		cfg.Parse = s.parse
	}
	b, err := board.New(cfg)
	if err != nil {
		return nil, err
	}
	s.Driver = virtual.NewDriver(b, time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), model)
	s.Mixes.Token, s.Mixes.Finished = s.token, s.finished
	s.Bound, s.Other = s.send, s.other
	s.Refused = func(e *board.Effect) { panic(e.Err) } // each request fits every rank, see length
	s.fleet()
	if l.rho == 0 { // the first ones come over a mean stay, the others when one has left
		for i := range s.requests {
			s.requests[i].at = virtual.Never
			if i < l.there {
				s.requests[i].at = l.stays * float64(i) / float64(l.there)
			}
		}
	}
	return s, nil
}

// serve is what a policy makes of a load.
func serve(ctx context.Context, l *load, p contender) (outcome, error) {
	s, err := newRun(l, p)
	if err != nil {
		return outcome{}, err
	}
	return s.do(ctx)
}

// fleet tells the board of the ranks, and of what a step takes.
func (s *run) fleet() {
	key := board.GroupKey{Model: model, Name: "0", Barrier: true}
	ids := make([]int32, s.ranks)
	workers := make([]board.Worker, s.ranks)
	for i := range ids {
		ids[i] = int32(i)
		workers[i] = board.Worker{
			ID: int32(i), Name: strconv.Itoa(i), Model: model, Group: key.Name, Barrier: true, Slots: s.slots, Capacity: s.room, Up: true,
			Mixed: true, Budget: int(s.budget), Interval: s.every,
		}
	}
	engines := virtual.Mixed{Law: s.law, Budget: s.budget, Slots: s.slots, Room: s.room, Delay: s.delay, Interval: int64(s.every)}
	s.group = s.Add(key, engines, ids, s.cached)
	s.Apply(board.SetWorkers{Workers: workers}, 0)
	if s.learn {
		return
	}
	s.Apply(board.Law{Group: key, StepModel: s.law}, 0)
}

// do runs it. It is over when all that came in the measured time have ended, or are waited for no longer.
func (s *run) do(ctx context.Context) (outcome, error) {
	last := s.to + patient*(s.to-s.from)
	for turns := 0; s.Now < s.to || s.unended > 0 && s.Now < last; turns++ {
		if turns%1024 == 0 && ctx.Err() != nil {
			return outcome{}, ctx.Err()
		}
		if s.cut != nil {
			s.cut()
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
func (s *run) come() {
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

func (s *run) outcome() outcome {
	for job := range s.next { // who has no token yet has waited for so long at least
		if s.first[job] == 0 && s.measured(s.came[job]) {
			s.ttft = append(s.ttft, s.Now-s.came[job])
		}
	}
	slices.Sort(s.ttft)
	slices.Sort(s.tpot)
	o := outcome{tokens: float64(s.tokens) / (s.to - s.from) * 1000, ttft: stats.Mean(s.ttft), cut: s.unended}
	if len(s.ttft) > 0 {
		o.ttft99 = stats.Percentile(s.ttft, 0.99)
	}
	if len(s.tpot) > 0 {
		o.tpot50, o.tpot95 = stats.Percentile(s.tpot, 0.5), stats.Percentile(s.tpot, 0.95)
	}
	if s.steps > 0 {
		o.prefill = float64(s.prefills) / float64(s.steps)
	}
	if s.prefills > 0 {
		o.empty = 1 - s.computing/float64(s.prefills)
	}
	return o
}

func (s *run) measured(at float64) bool { return s.from <= at && at < s.to }

func (s *run) step() {
	if s.measured(s.Now) {
		s.steps++
		if n := s.group.Prefilling; n > 0 {
			s.prefills++
			s.computing += float64(n) / float64(s.load.ranks)
		}
	}
}

func (s *run) arrive(job int32) {
	s.came[job] = s.Now
	if s.measured(s.Now) {
		s.unended++
	}
	s.queue = append(s.queue, job)
}

// letGo lets requests go to the board: as many as there are free slots, and half as many again. A router has each at once.
func (s *run) letGo() {
	free := s.load.ranks*s.slots - s.bound
	for len(s.queue) > 0 && (s.route != nil || s.pooled < max(1, free+free/2)) {
		job := s.queue[0]
		s.queue = s.queue[1:]
		q := &s.requests[job]
		now := s.Instant(s.Now)
		s.pooled++
		s.Apply(board.Enqueue{
			Entry: &board.Entry{ID: uint64(job) + 1, Model: model, Mixed: true, Prompt: int(s.length(q)), Arrival: now, Entered: now},
			Hits:  s.hits(q),
		}, s.Now)
		if s.route != nil { // it knows of those before
			s.Look(s.Now)
		}
	}
}

// length is what the proxy takes a prompt for: not for more than a rank has room for, or the board would turn it away.
func (s *run) length(q *request) int32 {
	n := q.prompt
	if !s.exact {
		n = max(1, int32(float64(q.prompt)*q.guessed))
	}
	if s.room > 0 {
		n = min(n, int32(0.95*float64(s.room)))
	}
	return n
}

// send puts a request on its way to the rank that the board chose.
func (s *run) send(e *board.Effect) {
	job := int32(e.Entry.ID - 1)
	q := &s.requests[job]
	s.pooled--
	s.bound++
	s.Send(s.group, int(e.Bound.Worker), virtual.Work{Job: job, Slot: e.Bound.Slot, Prompt: q.prompt, Left: q.output}, q.late)
}

// other learns how long answers are, as the server does.
func (s *run) other(e *board.Effect) {
	switch e.Kind {
	case board.EffectSubject:
		if err := s.learner.Follow(e.Subject, e.Fit); err != nil {
			panic(err) // it begins with nothing
		}
	case board.EffectEnding:
		s.learner.Learn(&e.Ending)
		s.learned = true
	case board.EffectInvalid, board.EffectFallback:
		panic(fmt.Sprintf("%s: %s %v", s.name, e.Label, e.Err))
	}
}

func (s *run) cached(rank int, w *virtual.Work) int32 {
	q := &s.requests[w.Job]
	if q.shared == 0 {
		return 0
	}
	return min(q.shared, s.caches[rank].holds(q.chat)) / block * block
}

func (s *run) token(_ *virtual.MixedGroup, rank int, w *virtual.Work) {
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

func (s *run) keep(rank int, q *request, tokens int32) {
	if s.chats == 0 {
		return
	}
	room := int64(math.MaxInt64)
	if s.room > 0 {
		room = s.room - s.group.Ranks[rank].KV
	}
	s.caches[rank].keep(q.chat, tokens, room)
}

func (s *run) finished(_ *virtual.MixedGroup, rank int, w *virtual.Work) {
	q := &s.requests[w.Job]
	s.bound--
	s.keep(rank, q, w.Prompt+w.Gen)
	if s.measured(s.came[w.Job]) {
		s.unended--
		if w.Gen > 1 {
			s.tpot = append(s.tpot, (s.Now-s.first[w.Job])/float64(w.Gen-1))
		}
	}
	if s.rho == 0 {
		for i := s.next; i < len(s.requests); i++ {
			if s.requests[i].at == virtual.Never {
				s.requests[i].at = s.Now
				break
			}
		}
	}
}
