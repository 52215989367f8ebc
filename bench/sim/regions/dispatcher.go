package regions

import (
	"cmp"
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"evenkeel/geo"
	"evenkeel/prefill"
)

// dispatcher is one region's: the server's own arrival queue and node, in virtual
// time, before the replicas of the region.
type dispatcher struct {
	s        *simulation
	id       string
	region   int
	replicas []*replica
	running  []int // of our requests that decode, by replica
	fewest   int   // of those, as the node is told

	scheduler *prefill.Scheduler
	peers     *geo.Peers
	live      []*visit
	told      []*visit // that the tier has decided about and that nobody has looked at yet

	dead, draining bool
	major          int // of the protocol that it speaks, above those that speak the first
	boot           int
}

const (
	model      = "simulated"
	maxNumSeqs = 256 // with which engines are configured
	snapshot   = 64 << 20

	// lookMs is how often a proxy tells its node what its engines decode.
	lookMs = 250.0
	// forever is longer than any run.
	forever = 100 * 365 * 24 * time.Hour
)

// start is a new process: it knows nothing.
func (d *dispatcher) start() error {
	d.boot++
	d.dead, d.fewest, d.told = false, 0, nil
	d.running = make([]int, len(d.replicas))
	var err error
	if d.scheduler, err = prefill.New(d.queue()); err != nil {
		return err
	}
	d.scheduler.SetCandidates(d.candidates())
	now := process{d, d.boot}
	cfg := d.s.arm.config()
	cfg.Self.ID, cfg.Self.Region = d.id, d.id
	cfg.Probe.Interval, cfg.PromptIndexBytes = time.Duration(d.s.probeMs*float64(time.Millisecond)), snapshot
	cfg.Queue, cfg.Draining = d.scheduler, func() bool { return d.draining }
	cfg.Running = func(string) (float64, int) { return float64(d.fewest), maxNumSeqs * len(d.replicas) }
	cfg.Clock, cfg.Link = now, func(peer string) geo.Link { return &link{process: now, to: d.s.named(peer)} }
	if d.s.arm.central {
		cfg.Mode, cfg.Central = geo.Central, d.id
	}
	for _, to := range d.s.dispatchers {
		if to != d && !d.s.arm.alone {
			cfg.Peers = append(cfg.Peers, geo.PeerConfig{ID: to.id, Region: to.id, Target: nowhere})
		}
	}
	if d.peers, err = geo.New(cfg); err != nil {
		return err
	}
	d.peers.Start()
	now.every(lookMs, d.look)
	return nil
}

// local is prefill.policy where there are regions and an engine prefills and decodes, unless the
// config says otherwise.
const local = "lmetric"

// queue is the configuration of the tier: the server's defaults, but for its clock and for the
// limits of the queue, since clients wait for each other.
func (d *dispatcher) queue() prefill.Config {
	cfg := prefill.Default()
	cfg.Policy, cfg.Policies = cmp.Or(d.s.arm.prefill, local), definitions
	cfg.Hotspot.Enabled = !d.s.arm.unguarded()
	// What a prefill takes is learned, as in a server, from half of the truth on.
	cfg.Calibration.TPMs, cfg.Calibration.T0Ms = d.s.scenario.Engine.TPMs/2, d.s.scenario.Engine.T0Ms/2
	cfg.Queue.Max, cfg.Queue.Timeout = math.MaxInt32, forever
	cfg.Scrape.Interval = time.Duration(d.s.scenario.ScrapeMs * float64(time.Millisecond))
	cfg.Clock = d.s.time
	cfg.Scraper = func(_ context.Context, c prefill.Candidate) (prefill.Sample, error) {
		sample := d.replicas[d.at(c.ID)].sample()
		if d.s.arm.unguarded() {
			sample.KVUsage, sample.KVHeld = math.NaN(), math.NaN()
		}
		return sample, nil
	}
	return cfg
}

func (d *dispatcher) candidates() (all []prefill.Candidate) {
	for _, r := range d.replicas {
		c := prefill.Candidate{
			ID: replicaNames[r.number], Instance: replicaNames[r.number], Models: []string{model}, CapacityTokens: int64(r.KVTokens),
			BlockTokens: blockTokens,
			Live:        true, Decodes: true, RTT: time.Duration(2 * d.distance(r) * float64(time.Millisecond)),
		}
		if r.region != d.region {
			c.Region = d.s.scenario.Regions[r.region].Name
		}
		if d.s.arm.unguarded() {
			c.CapacityTokens = 0
		}
		all = append(all, c)
	}
	return all
}

// at is the place of a replica among the dispatcher's own.
func (d *dispatcher) at(id string) int {
	return slices.IndexFunc(d.replicas, func(r *replica) bool { return replicaNames[r.number] == id })
}

// distance to a replica, one way.
func (d *dispatcher) distance(r *replica) float64 {
	if r.region == d.region {
		return 0
	}
	return d.s.scenario.RTTMs[d.region][r.region] / 2
}

// look tells the node what is decoded here, as a proxy does that asks its board now
// and then: how many requests the replica decodes that decodes fewest.
func (d *dispatcher) look() {
	if len(d.running) > 0 {
		d.fewest = slices.Min(d.running)
	}
}

