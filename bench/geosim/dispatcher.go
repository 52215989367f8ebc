package geosim

import (
	"slices"

	"evenkeel/geo/policy"
	"evenkeel/prefill"
	"evenkeel/prefill/index"
	prefillpolicy "evenkeel/prefill/policy"
)

// dispatcher is one region's: its arrival queue, what it knows of its replicas,
// and what its probes told of peers.
type dispatcher struct {
	s      *simulation
	id     string
	region int
	policy *policy.Policy

	replicas []*replica
	accounts []account
	peers    []*peer
	places   []policy.Place
	queue    []*visit // by arrival
	waiting  float64  // prompt tokens of the queue
	live     []*visit
	drain    policy.Drain

	local    *index.Index // what its replicas have, as far as it knows
	slots    []index.Slot
	snapshot *index.Index // what it forwarded, by peer
	match    []int32
	learned  *prefill.Calibration

	dead, draining bool
	major          int
	boot           int
}

// account is what the dispatcher knows of a replica: its own requests at once,
// what the engine says when it was last asked.
type account struct {
	unanswered  int
	outstanding int
	queued      float64 // new tokens of the unanswered
	pending     int
	credit      int
}

// What engines are configured with, and how long a look into the index is good.
const (
	maxNumSeqs = 256
	hitsFor    = 50.0 // ms
)

func newDispatcher(s *simulation, region int, replicas []*replica) (*dispatcher, error) {
	d := &dispatcher{s: s, id: s.scenario.Regions[region].Name, region: region, replicas: replicas, major: policy.Protocol}
	var err error
	if d.policy, err = s.arm.parse(); err != nil {
		return nil, err
	}
	d.forget()
	return d, nil
}

// forget is what a new process knows: nothing.
func (d *dispatcher) forget() {
	d.boot++
	d.local, d.snapshot = index.New(index.Config{}), index.New(index.Config{Evict: index.Oldest, MaxBytes: 64 << 20})
	d.slots = d.slots[:0]
	d.accounts = make([]account, len(d.replicas))
	for i, r := range d.replicas {
		d.slots = append(d.slots, d.local.Add(replicaNames[r.number], r.KVTokens/blockTokens))
		d.accounts[i].credit = 1
	}
	for _, p := range d.peers {
		*p = peer{to: p.to, rtt: policy.NewRTT(rttAlpha), slot: d.snapshot.Add(p.to.id, 0)}
	}
	d.queue, d.waiting, d.drain = d.queue[:0], 0, policy.Drain{}
	set := d.policy.Settings()
	d.learned = prefill.NewCalibration(prefillpolicy.Line{TPMs: set.TPMs, T0Ms: set.T0Ms}, 500)
}

// distance to a replica, one way.
func (d *dispatcher) distance(r *replica) float64 {
	if r.region == d.region {
		return 0
	}
	return d.s.scenario.RTTMs[d.region][r.region] / 2
}

func (d *dispatcher) admit(r *request, from *visit) *visit {
	v := &visit{r: r, d: d, from: from, attempt: r.attempt, arrived: d.s.now, hitsAt: -hitsFor, live: len(d.live)}
	v.q = policy.Request{ID: r.id, Key: r.key, Tokens: r.tokens, Stay: true}
	d.live = append(d.live, v)
	r.visits = append(r.visits, v)
	return v
}

// enqueue puts a visit where its arrival has its place, and decides.
func (d *dispatcher) enqueue(v *visit) {
	v.state = queued
	at, _ := slices.BinarySearchFunc(d.queue, v.arrived, func(x *visit, arrived float64) int {
		if x.arrived <= arrived {
			return -1
		}
		return 1
	})
	d.queue = slices.Insert(d.queue, at, v)
	d.waiting += float64(v.r.tokens)
	d.decide()
	if len(d.queue) > 0 {
		d.drain.Began(d.s.now)
	}
}

