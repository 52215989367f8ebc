package main

import (
	"context"
	"math"
	"slices"

	"evenkeel/dispatcher/rounds"
	"evenkeel/dispatcher/virtual"
	"evenkeel/stats"
)

// policy is who chooses the ranks of requests.
type policy struct {
	name  string
	route func(s *run, q *request) int // of a proxy that sends each request when it comes
	rule  rounds.Rule                  // of one that holds them, where route is nil
	delay int                          // passes for which the engines hold prompts
	every int64                        // steps of the engines between those that compute prompts
	exact bool                         // the proxy knows how long prompts are
}

// run is a policy on a load.
type run struct {
	*load
	policy
	requests []request
	group    virtual.Mixed
	accounts []account
	caches   []cache
	seen     []asked // what engines told of their queues, which is up to 100 ms old
	seenAt   float64
	turn     int

	now       float64
	next      int // request
	waiting   []rounds.Candidate
	jobs      []int32 // of waiting
	wake      float64
	under     []delivery // way to the engine, next first
	planner   rounds.Planner
	ranks     []rounds.Rank
	rank      []int32 // by request: where it went
	sent      []int32 // by request: the tokens that its account was charged with
	came      []float64
	first     []float64
	from, to  float64 // what is measured came then, ms
	unended   int     // of those that came then
	tokens    int
	answers   int64 // tokens of those that ended, which a proxy sees
	ended     int64
	ttft      []float64
	tpot      []float64
	prefills  int // steps with one
	steps     int
	computing float64 // sum over those of the share of ranks that compute one
}

type asked struct{ running, waiting int }

type delivery struct {
	at  float64
	job int32
}

// Runs are measured over so many mean stays, after some more in which they settle.
const (
	settles = 5
	lasts   = 30
	patient = 3 // times as long as that requests are waited for that came in it
)

// outcome is what a policy made of a load.
type outcome struct {
	tokens, ttft, ttft99, tpot50, tpot95 float64 // tokens/s, ms
	prefill                              float64 // share of steps in which prompts are computed
	empty                                float64 // share of ranks that compute none in those
	cut                                  int     // requests that were not waited for
}

func newRun(l *load, p policy) *run {
	until := (settles + lasts) * l.stays
	n := int(until/l.gap*2) + 4*l.there + 100
	s := &run{
		load: l, policy: p, requests: l.requests(n, l.gap), wake: virtual.Never, from: settles * l.stays, to: until, seenAt: math.Inf(-1),
		accounts: make([]account, l.ranks), caches: make([]cache, l.ranks), seen: make([]asked, l.ranks), ranks: make([]rounds.Rank, l.ranks),
		rank: make([]int32, n), sent: make([]int32, n), came: make([]float64, n), first: make([]float64, n),
	}
	s.group = virtual.Mixed{
		Law: l.law, Budget: l.budget, Slots: l.slots, Room: l.room, Delay: p.delay, Interval: p.every, Ranks: make([]virtual.MixedRank, l.ranks), Ends: virtual.Never,
		Cached: s.cached, Token: s.token, Finished: s.finished,
	}
	if l.rho == 0 { // the first ones come over a mean stay, the others when one has left
		for i := range s.requests {
			s.requests[i].at = virtual.Never
			if i < l.there {
				s.requests[i].at = l.stays * float64(i) / float64(l.there)
			}
		}
	}
	return s
}

// do runs it. It is over when all that came in the measured time have ended, or are waited for no longer.
func (s *run) do(ctx context.Context) (outcome, error) {
	last := s.to + patient*(s.to-s.from)
	for turns := 0; s.now < s.to || s.unended > 0 && s.now < last; turns++ {
		if turns%1024 == 0 && ctx.Err() != nil {
			return outcome{}, ctx.Err()
		}
		at := min(s.group.Ends, s.wake)
		if s.next < len(s.requests) {
			at = min(at, s.requests[s.next].at)
		}
		if len(s.under) > 0 {
			at = min(at, s.under[0].at)
		}
		if at == virtual.Never {
			break
		}
		s.now = at
		if s.group.Ends <= at {
			s.step()
		}
		for len(s.under) > 0 && s.under[0].at <= at {
			s.deliver(s.under[0].job)
			s.under = s.under[1:]
		}
		for s.next < len(s.requests) && s.requests[s.next].at <= at {
			s.arrive(int32(s.next))
			s.next++
		}
		if s.route == nil {
			s.decide()
		}
		s.group.Begin(at)
	}
	return s.outcome(), nil
}

