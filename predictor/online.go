package predictor

import (
	"fmt"
	"math"
	"time"
)

// Bounds of what Online remembers.
const (
	OutputsMost    = 4096 // last outputs of all requests
	KeyOutputsMost = 64   // last outputs of one key
	KeysMost       = 4096 // keys in use; and so many again that were seen too seldom to be

	// LengthOutputsMost is for one prompt-length bucket: together they hold as
	// many as all requests do. With 64, as for a key, they are noisier than no
	// bucket at all (Mooncake, horizon 80: Brier 0.157, with 512 0.149, all
	// requests in one 0.150).
	LengthOutputsMost = OutputsMost / LengthBuckets
)

// When Rebuild is due.
const (
	rebuildCount = 64
	rebuildEvery = time.Second
)

// OnlineConfig says what Online learns.
type OnlineConfig struct {
	Kind Kind // none, survival or exact
	Fit  *Fit // to start from, nil: from nothing
}

// Online learns from requests as they finish. It is not safe for concurrent
// use: one goroutine beside the dispatcher owns it, takes in what finished,
// and publishes what Rebuild returns. Until anything is known its predictors
// behave as None.
type Online struct {
	kind Kind

	outputs  ring
	byLength [LengthBuckets]ring // by edges; exact only
	edges    []int32
	prompts  ring // behind edges while no fit gave them
	fitEdges bool
	keys     keyBuckets

	fitted       *Survival // of the file, nil without
	inForce      *Survival // last rebuilt
	sinceRebuild int       // finished since
	rebuiltAt    time.Time
	everBuilt    bool // built is set
	finished     uint64
	censored     uint64
}

// NewOnline starts from a fit, or from nothing.
func NewOnline(cfg OnlineConfig) (*Online, error) {
	o := &Online{
		kind:    cfg.Kind,
		outputs: newRing(OutputsMost), prompts: newRing(OutputsMost), keys: newKeyBuckets(KeysMost),
	}
	for k := range o.byLength {
		o.byLength[k] = newRing(LengthOutputsMost)
	}
	switch cfg.Kind {
	case KindNone, KindSurvival, KindExact:
	default:
		return nil, fmt.Errorf("predictor %s: cannot learn from finished requests; use none, survival or exact", cfg.Kind)
	}
	if cfg.Fit == nil {
		return o, nil
	}
	return o, o.seed(cfg.Fit)
}

// seed takes the outputs of the fit as the oldest finished requests. If there are more than fit into a ring, it
// takes a part with the same distribution.
func (o *Online) seed(f *Fit) error {
	o.fitted = NewSurvival(f.Outputs.Lengths())
	for _, v := range f.Outputs.spread(OutputsMost) {
		o.outputs.push(v)
	}
	if o.kind != KindExact {
		return nil
	}
	if len(f.PromptQuantiles) > 0 {
		o.edges, o.fitEdges = f.PromptQuantiles, true
	}
	for _, b := range f.Buckets {
		key, length, err := b.Name.parse()
		if err != nil {
			return fmt.Errorf("fit file: %w", err)
		}
		if length >= 0 {
			for _, v := range b.Outputs.spread(LengthOutputsMost) {
				o.byLength[length].push(v)
			}
			continue
		}
		for _, v := range b.Outputs.spread(KeyOutputsMost) {
			o.keys.push(key, v)
		}
	}
	return nil
}

// Finished takes in a request that ended by itself.
func (o *Online) Finished(prompt, output int32, key uint64) {
	if output < 1 {
		return
	}
	o.finished++
	o.sinceRebuild++
	o.outputs.push(output)
	if o.kind != KindExact {
		return
	}
	if key != 0 {
		o.keys.push(key, output)
	}
	if !o.fitEdges {
		o.prompts.push(prompt)
	}
	if len(o.edges) > 0 {
		o.byLength[lengthBucket(o.edges, prompt)].push(output)
	}
}

// Censored counts requests that were cancelled or failed. They teach nothing:
// as finished outputs they would teach early endings.
func (o *Online) Censored(n int) { o.censored += uint64(n) }

