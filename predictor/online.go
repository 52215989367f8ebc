package predictor

import (
	"fmt"
	"math"
	"time"
)

// Bounds of what Online remembers.
const (
	OutputsMost    = 4096 // output lengths that are remembered over all requests
	KeyOutputsMost = 64   // output lengths that are remembered per key, which stands for equal prompts
	KeysMost       = 4096 // keys with enough outputs to predict from; as many keys again may still have too few

	// LengthOutputsMost is the number of last outputs of one length bucket: all buckets together have as many as there are of all
	// requests. With 64 outputs, as for a key, predictions are worse than without length buckets: on Mooncake's trace, with a horizon
	// of 80 steps, the Brier score is 0.157, compared to 0.149 with 512 outputs and 0.150 without buckets (less is better).
	LengthOutputsMost = OutputsMost / LengthBuckets
)

// Rebuild makes new tables after so many finished requests, or after so much time.
const (
	rebuildCount = 64
	rebuildEvery = time.Second
)

// OnlineConfig says what Online learns.
type OnlineConfig struct {
	Kind Kind // none, survival or exact
	Fit  *Fit // the fit to start from; nil: from nothing
}

// Online learns from requests as they finish. It is not safe for concurrent use: one goroutine owns it, records the finished requests, and
// publishes the tables that Rebuild returns. Until it has learned from a fit or a request, its predictors behave like None.
type Online struct {
	kind Kind

	outputs      ring
	byLength     [LengthBuckets]ring // outputs by length bucket; only for the kind exact
	lengthBounds []int32             // upper bounds of the length buckets, in prompt tokens; empty: not known yet
	prompts      ring                // prompt lengths from which lengthBounds will be computed
	boundsFinal  bool                // lengthBounds do not change any more: a fit gave them, or they were computed
	keys         keyBuckets

	fromFit      *Survival // table of the fit file; nil: there is none
	current      *Survival // the table that was built last
	sinceRebuild int       // requests that have finished since tables were built last
	rebuiltAt    time.Time
	everBuilt    bool   // Rebuild has built tables before
	finished     uint64 // requests that Online has learned from
	censored     uint64 // cancelled or failed requests, which Online has left out
}

// NewOnline returns an Online that starts from a fit, or from nothing.
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
	return o, o.seedFromFit(cfg.Fit)
}

// seedFromFit records the outputs of the fit as the oldest finished requests. A bucket of the fit has the outputs of a range of prompt
// lengths or of a key, i.e. of equal prompts. If there are more outputs than a ring can hold, seedFromFit records a part of them with the
// same distribution.
func (o *Online) seedFromFit(f *Fit) error {
	o.fromFit = NewSurvival(f.Outputs.Lengths())
	for _, v := range f.Outputs.sampleEvenly(OutputsMost) {
		o.outputs.push(v)
	}
	if o.kind != KindExact { // only Exact predicts from buckets
		return nil
	}
	if len(f.PromptQuantiles) > 0 {
		o.lengthBounds, o.boundsFinal = f.PromptQuantiles, true
	}
	for _, b := range f.Buckets {
		key, bucket, err := b.Name.parse()
		if err != nil {
			return fmt.Errorf("fit file: %w", err)
		}
		if isLengthBucket := bucket != noBucket; isLengthBucket {
			for _, v := range b.Outputs.sampleEvenly(LengthOutputsMost) {
				o.byLength[bucket].push(v)
			}
		} else {
			for _, v := range b.Outputs.sampleEvenly(KeyOutputsMost) {
				o.keys.push(key, v)
			}
		}
	}
	return nil
}

// Finished records a request that has ended by itself. prompt and output are in tokens; key 0: the prompt has no key. Equal prompts have
// equal keys.
//
// The kind exact predicts from buckets: the outputs of equal prompts, and those of prompts of about the same length. The bounds of the
// length buckets come from a fit, or Build computes them once enough prompts are known. Until then, Finished collects the prompts for this.
func (o *Online) Finished(prompt, output int32, key uint64) {
	if output < 1 { // an empty answer shows nothing about the length of other answers
		return
	}
	o.finished++
	o.sinceRebuild++
	o.outputs.push(output)
	if o.kind != KindExact { // the other kinds have no buckets
		return
	}
	if key != 0 {
		o.keys.push(key, output)
	}
	if !o.boundsFinal {
		o.prompts.push(prompt)
	}
	if len(o.lengthBounds) > 0 { // the bounds are known
		o.byLength[lengthBucket(o.lengthBounds, prompt)].push(output)
	}
}

// Censored counts requests that were cancelled or failed. Online does not learn from them: their outputs would be too short.
func (o *Online) Censored(n int) { o.censored += uint64(n) }

// Rebuild returns new tables if they are due: at the first call, and then after 64 finished requests or, if any has finished, after a
// second.
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

