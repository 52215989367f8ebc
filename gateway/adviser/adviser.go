// Package adviser samples the prefill and the decode side, and keeps the latest advice on the
// number of ranks (package advice) for metrics and /status. No request depends on it.
package adviser

import (
	"context"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/advice"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/pool"
	"evenkeel/prefill"
)

// An Adviser takes a sample of both sides at every interval.
type Adviser struct {
	deps Deps
	// by board, which serves one model; only the goroutine of Run uses them
	advisors map[string]*advice.Advisor
	latest   atomic.Pointer[[]advice.Advice]
}

// Deps has the parts of the proxy that the adviser reads.
type Deps struct {
	Settings   func() *config.Advice // in force
	Fleet      *fleet.Fleet
	Prefill    *prefill.Scheduler
	Dispatcher *dispatcher.Dispatcher
	Places     *pool.Semaphore
}

// New returns an adviser, which is also a collector of metrics.
func New(d Deps) *Adviser { return &Adviser{deps: d, advisors: map[string]*advice.Advisor{}} }

// Latest returns one entry per model; nil: there is none yet.
func (a *Adviser) Latest() []advice.Advice {
	if latest := a.latest.Load(); latest != nil {
		return *latest
	}
	return nil
}

// Run takes samples until ctx ends; with the interval 0 it returns at once.
func (a *Adviser) Run(ctx context.Context) {
	set := a.deps.Settings()
	if set.Interval == 0 {
		return
	}
	tick := time.NewTicker(set.Interval)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			a.observe(ctx, now)
		case <-ctx.Done():
			return
		}
	}
}

func (a *Adviser) observe(ctx context.Context, now time.Time) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	status := a.deps.Dispatcher.Status(ctx)
	if ctx.Err() != nil {
		return // the dispatcher's loop is stuck, and a sample of one side alone would mislead
	}
	settings := a.deps.Settings()
	latest := make([]advice.Advice, 0, len(status.Models))
	samples := a.takeSamples(now, status.Models)
	for _, board := range slices.Sorted(maps.Keys(samples)) {
		if a.advisors[board] == nil {
			a.advisors[board] = advice.New(advice.Settings{Window: settings.Window, CalmPeriod: settings.Calm, Target: settings.Target})
		}
		one := a.advisors[board].Observe(*samples[board])
		one.Model = board
		latest = append(latest, one)
	}
	maps.DeleteFunc(a.advisors, func(board string, _ *advice.Advisor) bool { return samples[board] == nil })
	a.latest.Store(&latest)
}

// takeSamples leaves out boards to none of whose ranks this proxy may send requests, because it
// does not know their load, and aggregated ranks, which have no other side.
func (a *Adviser) takeSamples(now time.Time, boards []board.ModelStatus) map[string]*advice.Sample {
	all := map[string]*advice.Sample{}
	pooled := 0
	for i := range boards {
		if _, isAggregated := roster.DisplayName(boards[i].Model); isAggregated {
			continue
		}
		thisProxyAdmits := func(w board.WorkerStatus) bool { return a.deps.Fleet.Now().Admits(w.ID) }
		if slices.ContainsFunc(boards[i].Workers, thisProxyAdmits) {
			all[boards[i].Model] = &advice.Sample{At: now, Decode: a.decodeSample(&boards[i])}
		}
		pooled += boards[i].Pool // all boards share one pool
	}
	runningPrefills := a.addPrefillRanks(all)
	a.addBacklogs(all, a.poolIsFull(pooled, runningPrefills))
	return all
}

// poolIsFull: running prefills take places, too, so finished ones (pooled) must take more.
func (a *Adviser) poolIsFull(pooled, inflight int) bool {
	return a.deps.Places.Used() >= a.deps.Places.Size() && pooled > inflight
}

// addBacklogs: poolFull goes only into samples with waiting requests, because it means that these
// wait for decode ranks, too.
func (a *Adviser) addBacklogs(all map[string]*advice.Sample, poolFull bool) {
	for model, waiting := range a.deps.Prefill.Backlogs() {
		board := model
		if r, ok, _ := a.deps.Fleet.Now().Lookup(model); ok {
			board = r.Board // model may be a LoRA
		}
		if s := all[board]; s != nil {
			s.Prefill.Requests += waiting.Requests
			s.Prefill.WaitingSeconds += waiting.Seconds
			s.PoolFull = poolFull
		}
	}
}

// addPrefillRanks returns how many prefills have no answer yet.
func (a *Adviser) addPrefillRanks(all map[string]*advice.Sample) (inflight int) {
	for _, c := range a.deps.Prefill.Status() {
		if c.Aggregated {
			continue
		}
		inflight += c.Inflight
		switch s := all[a.boardOfCandidate(&c, all)]; {
		case s == nil:
		case c.State == "open" || c.State == "closed": // closed: full for now, so still live
			addPrefill(&s.Prefill, &c)
		case c.State == "down" && a.needsNoRepair(c.Instance):
			s.Prefill.OutOfService++
		case c.State == "down":
			s.Prefill.Down++
		}
	}
	return inflight
}

// needsNoRepair: a rank of such an engine that takes no requests only drains or is halted, so the
// advice counts it as out of service, not as down.
func (a *Adviser) needsNoRepair(instance string) bool {
	e := a.deps.Fleet.Now().Engine(instance)
	if e == nil {
		return false
	}
	s := &e.Status
	allRanksAnswer := s.Up && s.RankCount == 0
	failsRequests := s.Wedged || s.Out != nil
	// a halted engine gets no requests that could fail
	return allRanksAnswer && (s.Halted() || !failsRequests)
}