// Rebuild returns new tables when they are due: at once at the start, then
// after 64 finished requests or, if any finished, after a second.
func (o *Online) Rebuild(now time.Time) (p Predictor, table *Survival, due bool) {
	byCount := o.sinceRebuild >= rebuildCount
	byTime := o.sinceRebuild > 0 && now.Sub(o.rebuiltAt) >= rebuildEvery
	if o.everBuilt && !byCount && !byTime {
		return nil, nil, false
	}
	o.everBuilt, o.rebuiltAt = true, now
	p, table = o.Build()
	return p, table, true
}

// Build returns tables of all that finished so far, due or not.
func (o *Online) Build() (Predictor, *Survival) {
	o.sinceRebuild = 0
	o.inForce = NewSurvival(o.outputs.buf)
	switch o.kind {
	case KindNone:
		return None{}, o.inForce
	case KindExact:
		o.learnEdges()
		e := &Exact{all: o.inForce, edges: o.edges, byKey: o.keys.tables()}
		if len(o.edges) > 0 {
			e.byLength = make([]*Survival, LengthBuckets)
			for k := range o.byLength {
				e.byLength[k] = NewSurvival(o.byLength[k].buf)
			}
		}
		return e, o.inForce
	}
	return o.inForce, o.inForce
}

// learnEdges divides prompts into length buckets if the fit did not: once, from the first prompts that finished, so that a bucket always
// means the same.
func (o *Online) learnEdges() {
	if len(o.edges) > 0 || len(o.prompts.buf) < LengthBuckets*MinLengthOutputs {
		return
	}
	o.edges = lengthEdges(o.prompts.buf, LengthBuckets)
	outputs := o.outputs.last(len(o.prompts.buf))
	for i, prompt := range o.prompts.values() {
		o.byLength[lengthBucket(o.edges, prompt)].push(outputs[i])
	}
	o.prompts, o.fitEdges = ring{}, true
}

// Counts are for metrics.
type Counts struct {
	Finished, Censored uint64 // requests taken in, left out
	Outputs, Keys      int    // remembered now
}

// Counts returns what was taken in so far.
func (o *Online) Counts() Counts {
	return Counts{Finished: o.finished, Censored: o.censored, Outputs: len(o.outputs.buf), Keys: o.keys.len()}
}

// Drift says how far the last outputs have moved from a table: the largest
// difference of the two distributions, in [0, 1] (Kolmogorov and Smirnov).
type Drift struct {
	Distance float64
	Critical float64 // chance alone stays below in 999 of 1000 cases
	Recent   int     // outputs compared, at most recentMost
}

// recentMost is how many of the last outputs are compared with a table.
const recentMost = 256

// Drifted reports a distance that is hardly chance.
func (d Drift) Drifted() bool { return d.Recent > 0 && d.Distance > d.Critical }

// Drift compares the last outputs with the table in force. The better the table keeps up with the outputs, the smaller
// the drift is.
func (o *Online) Drift() Drift { return o.drift(o.inForce) }

// DriftFromFit compares the last outputs with the fit file. If they have drifted, a new fit
// would do better after the next restart. It is zero without a file.
func (o *Online) DriftFromFit() Drift { return o.drift(o.fitted) }

// drift compares the last outputs with a table. It is zero if either has no outputs.
func (o *Online) drift(table *Survival) Drift {
	if table.Len() == 0 || len(o.outputs.buf) == 0 {
		return Drift{}
	}
	recent := newHistory(o.outputs.last(recentMost))
	n, m := float64(len(recent.sorted)), float64(table.Len())
	// 1.95 is the factor of the two-sample Kolmogorov-Smirnov test for one case in a thousand.
	d := Drift{Critical: 1.95 * math.Sqrt((n+m)/(n*m)), Recent: len(recent.sorted)}
	for i, v := range recent.sorted {
		if i+1 < len(recent.sorted) && recent.sorted[i+1] == v {
			continue
		}
		// Both functions step at whole lengths: compare at v and right below it.
		at := math.Abs(float64(i+1)/n - float64(table.rank(int(v)))/m)
		below := math.Abs(float64(recent.rank(int(v)-1))/n - float64(table.rank(int(v)-1))/m)
		d.Distance = max(d.Distance, at, below)
	}
	return d
}