// decide lets those go that can.
func (d *dispatcher) decide() {
	if len(d.queue) == 0 || d.dead {
		return
	}
	d.look()
	d.policy.Begin(d.places, d.drain.Ms())
	order := fcfs{strict: !d.policy.Passes()}
	kept := d.queue[:0]
	rest := len(d.queue)
	for i, v := range d.queue {
		if d.policy.Done() && !d.s.arm.sglang {
			kept = append(kept, d.queue[i:]...)
			break
		}
		d.refresh(v)
		v.q.Waited = d.s.now - v.arrived
		c := d.next(v)
		if c.Act == policy.Hold {
			order.held(v, c)
			kept = append(kept, v)
			if c.UntilMs > v.q.Waited {
				d.s.after(c.UntilMs-v.q.Waited, d.decide)
			}
			continue
		}
		if !order.fair(v, c) {
			d.s.meter.violations++
		}
		rest--
		d.waiting -= float64(v.r.tokens)
		d.drain.Departed(d.s.now, rest)
		v.predict, v.hit = c.Terms.TTFT(), 0
		if c.Place < len(v.q.Hits) {
			v.hit = int(v.q.Hits[c.Place])
		}
		v.fresh = float64(max(1, v.r.tokens-v.hit))
		if c.Act == policy.Forward {
			d.forward(v, d.peers[c.Place-len(d.replicas)])
		} else {
			d.dispatch(v, c.Place)
		}
	}
	clear(d.queue[len(kept):])
	d.queue = kept
}

func (d *dispatcher) next(v *visit) policy.Decision {
	if d.s.arm.sglang {
		return policy.Decision{Act: policy.Send, Place: d.sglang(&v.q)}
	}
	return d.policy.Next(&v.q)
}

// fcfs checks that nobody is passed who could have gone instead.
type fcfs struct {
	strict bool
	any    bool         // somebody older waits
	may    bool         // somebody older waits who may be forwarded
	places map[int]bool // that somebody older is held for
}

func (f *fcfs) held(v *visit, c policy.Decision) {
	if c.UntilMs > 0 {
		return // skipped in patience
	}
	f.any = true
	f.may = f.may || !v.q.Stay
	if f.places == nil {
		f.places = map[int]bool{}
	}
	f.places[c.Place] = true
}

func (f *fcfs) fair(_ *visit, c policy.Decision) bool {
	if !f.strict {
		return !f.places[c.Place]
	}
	if c.Act == policy.Forward {
		return !f.may
	}
	return !f.any
}

// look gathers what is known of all places.
func (d *dispatcher) look() {
	line, _ := d.learned.Line()
	set := d.policy.Settings()
	d.places = d.places[:0]
	for i, r := range d.replicas {
		a := &d.accounts[i]
		x := policy.Place{
			ID: replicaNames[r.number], RTTMs: 2 * d.distance(r), TPMs: line.TPMs, T0Ms: line.T0Ms,
			QueuedTokens: a.queued, Running: float64(a.outstanding - a.unanswered), Outstanding: float64(a.outstanding),
		}
		x.Left, x.Why = set.Replica(&policy.Replica{
			Healthy: true, GateOpen: true, Unanswered: a.unanswered, Outstanding: a.outstanding, Pending: a.pending, Credit: a.credit,
		})
		d.places = append(d.places, x)
	}
	for _, p := range d.peers {
		d.places = append(d.places, d.place(p))
	}
}

// refresh looks up what of a prompt is cached where.
func (d *dispatcher) refresh(v *visit) {
	if d.s.now-v.hitsAt < hitsFor {
		return
	}
	v.hitsAt = d.s.now
	v.q.Hits = v.q.Hits[:0]
	d.match = d.local.Match(d.match, v.r.keys)
	for _, slot := range d.slots {
		v.q.Hits = append(v.q.Hits, d.usable(v, slot))
	}
	if len(d.peers) == 0 || v.q.Stay {
		return
	}
	d.match = d.snapshot.Match(d.match, v.r.keys)
	for _, p := range d.peers {
		v.q.Hits = append(v.q.Hits, d.usable(v, p.slot))
	}
}

func (d *dispatcher) usable(v *visit, s index.Slot) int32 {
	return int32(index.Usable(int(d.match[s.N])*blockTokens, v.r.tokens, blockTokens))
}