func (s *run) outcome() outcome {
	for job := range s.next { // who has no token yet has waited for so long at least
		if s.first[job] == 0 && s.measured(s.came[job]) {
			s.ttft = append(s.ttft, s.now-s.came[job])
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
	if s.measured(s.now) {
		s.steps++
		if n := s.group.Prefilling; n > 0 {
			s.prefills++
			s.computing += float64(n) / float64(s.load.ranks)
		}
	}
	for i := range s.accounts {
		s.accounts[i].stepped(s.budget)
	}
	s.group.Finish()
}

func (s *run) arrive(job int32) {
	q := &s.requests[job]
	s.came[job] = s.now
	if s.measured(s.now) {
		s.unended++
	}
	if s.route != nil {
		s.send(job, s.route(s, q))
		return
	}
	s.waiting = append(s.waiting, rounds.Candidate{Prompt: s.length(q), Since: math.NaN(), Until: math.Inf(1)})
	s.jobs = append(s.jobs, job)
}

// length is what the proxy takes a prompt for.
func (s *run) length(q *request) int32 {
	if s.exact {
		return q.prompt
	}
	return max(1, int32(float64(q.prompt)*q.guessed))
}

func (s *run) uncached(q *request, r int) int32 {
	n := s.length(q)
	if q.shared == 0 {
		return n
	}
	return max(1, n-min(q.shared, s.caches[r].holds(q.chat))/block*block)
}

// send puts a request on its way to a rank.
func (s *run) send(job int32, r int) {
	q := &s.requests[job]
	s.rank[job], s.sent[job] = int32(r), s.length(q)
	s.accounts[r].send(job, s.sent[job], s.uncached(q, r))
	d := delivery{s.now + q.late, job}
	i, _ := slices.BinarySearchFunc(s.under, d, func(a, b delivery) int {
		if a.at <= b.at {
			return -1
		}
		return 1
	})
	s.under = slices.Insert(s.under, i, d)
}

func (s *run) deliver(job int32) {
	q := &s.requests[job]
	s.group.Add(int(s.rank[job]), virtual.Work{Job: job, Prompt: q.prompt, Left: q.output})
}

// decide asks for a round.
func (s *run) decide() {
	s.wake = virtual.Never
	if len(s.waiting) == 0 {
		return
	}
	free := 0
	decoding := 0
	for i := range s.ranks {
		a := &s.accounts[i]
		k := rounds.Rank{Slots: max(0, s.slots-a.requests), Room: math.MaxInt64 / 2, Backlog: a.backlog, Load: float64(a.kv) + float64(a.requests)*s.law.Weight()}
		if s.room > 0 {
			k.Room = s.room - s.room/100 - a.kv - s.growth(a.decoding)
			if a.requests == 0 {
				k.Room = s.room
			}
		}
		s.ranks[i] = k
		free += k.Slots
		decoding += a.decoding
	}
	if free == 0 {
		return
	}
	n := min(len(s.waiting), free+free/2)
	for i := range n {
		c := &s.waiting[i]
		c.Hits = s.hits(c.Hits[:0], &s.requests[s.jobs[i]])
	}
	g := rounds.Group{Ranks: s.ranks, Decoding: decoding, Slots: len(s.ranks) * s.slots, Own: s.law.OwnMs / 1000, Request: s.law.Weight()}
	picks, wake := s.planner.Decide(s.now/1000, &g, s.waiting[:n], s.rule)
	s.wake = max(wake*1000, math.Nextafter(s.now, virtual.Never))
	slices.SortFunc(picks, func(a, b rounds.Pick) int { return int(a.Candidate - b.Candidate) })
	for _, k := range picks {
		s.send(s.jobs[k.Candidate], int(k.Rank))
		s.jobs[k.Candidate] = -1
	}
	if len(picks) > 0 {
		kept := 0
		for i, job := range s.jobs {
			if job >= 0 {
				s.waiting[kept], s.jobs[kept] = s.waiting[i], job
				kept++
			}
		}
		clear(s.waiting[kept:])
		s.waiting, s.jobs = s.waiting[:kept], s.jobs[:kept]
	}
}

// growth is how many tokens answers of a rank get until the next one of them ends, in the mean.
func (s *run) growth(decoding int) int64 {
	if decoding == 0 || s.ended == 0 {
		return 0
	}
	return s.answers / s.ended
}

func (s *run) cached(rank int, w *virtual.Work) int32 {
	q := &s.requests[w.Job]
	if q.shared == 0 {
		return 0
	}
	return min(q.shared, s.caches[rank].holds(q.chat)) / block * block
}

func (s *run) token(rank int, w *virtual.Work) {
	a, q := &s.accounts[rank], &s.requests[w.Job]
	if s.measured(s.now) {
		s.tokens++
	}
	if w.Gen == 1 {
		a.begun(w.Job, int64(q.prompt)-int64(s.sent[w.Job]))
		s.first[w.Job] = s.now
		if s.measured(s.came[w.Job]) {
			s.ttft = append(s.ttft, s.now-s.came[w.Job])
		}
		s.keep(rank, q, w.Prompt)
	}
	a.kv++
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

func (s *run) finished(rank int, w *virtual.Work) {
	q := &s.requests[w.Job]
	s.accounts[rank].ended(int64(w.Prompt) + int64(w.Gen))
	s.answers += int64(w.Gen)
	s.ended++
	s.keep(rank, q, w.Prompt+w.Gen)
	if s.measured(s.came[w.Job]) {
		s.unended--
		if w.Gen > 1 {
			s.tpot = append(s.tpot, (s.now-s.first[w.Job])/float64(w.Gen-1))
		}
	}
	if s.rho == 0 {
		for i := s.next; i < len(s.requests); i++ {
			if s.requests[i].at == virtual.Never {
				s.requests[i].at = s.now
				break
			}
		}
	}
}