// Build returns a predictor of the kind and the survival table, which has the distribution of the lengths of all outputs that Online
// remembers. Rebuild calls it when tables are due, that is, after some finished requests or some time; any other caller gets new tables at
// once. From then on, Drift compares with this table, and Rebuild counts the finished requests anew.
//
// The kind exact predicts from the narrowest group that has enough outputs: requests with the same key (equal prompts), requests whose
// prompts are about as long (byLength), or all requests.
func (o *Online) Build() (Predictor, *Survival) {
	o.sinceRebuild = 0
	o.current = NewSurvival(o.outputs.buf)
	switch o.kind {
	case KindNone:
		return None{}, o.current
	case KindExact:
		o.computeBounds()
		e := &Exact{all: o.current, lengthBounds: o.lengthBounds, byKey: o.keys.tables()}
		if len(o.lengthBounds) > 0 {
			e.byLength = make([]*Survival, LengthBuckets)
			for k := range o.byLength {
				e.byLength[k] = NewSurvival(o.byLength[k].buf)
			}
		}
		return e, o.current
	}
	return o.current, o.current // KindSurvival: the table itself is the predictor
}

// computeBounds computes the bounds of the length buckets when enough requests have finished, and puts their outputs into the buckets. It
// does so only once, so that a bucket always has the same prompts, and never if the bounds came from a fit.
func (o *Online) computeBounds() {
	tooFew := len(o.prompts.buf) < LengthBuckets*MinLengthOutputs // the buckets would not be used yet
	if len(o.lengthBounds) > 0 || tooFew {
		return
	}
	o.lengthBounds = quantileBounds(o.prompts.buf, LengthBuckets)
	outputs := o.outputs.last(len(o.prompts.buf)) // outputs of the requests whose prompts are in o.prompts
	for i, prompt := range o.prompts.values() {
		o.byLength[lengthBucket(o.lengthBounds, prompt)].push(outputs[i])
	}
	o.prompts, o.boundsFinal = ring{}, true
}

// Counts has the numbers of requests and outputs that the metrics show.
type Counts struct {
	Finished, Censored uint64 // requests that Online has learned from, and requests that it has left out
	Outputs, Keys      int    // lengths of outputs, and keys of requests, that Online remembers now
}

// Counts returns the numbers of requests since NewOnline, and of what Online remembers now.
func (o *Online) Counts() Counts {
	return Counts{Finished: o.finished, Censored: o.censored, Outputs: len(o.outputs.buf), Keys: o.keys.len()}
}

// Drift says how much the lengths of the last outputs differ from a table.
type Drift struct {
	Distance float64 // largest difference of the two cumulative distributions, 0 to 1 (Kolmogorov and Smirnov)
	Critical float64 // threshold that Distance exceeds by chance alone in one of 1000 cases
	Recent   int     // number of outputs that were compared, at most recentMost
}

// recentMost is how many of the last outputs are compared with a table.
const recentMost = 256

// Drifted reports whether the distance is larger than chance explains.
func (d Drift) Drifted() bool { return d.Recent > 0 && d.Distance > d.Critical }

// Drift compares the last outputs with the table in force. If the lengths of outputs change faster than the table, the drift is large.
func (o *Online) Drift() Drift { return o.drift(o.current) }

// DriftFromFit compares the last outputs with the fit file. If they have drifted, a new fit would predict better after the next restart.
// Without a fit file, it returns zeros.
func (o *Online) DriftFromFit() Drift { return o.drift(o.fromFit) }

// drift compares the last outputs with a table. It returns zeros if there are no last outputs, or none in the table.
func (o *Online) drift(table *Survival) Drift {
	if table.Len() == 0 || len(o.outputs.buf) == 0 {
		return Drift{}
	}
	recent := newHistory(o.outputs.last(recentMost))
	n, m := float64(len(recent.sorted)), float64(table.Len()) // the sizes of the two samples
	// 1.95 is the factor of the two-sample Kolmogorov-Smirnov test for one case in a thousand.
	d := Drift{Critical: 1.95 * math.Sqrt((n+m)/(n*m)), Recent: len(recent.sorted)}
	for i, v := range recent.sorted {
		if i+1 < len(recent.sorted) && recent.sorted[i+1] == v {
			continue // of equal lengths, only the last has the index i from which i+1, the count of lengths up to v, is right
		}
		// Both distributions change at whole lengths, so compare them at v and just below v.
		at := math.Abs(float64(i+1)/n - float64(table.countAtMost(int(v)))/m)
		below := math.Abs(float64(recent.countAtMost(int(v)-1))/n - float64(table.countAtMost(int(v)-1))/m)
		d.Distance = max(d.Distance, at, below)
	}
	return d
}
