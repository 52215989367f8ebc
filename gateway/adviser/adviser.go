// Package adviser samples the prefill and decode ranks of each model, and keeps the latest advice on their number (package advice) for
// metrics and /status. Requests are served without it.
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

// Adviser takes a sample at each interval. Only the goroutine of Run uses the advisors.
type Adviser struct {
	host     Host
	advisors map[string]*advice.Advisor // by board
	given    atomic.Pointer[[]advice.Advice]
}

// Host is the proxy that is advised.
type Host struct {
	Settings   func() *config.Advice // in force
	Fleet      *fleet.Fleet
	Tier       *prefill.Tier
	Dispatcher *dispatcher.Dispatcher
	Places     *pool.Places
}

// New returns an adviser that has no advice yet. It is also a collector of metrics.
func New(h Host) *Adviser { return &Adviser{host: h, advisors: map[string]*advice.Advisor{}} }

// Latest returns the last advice for each model.
func (a *Adviser) Latest() []advice.Advice {
	if given := a.given.Load(); given != nil {
		return *given
	}
	return nil
}

// Run takes samples until ctx ends.
func (a *Adviser) Run(ctx context.Context) {
	set := a.host.Settings()
	if set.Interval == 0 {
		return
	}
	tick := time.NewTicker(set.Interval)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			a.look(ctx, now)
		case <-ctx.Done():
			return
		}
	}
}

// look takes a sample of every model, and forgets models whose boards are gone.
func (a *Adviser) look(ctx context.Context, now time.Time) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	status := a.host.Dispatcher.Status(ctx)
	if ctx.Err() != nil {
		return // the dispatcher did not answer in time, and half a sample would mislead
	}
	set := a.host.Settings()
	given := make([]advice.Advice, 0, len(status.Models))
	samples := a.samples(now, status.Models)
	for _, board := range slices.Sorted(maps.Keys(samples)) {
		if a.advisors[board] == nil {
			a.advisors[board] = advice.New(advice.Settings{Window: set.Window, Calm: set.Calm, Target: set.Target})
		}
		one := a.advisors[board].Observe(*samples[board])
		one.Model = board
		given = append(given, one)
	}
	maps.DeleteFunc(a.advisors, func(board string, _ *advice.Advisor) bool { return samples[board] == nil })
	a.given.Store(&given)
}

// samples returns a sample of each board, with the prefill ranks that serve it. A LoRA adapter counts as part of its base model. Boards
// whose ranks another proxy admits to are left out, because their load is not known here. Aggregated ranks are left out, because they have
// no other side to be balanced with.
func (a *Adviser) samples(now time.Time, boards []board.ModelStatus) map[string]*advice.Sample {
	all := map[string]*advice.Sample{}
	pooled := 0
	for i := range boards {
		if _, together := fleet.Called(boards[i].Model); together {
			continue
		}
		if slices.ContainsFunc(boards[i].Workers, func(w board.WorkerStatus) bool { return a.host.Fleet.Now().Admits(w.ID) }) {
			all[boards[i].Model] = &advice.Sample{At: now, Decode: decodeSide(&boards[i])}
		}
		pooled += boards[i].Pool
	}
	inflight := 0
	for _, c := range a.host.Tier.Status() {
		if c.Aggregated {
			continue
		}
		inflight += c.Inflight
		switch s := all[a.boardOfCandidate(&c, all)]; {
		case s == nil:
		case c.State == "open" || c.State == "closed":
			addPrefill(&s.Prefill, &c)
		case c.State == "down":
			s.Prefill.Down++
		}
	}
	full := a.host.Places.Used() >= a.host.Places.Size() && pooled > inflight
	for model, waiting := range a.host.Tier.Backlogs() {
		board := model
		if r, ok, _ := a.host.Fleet.Now().Lookup(model); ok {
			board = r.Board
		}
		if s := all[board]; s != nil {
			s.Prefill.Requests += waiting.Requests
			s.Prefill.Waiting += waiting.Seconds
			s.PoolFull = full
		}
	}
	return all
}

func decodeSide(m *board.ModelStatus) advice.Decode {
	d := advice.Decode{Pool: m.Pool, Oldest: time.Duration(m.OldestSeconds * float64(time.Second)), Ended: m.Finished + m.Cancelled + m.Failed}
	known := true
	for _, w := range m.Workers {
		if w.Down {
			d.Down++
		}
		if !w.Up {
			continue
		}
		d.Live++
		d.Slots += w.Slots
		d.Used += w.Used
		d.KVTokens += w.KVTokens
		d.Capacity += w.Capacity
		known = known && w.Capacity > 0
	}
	if !known {
		d.Capacity = 0
	}
	return d
}

func addPrefill(p *advice.Prefill, c *prefill.CandidateStatus) {
	p.Live++
	if c.Inflight > 0 {
		p.Busy++
		ours := (c.BacklogMs - c.OthersMs) / 1000
		runs := ours / float64(c.Inflight) // an engine computes one probe at a time
		p.Begun += runs
		p.Waiting += ours - runs
	}
	if c.CapacityTokens > 0 {
		p.KVTokens += c.KVTokens
		p.Capacity += c.CapacityTokens
	}
}

// boardOfCandidate returns the name of the board whose decode ranks get the hand-offs of a prefill rank: that of the first of its models
// whose board is in boards; empty: none is.
func (a *Adviser) boardOfCandidate(c *prefill.CandidateStatus, boards map[string]*advice.Sample) string {
	for _, model := range c.Models {
		board := model
		if route, ok, _ := a.host.Fleet.Now().Lookup(model); ok {
			board = route.Board // model may be a LoRA, which shares the board of its base model
		}
		if board = roster.BoardIn(board, a.host.Fleet.Now().RegionFor(c.Instance)); boards[board] != nil {
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
	descLive        = prometheus.NewDesc("evenkeel_live_ranks", "Ranks of the side that answer.", []string{"model", "role"}, nil)
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
		for role, side := range map[string]advice.Side{fleet.Prefill: one.Prefill, fleet.Decode: one.Decode} {
			gauge(descAdvised, float64(side.Advised), one.Model, role)
			gauge(descLive, float64(side.Live), one.Model, role)
			resource := map[string]string{fleet.Prefill: "time", fleet.Decode: "slots"}[role]
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
