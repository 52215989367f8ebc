package predictor

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
)

// Options say how Train fits. A field that is zero stands for its default, which is given in brackets.
type Options struct {
	Horizon int           // decode steps over which an end is predicted (80)
	Every   int           // a request is predicted each time it has got so many more tokens (20)
	Holdout float64       // share of the requests, at the end, that are kept out of the fit and used to score it (0.25)
	Step    time.Duration // assumed time of a token for samples that have no End (55 ms)
	Created time.Time
	Source  Source
}

// withDefaults returns the options with the defaults in place of fields that are zero.
func (o Options) withDefaults() Options {
	o.Horizon, o.Every = cmp.Or(o.Horizon, 80), cmp.Or(o.Every, 20)
	o.Holdout, o.Step = cmp.Or(o.Holdout, 0.25), cmp.Or(o.Step, 55*time.Millisecond)
	return o
}

// validate checks options in which withDefaults has filled in the defaults.
func (o Options) validate() error {
	switch {
	case o.Horizon < 1:
		return fmt.Errorf("horizon %d: want at least 1 step", o.Horizon)
	case o.Every < 1:
		return fmt.Errorf("every %d: want at least 1 token", o.Every)
	case !(o.Holdout > 0 && o.Holdout < 1): // this form also refuses NaN
		return fmt.Errorf("holdout %v: want a share above 0 and below 1", o.Holdout)
	case o.Step < 0: // not 0, which withDefaults has replaced by the default
		return fmt.Errorf("step %v: want a positive time a token", o.Step)
	}
	return nil
}

// Auto as the kind for Train means the kind that has the lowest Brier score.
const Auto = "auto"

// minTrain is the least number of requests from which a fit is made. Policies would ignore the mean output of a fit to fewer requests.
const minTrain = 50

// Bounds of the requests for Train.
const (
	maxRequests     = 2_000_000 // most requests of one fit, because all their predictions are kept in memory
	maxOutputTokens = 1 << 20   // most tokens of one output
)

// Train fits a kind ("survival", "exact" or "auto") to requests in the order of arrival. To score the kind, it makes a fit to the earlier
// requests and predicts the later ones. The fit that it returns is made from all requests.
func Train(kind string, reqs []Sample, opt Options) (*Fit, error) {
	opt = opt.withDefaults()
	if err := opt.validate(); err != nil {
		return nil, fmt.Errorf("fit: %w", err)
	}
	var kinds []Kind
	switch kind {
	case Auto:
		kinds = []Kind{KindSurvival, KindExact}
	case string(KindSurvival), string(KindExact):
		kinds = []Kind{Kind(kind)}
	default:
		return nil, fmt.Errorf("fit: kind %q cannot be trained: give survival, exact or auto", kind)
	}
	if err := checkSamples(reqs); err != nil {
		return nil, fmt.Errorf("fit: %w", err)
	}
	cut := len(reqs) - int(math.Round(float64(len(reqs))*opt.Holdout))
	if nothingHeldOut := cut == len(reqs); cut < minTrain || nothingHeldOut {
		return nil, fmt.Errorf("fit: %d requests to train on and %d held out of %d: want at least %d and 1", cut, len(reqs)-cut, len(reqs),
			minTrain)
	}

	t := trial{reqs: reqs, trainCount: cut, opt: opt}
	t.prepareRows()
	f := &Fit{Version: FitVersion, Created: opt.Created, Source: opt.Source}
	for _, k := range kinds {
		h, err := t.score(k)
		if err != nil {
			return nil, fmt.Errorf("fit: %w", err)
		}
		f.Compared = append(f.Compared, Comparison{Kind: k, Scores: h.Scores})
		if first := f.Kind == ""; first || h.Brier < f.Holdout.Brier { // in a tie, the simpler kind stays
			f.Kind, f.Holdout = k, h
		}
	}
	f.fillTables(reqs)
	return f, nil
}

// checkSamples returns an error if the requests are not in the order of arrival, are too many, or have impossible lengths.
func checkSamples(reqs []Sample) error {
	for i := range reqs {
		if i > 0 && reqs[i].At < reqs[i-1].At {
			return fmt.Errorf("request %d arrived %v before the one above it: sort by arrival", i, reqs[i-1].At-reqs[i].At)
		}
		if output := reqs[i].Output; output < 1 || output > maxOutputTokens || reqs[i].Prompt < 0 {
			return fmt.Errorf("request %d has %d prompt and %d output tokens: leave out what generated nothing or over %d", i,
				reqs[i].Prompt, output, maxOutputTokens)
		}
	}
	if len(reqs) > maxRequests {
		return fmt.Errorf("%d requests, at most %d fit in memory with their rows: give the newest", len(reqs), maxRequests)
	}
	return nil
}

// fillTables fills in the tables from all requests. The requests that were kept out to score the fit are the newest, so they are most like
// future ones.
func (f *Fit) fillTables(reqs []Sample) {
	f.Source.Rows = len(reqs)
	outputs := make([]int32, len(reqs))
	for i, r := range reqs {
		outputs[i] = r.Output
	}
	f.Outputs = NewRuns(outputs)
	if f.Kind == KindExact { // the other kind, survival, predicts from all outputs together
		f.PromptQuantiles, f.Buckets = buckets(reqs)
	}
}