// dispatch sends a request to a replica of the dispatcher's own.
func (d *dispatcher) dispatch(v *visit, i int) {
	a, r := &d.accounts[i], d.replicas[i]
	v.state, v.place, v.movedAt, v.alone = running, i, d.s.now, a.unanswered == 0
	a.unanswered++
	a.outstanding++
	a.credit--
	a.queued += v.fresh
	d.local.Insert(d.slots[i], v.r.keys)
	if distance := d.distance(r); distance > 0 {
		d.s.after(distance, func() {
			if v.current() {
				v.job = r.submit(v)
			}
		})
		return
	}
	v.job = r.submit(v)
}

// first takes a first token of an own replica.
func (d *dispatcher) first(v *visit) {
	a := &d.accounts[v.place]
	v.answered = true
	a.unanswered--
	a.queued -= v.fresh
	if a.credit > 0 { // once it is used up, only a scrape gives more
		a.credit = min(a.credit+1, d.policy.Settings().CreditMax)
	}
	hit := v.job.hit
	if v.alone && v.r.executions == 1 {
		d.learned.Add(float64(max(1, v.r.tokens-hit)), float64(hit), d.s.now-v.movedAt-2*d.distance(d.replicas[v.place]))
	}
	if hit+blockTokens <= v.hit { // the index promised too much
		d.local.Correct(d.slots[v.place], v.r.keys, hit/blockTokens)
		d.local.Insert(d.slots[v.place], v.r.keys)
	}
	d.s.heard(v)
	d.decide()
}

// last takes a last token of an own replica.
func (d *dispatcher) last(v *visit) {
	d.accounts[v.place].outstanding--
	d.leave(v)
	if v.attempt == v.r.attempt {
		d.s.done(v)
	}
	d.decide()
}

// leave ends a visit.
func (d *dispatcher) leave(v *visit) {
	v.state = over
	end := len(d.live) - 1
	d.live[v.live] = d.live[end]
	d.live[v.live].live = v.live
	d.live[end] = nil
	d.live = d.live[:end]
}

// abandon ends a visit that nobody wants any more, and what was done for it.
func (d *dispatcher) abandon(v *visit) {
	switch v.state {
	case queued:
		if i := slices.Index(d.queue, v); i >= 0 {
			d.queue = slices.Delete(d.queue, i, i+1)
			d.waiting -= float64(v.r.tokens)
		}
	case running:
		a := &d.accounts[v.place]
		a.outstanding--
		if !v.answered {
			a.unanswered--
			a.queued -= v.fresh
		}
		if v.job != nil {
			d.replicas[v.place].withdraw(v.job)
		}
	}
	d.leave(v)
	d.s.after(0, d.decide)
}

// offer is what a probe of this region is answered.
func (d *dispatcher) offer() policy.Offer {
	d.look()
	return policy.NewOffer(d.places, len(d.queue), d.waiting, d.drain.Ms(), maxNumSeqs*len(d.replicas))
}

// scrape asks the engines, again and again.
func (d *dispatcher) scrape() {
	set := d.policy.Settings()
	for i, r := range d.replicas {
		a := &d.accounts[i]
		a.pending = r.pending()
		a.credit = set.Credit(len(r.batch), a.pending, maxNumSeqs)
	}
	d.decide()
	d.s.after(d.s.scenario.ScrapeMs, d.scrape)
}

// SGLang's router of early 2025: the shortest queue when loads are this far
// apart, else the longest match if that is half of the prompt, else whoever
// holds least.
const (
	sglangMatch    = 0.5
	sglangApart    = 32
	sglangRelative = 1.0001
)

func (d *dispatcher) sglang(q *policy.Request) int {
	least, most, best, smallest := 0, 0, 0, 0
	for i := range d.accounts {
		a := &d.accounts[i]
		if a.outstanding < d.accounts[least].outstanding {
			least = i
		}
		if a.outstanding > d.accounts[most].outstanding {
			most = i
		}
		if q.Hits[i] > q.Hits[best] {
			best = i
		}
		if d.local.Held(d.slots[i]) < d.local.Held(d.slots[smallest]) {
			smallest = i
		}
	}
	low, high := float64(d.accounts[least].outstanding), float64(d.accounts[most].outstanding)
	switch {
	case high-low > sglangApart && high > sglangRelative*low:
		return least
	case float64(q.Hits[best]) > sglangMatch*float64(q.Tokens):
		return best
	}
	return smallest
}
