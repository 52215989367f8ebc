package predictor

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
)

// Options say how Train fits. A zero field stands for its default, which is given in brackets.
type Options struct {
	Horizon int           // decode steps (80)
	Every   int           // tokens after which a request is predicted again (20)
	Holdout float64       // share of the requests, at the end, that score the fit (0.25)
	Step    time.Duration // assumed time of a token for samples without an End (55 ms)
	Created time.Time
	Source  Source
}

func (o Options) withDefaults() Options {
	o.Horizon, o.Every = cmp.Or(o.Horizon, 80), cmp.Or(o.Every, 20)
	o.Holdout, o.Step = cmp.Or(o.Holdout, 0.25), cmp.Or(o.Step, 55*time.Millisecond)
	return o
}

// validate needs options with defaults.
func (o Options) validate() error {
	switch {
	case o.Horizon < 1:
		return fmt.Errorf("horizon %d: want at least 1 step", o.Horizon)
	case o.Every < 1:
		return fmt.Errorf("every %d: want at least 1 token", o.Every)
	case !(o.Holdout > 0 && o.Holdout < 1): // this form also refuses NaN
		return fmt.Errorf("holdout %v: want a share above 0 and below 1", o.Holdout)
	case o.Step < 0: // withDefaults has replaced 0
		return fmt.Errorf("step %v: want a positive time a token", o.Step)
	}
	return nil
}

// Auto is the kind that has the lowest Brier score.
const Auto = "auto"

// minTrain is the least number of requests for a fit. Policies would ignore the mean output of
// fewer.
const minTrain = 50

const (
	maxRequests     = 2_000_000 // most requests of one fit, because all their predictions are kept in memory
	maxOutputTokens = 1 << 20   // most tokens of one output
)

// Train fits a kind ("survival", "exact" or "auto") to requests in the order of arrival. To score
// the kind, it makes a fit to the earlier requests and predicts the later ones. The fit that it
// returns is made from all.
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

// fillTables uses all requests, because those that were kept out are the newest, and most like
// future ones.
func (f *Fit) fillTables(reqs []Sample) {
	f.Source.Rows = len(reqs)
	outputs := make([]int32, len(reqs))
	for i, r := range reqs {
		outputs[i] = r.Output
	}
	f.Outputs = NewRuns(outputs)
	if f.Kind == KindExact {
		f.PromptQuantiles, f.Buckets = buckets(reqs)
	}
}

// trial divides the requests into those to learn from and those that score the predictor.
type trial struct {
	reqs       []Sample
	trainCount int
	opt        Options
	points     []agePoint // age points of the requests that are kept out, by time
	baseRate   Prediction // BaseRate of reqs[:trainCount], for comparison
}

// An age point is a moment of a request at which a server would predict it: when it arrives, and
// each time it has got Every more tokens. These moments are spread evenly between its arrival and
// its end, or with Step per token if the end is not known.
func (t *trial) prepareRows() {
	t.points = agePoints(t.reqs, t.trainCount, t.opt.Every, t.opt.Step)
	var rows []Row // rows of the requests to learn from
	for _, p := range agePoints(t.reqs[:t.trainCount], 0, t.opt.Every, t.opt.Step) {
		rows = append(rows, t.row(p, Prediction{})) // BaseRate reads only the outcomes
	}
	t.baseRate = BaseRate(rows)
}

func (t *trial) row(p agePoint, prediction Prediction) Row {
	remaining := int(t.reqs[p.request].Output - p.age) // tokens that the request got after the age point
	return Row{P: prediction.P, Mu: prediction.Mu, Remaining: float64(remaining), Ended: remaining <= t.opt.Horizon}
}

func (t *trial) score(k Kind) (Holdout, error) {
	var bounds []int32
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

// buckets returns the length buckets, and one of the last outputs for each key that occurs often
// enough.
func buckets(reqs []Sample) (bounds []int32, buckets []Bucket) {
	keys := map[uint64]*ring{}
	for _, r := range reqs {
		if r.Key == 0 {
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
	// The keys came in the order of a map.
	slices.SortFunc(buckets[LengthBuckets:], func(a, b Bucket) int { return cmp.Compare(a.Name, b.Name) })
	return bounds, buckets
}

func lengthBoundsOf(reqs []Sample) []int32 {
	prompts := make([]int32, len(reqs))
	for i, r := range reqs {
		prompts[i] = r.Prompt
	}
	return quantileBounds(prompts, LengthBuckets)
}

// predictHeldOut predicts from the requests that had finished at the time of each prediction.
// Tables are rebuilt as often as in a server.
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