// trial divides the requests into those that a predictor learns from and those that are kept out to score it.
type trial struct {
	reqs       []Sample
	trainCount int // the predictor learns from reqs[:trainCount]
	opt        Options
	points     []agePoint // age points of the requests that are kept out, sorted by time
	baseRate   Prediction // BaseRate of reqs[:trainCount]: the scores of a predictor are compared with those of this prediction
}

// prepareRows sets points from the requests that are kept out, and baseRate from the others. An age point is a moment of a request at which
// a server would predict it: when it arrives, and each time it has got Every more tokens. These moments are spread evenly between its
// arrival and its end. If the end is not known, each token is assumed to take Step.
func (t *trial) prepareRows() {
	t.points = agePoints(t.reqs, t.trainCount, t.opt.Every, t.opt.Step) // from the request with the index trainCount on
	var rows []Row                                                      // of the requests from which the predictor learns
	for _, p := range agePoints(t.reqs[:t.trainCount], 0, t.opt.Every, t.opt.Step) {
		rows = append(rows, t.row(p, Prediction{})) // the prediction is empty, because BaseRate reads only the outcomes
	}
	t.baseRate = BaseRate(rows)
}

// row returns a prediction about an age point (a request at the time when it had p.age tokens), together with its outcome. The prediction
// has the probability of an end within the horizon (P), and the mean number of further tokens in this case (Mu).
func (t *trial) row(p agePoint, prediction Prediction) Row {
	remaining := int(t.reqs[p.request].Output - p.age) // tokens that the request got after that
	return Row{P: prediction.P, Mu: prediction.Mu, Remaining: float64(remaining), Ended: remaining <= t.opt.Horizon}
}

// score learns from the first requests with a predictor of the given kind, and scores its predictions for the requests that are kept out.
func (t *trial) score(k Kind) (Holdout, error) {
	var bounds []int32 // of the length buckets, from which only the kind exact predicts
	if k == KindExact {
		bounds = lengthBoundsOf(t.reqs[:t.trainCount])
	}
	rows, err := t.predictHeldOut(k, bounds)
	if err != nil {
		return Holdout{}, err
	}
	const bins = 10
	return Holdout{
		Requests: len(t.reqs) - t.trainCount, Horizon: t.opt.Horizon,
		Scores: Score(rows), Base: ScoreConstant(rows, t.baseRate), Reliability: Calibrate(rows, bins),
	}, nil
}

// buckets returns the length buckets with their bounds, and then, for each key that occurs often enough, a bucket with its last
// outputs.
func buckets(reqs []Sample) (bounds []int32, buckets []Bucket) {
	keys := map[uint64]*ring{}
	for _, r := range reqs {
		if r.Key == 0 { // the request has no key, and counts only in its length bucket
			continue
		}
		if keys[r.Key] == nil {
			b := newRing(KeyOutputsMost)
			keys[r.Key] = &b
		}
		keys[r.Key].push(r.Output)
	}
	bounds = lengthBoundsOf(reqs)
	var lengths [LengthBuckets][]int32
	for _, r := range reqs {
		k := lengthBucket(bounds, r.Prompt)
		lengths[k] = append(lengths[k], r.Output)
	}
	for k := range lengths {
		buckets = append(buckets, Bucket{Name: lengthName(k), Outputs: NewRuns(lengths[k])})
	}
	for key, b := range keys {
		if len(b.buf) >= MinKeyOutputs {
			buckets = append(buckets, Bucket{Name: keyName(key), Outputs: NewRuns(b.buf)})
		}
	}
	// The length buckets are in order already, and the keys came in the order of a map.
	slices.SortFunc(buckets[LengthBuckets:], func(a, b Bucket) int { return cmp.Compare(a.Name, b.Name) })
	return bounds, buckets
}

// lengthBoundsOf returns the bounds of the length buckets for these requests.
func lengthBoundsOf(reqs []Sample) []int32 {
	prompts := make([]int32, len(reqs))
	for i, r := range reqs {
		prompts[i] = r.Prompt
	}
	return quantileBounds(prompts, LengthBuckets)
}

// predictHeldOut predicts the requests that are kept out. Each prediction comes from the requests that had finished at its time, and tables
// are rebuilt as often as in a server. bounds are those of the length buckets; empty: there are none.
func (t *trial) predictHeldOut(k Kind, bounds []int32) ([]Row, error) {
	online, err := NewOnline(OnlineConfig{Kind: k})
	if err != nil {
		return nil, err
	}
	if len(bounds) > 0 {
		online.lengthBounds, online.boundsFinal = bounds, true
	}
	past := newReplay(t.reqs, t.opt.Step, online)
	rows := make([]Row, len(t.points))
	var table Predictor
	var out [1]Prediction
	for i, at := range t.points {
		past.finishUntil(at.time)
		if built, _, due := online.Rebuild(time.Time{}.Add(at.time)); due { // always at the first call
			table = built
		}
		r := &t.reqs[at.request]
		table.Predict(t.opt.Horizon, []Query{{Prompt: r.Prompt, Age: at.age, Key: r.Key}}, out[:])
		rows[i] = t.row(at, out[0])
	}
	return rows, nil
}