// scrape asks the engines, again and again.
func (d *dispatcher) scrape() {
	if !d.dead {
		for _, r := range d.replicas {
			d.scheduler.Scrape(context.Background(), replicaNames[r.number])
		}
	}
	d.s.after(d.s.scenario.ScrapeMs, d.scrape)
}

func (d *dispatcher) admit(r *request, from *visit) *visit {
	v := &visit{r: r, d: d, from: from, attempt: r.attempt, arrived: d.s.now, live: len(d.live)}
	d.live = append(d.live, v)
	r.visits = append(r.visits, v)
	return v
}

// enqueue lets a visit wait for its turn. stay: it was elsewhere and came back, so
// that it waits at its old place and stays.
func (d *dispatcher) enqueue(v *visit, stay bool) {
	prompt := prefill.Prompt{Keys: v.r.keys, BlockTokens: blockTokens}
	ask := geo.Ask{ID: v.r.id, Model: model, RingKey: geo.RingKeyOf(v.r.key, ""), LocalOnly: stay}
	if v.from != nil { // it has made the one hop that it may
		ask.LocalOnly, ask.InboundHop = true, &geo.Hop{N: 1, Max: 1, Origin: v.from.d.id, Via: []string{v.from.d.id}}
	}
	if !ask.LocalOnly {
		ask.Prompt = prompt
	}
	v.state, v.query, v.lease, v.refused = queued, d.peers.NewQuery(ask), nil, nil
	v.withdraw = d.scheduler.Offer(prefill.Request{
		ID: v.r.id, Model: model, PromptTokens: v.r.tokens, Counted: true, Prompt: prompt, Session: v.r.key,
		Arrival: start.Add(time.Duration(v.arrived * float64(time.Millisecond))), Returned: stay, Remote: v.query,
	}, func(l *prefill.Lease, err error) {
		v.state, v.lease, v.refused = decided, l, err
		d.told = append(d.told, v)
	})
}

// settle carries out what the tier has decided.
func (d *dispatcher) settle() {
	for len(d.told) > 0 {
		v := d.told[0]
		d.told = append(d.told[:0], d.told[1:]...)
		switch {
		case v.state == over: // nobody wants it any more
			d.unwanted(v)
		case v.refused == nil:
			d.dispatch(v)
		case errors.Is(v.refused, prefill.ErrElsewhere):
			d.forward(v, v.query.Forward())
		default: // there is no replica here, and no peer is known that has one
			d.refuse(v)
		}
	}
}

// refuse says that nobody serves a request, to the client or to the dispatcher that
// sent it.
func (d *dispatcher) refuse(v *visit) {
	d.end(v)
	if from, attempt := v.from, v.attempt; from != nil {
		d.s.link(d, from.d, func() { from.d.comesBack(from, attempt, geo.RejectedError(geo.RejectModel)) })
		return
	}
	d.s.after(d.s.scenario.RTTMs[v.r.client.region][d.region]/2, func() { d.s.end(v.r, failed) })
}

// unwanted gives back what was decided for a visit in the moment in which it ended.
func (d *dispatcher) unwanted(v *visit) {
	if v.lease != nil {
		v.lease.Release()
	} else if f := v.query.Forward(); f != nil {
		f.DropUnsent()
	}
}

// dispatch sends a request to the replica that the tier has chosen.
func (d *dispatcher) dispatch(v *visit) {
	v.state, v.place = running, d.at(v.lease.Candidate.ID)
	r := d.replicas[v.place]
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
	v.answered = true
	d.running[v.place]++
	v.lease.Answered(prefill.Usage{PromptTokens: v.r.tokens, CachedTokens: v.job.hit}, start.Add(forever))
	d.s.heard(v, v.job.hit)
}

// last takes a last token of an own replica.
func (d *dispatcher) last(v *visit) {
	d.running[v.place]--
	v.lease.Release()
	d.end(v)
	if v.attempt == v.r.attempt {
		d.s.done(v)
	}
}

// end ends a visit.
func (d *dispatcher) end(v *visit) {
	v.state = over
	end := len(d.live) - 1
	d.live[v.live] = d.live[end]
	d.live[v.live].live = v.live
	d.live[end] = nil
	d.live = d.live[:end]
}

// abandon ends a visit that nobody wants any more, and what was done for it. A
// dispatcher that is dead has nothing to give back.
func (d *dispatcher) abandon(v *visit) {
	was := v.state
	d.end(v)
	switch {
	case was == running:
		if v.job != nil {
			d.replicas[v.place].withdraw(v.job)
		}
		if d.dead {
			return
		}
		if v.answered {
			d.running[v.place]--
		}
		v.lease.Release()
	case d.dead:
	case was == queued:
		v.withdraw()
	case was == forwarded:
		v.forward.End(geo.OutcomeGone)
	}
}

// receive takes a request that another dispatcher sends, or says why not, in the
// words that the server has for it.
func (d *dispatcher) receive(v *visit) (reject string) {
	switch {
	case d.major != v.d.major:
		return geo.RejectVersion
	case d.draining:
		return geo.RejectDraining
	case !d.peers.Accepts(v.d.id, d.scheduler.Waiting(model)):
		d.s.meter.count(&d.s.meter.busy, d.s.now)
		return geo.RejectBusy
	}
	d.enqueue(d.admit(v.r, v), false)
	return ""
}