// decodeSample: if the capacity of one rank is unknown, that of the side is 0 (unknown).
func (a *Adviser) decodeSample(m *board.ModelStatus) advice.Decode {
	d := advice.Decode{Pool: m.Pool, Oldest: time.Duration(m.OldestSeconds * float64(time.Second)), Ended: m.Finished + m.Cancelled + m.Failed}
	ranks := a.deps.Fleet.Now()
	allCapacitiesKnown := true
	for _, w := range m.Workers {
		if !w.Up {
			switch r := ranks.Rank(w.ID); {
			// it has left, or another proxy knows how it is
			case w.Removed || r == nil || !ranks.Admits(w.ID):
			case w.Down || !a.needsNoRepair(r.Instance):
				d.Down++
			default:
				d.OutOfService++
			}
			continue
		}
		d.Live++
		d.Slots += w.Slots
		d.Used += w.Used
		d.KVTokens += w.KVTokens
		d.Capacity += w.Capacity
		allCapacitiesKnown = allCapacitiesKnown && w.Capacity > 0
	}
	if !allCapacitiesKnown {
		d.Capacity = 0
	}
	return d
}

// addPrefill: of the prompts sent to the rank, one runs and the others wait.
func addPrefill(p *advice.Prefill, c *prefill.CandidateStatus) {
	p.Live++
	if c.Inflight > 0 {
		p.Busy++
		ourSeconds := (c.BacklogMs - c.OthersMs) / 1000    // for this proxy's prompts
		runningSeconds := ourSeconds / float64(c.Inflight) // an engine computes one prompt at a time
		p.RunningSeconds += runningSeconds
		p.WaitingSeconds += ourSeconds - runningSeconds
	}
	if c.CapacityTokens > 0 { // 0: not known, so the KV tokens do not count either
		p.KVTokens += c.KVTokens
		p.Capacity += c.CapacityTokens
	}
}

// boardOfCandidate takes the first model of the rank that has a board; empty: none has.
func (a *Adviser) boardOfCandidate(c *prefill.CandidateStatus, boards map[string]*advice.Sample) string {
	for _, model := range c.Models {
		board := model
		if route, ok, _ := a.deps.Fleet.Now().Lookup(model); ok {
			board = route.Board // model may be a LoRA
		}
		// A hand-off to another region goes to the board there.
		if board = roster.BoardIn(board, a.deps.Fleet.Now().RegionFor(c.Instance)); boards[board] != nil {
			return board
		}
	}
	return ""
}

var (
	adviceModel = []string{"model"}
	descAdvice  = prometheus.NewDesc("evenkeel_advice",
		"1 for each kind and reason that is advised now, and 0 for all others. Up to two are advised at once.",
		[]string{"model", "kind", "reason"}, nil)
	descAdvised = prometheus.NewDesc("evenkeel_advised_ranks",
		"Ranks that the side should have. It is the number of ranks while nothing is advised.", []string{"model", "role"}, nil)
	descLive = prometheus.NewDesc("evenkeel_live_ranks", "Ranks of the side that answer and take requests.",
		[]string{"model", "role"}, nil)
	descRatio       = prometheus.NewDesc("evenkeel_pd_ratio_advice", "Advised prefill ranks for each advised decode rank.", adviceModel, nil)
	descPrefillWait = prometheus.NewDesc("evenkeel_prefill_backlog_seconds", "Time until a prompt that comes now would begin: the arrival "+
		"queue and the unanswered probes, by the learned prefill times, divided by the number of ranks.", adviceModel, nil)
	descDecodeWait = prometheus.NewDesc("evenkeel_decode_backlog_seconds",
		"Time until a hand-off that comes now would get a slot: the hand-offs in the pool, divided by the answers that end per second.",
		adviceModel, nil)
	descUtilisation = prometheus.NewDesc("evenkeel_utilisation_ratio", "Share in use, a mean of one minute. time: prefill ranks with a "+
		"probe. slots: decode slots. kv: KV budgets. 1 less the share of slots is the idle share of decode.",
		[]string{"model", "role", "resource"}, nil)
	adviceDescriptors = []*prometheus.Desc{descAdvice, descAdvised, descLive, descRatio, descPrefillWait, descDecodeWait, descUtilisation}
)

// Describe implements prometheus.Collector.
func (a *Adviser) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range adviceDescriptors {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (a *Adviser) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for _, one := range a.Latest() {
		for _, step := range advice.Steps() {
			on := 0.0
			if slices.Contains(one.Steps, step) {
				on = 1
			}
			gauge(descAdvice, on, one.Model, step.Kind, step.Reason)
		}
		for role, side := range map[string]advice.Side{roster.Prefill: one.Prefill, roster.Decode: one.Decode} {
			gauge(descAdvised, float64(side.Advised), one.Model, role)
			gauge(descLive, float64(side.Live), one.Model, role)
			resource := map[string]string{roster.Prefill: "time", roster.Decode: "slots"}[role]
			gauge(descUtilisation, side.Busy, one.Model, role, resource)
			gauge(descUtilisation, side.KV, one.Model, role, "kv")
		}
		if one.Ratio > 0 {
			gauge(descRatio, one.Ratio, one.Model)
		}
		gauge(descPrefillWait, one.Prefill.BacklogSeconds, one.Model)
		gauge(descDecodeWait, one.Decode.BacklogSeconds, one.Model)
	}
}
