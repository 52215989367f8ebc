package policy

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	"evenkeel/dispatcher/subset"
	"evenkeel/internal/namedargs"
)

// settings has the values of all keys. Each policy reads only its own.
type settings struct {
	window       int
	theta        int64 // stage 1 of greedy goes on while more slots than this are free; or thetaIsRankCount
	slotsFirst   bool  // queue=capacity
	longestFirst bool  // order=desc
	maxAgeMs     float64
	watermark    float64
	sendsAhead   bool
	margin       int32
	seed         uint64

	// Settings of policies that look ahead (brh), and of evenkeel.
	horizon         int     // decode steps, or auto
	gamma           float64 // factor per step, 0 to 1; auto: from the mean output
	alpha           float64
	beta            float64
	predictor       string
	tau             float64
	every           int
	decrement       bool // key decrement_anchor, see predictor.Rules
	extraCandidates int
	budget          int
	bestPairMax     int
	workerFirstMax  int
	kappa           float64
	ageWeight       float64 // KV tokens per step of waiting; auto: from the present loads
	holdSteps       float64
	patience        float64
	maxHoldS        float64
	countRequests   bool // key requests
}

type key = namedargs.Key[settings]

// allSettings is in the order in which the canonical name of a policy shows the keys.
var allSettings = []key{
	namedargs.Whole("window", 1, subset.MaxItems, func(v *settings) *int { return &v.window }),
	namedargs.Or(namedargs.Whole("theta", 0, math.MaxInt32, func(v *settings) *int64 { return &v.theta }),
		"G", thetaIsRankCount, func(v *settings) *int64 { return &v.theta }).Meaning("G, the number of workers, or a whole number from 0"),
	namedargs.Either("queue", "margin", "capacity", func(v *settings) *bool { return &v.slotsFirst }),
	namedargs.Either("order", "fcfs", "desc", func(v *settings) *bool { return &v.longestFirst }),
	namedargs.Whole("margin", 0, 1024, func(v *settings) *int32 { return &v.margin }),
	{
		Name: "seed", Must: "a whole number from 0",
		Read: func(v *settings, text string) bool {
			var err error
			v.seed, err = strconv.ParseUint(text, 10, 64)
			return err == nil
		},
		Show: func(v *settings) string { return strconv.FormatUint(v.seed, 10) },
	},
	namedargs.Or(
		namedargs.Whole("horizon", 0, maxHorizon,
			func(v *settings) *int { return &v.horizon }).Meaning(fmt.Sprintf("a whole number of steps from 0 to %d", maxHorizon)),
		"auto", auto, func(v *settings) *int { return &v.horizon }),
	namedargs.Number("alpha", 0, 1e6, func(v *settings) *float64 { return &v.alpha }),
	namedargs.Number("beta", 0, 1e6, func(v *settings) *float64 { return &v.beta }),
	orAuto("gamma", 1, func(v *settings) *float64 { return &v.gamma }),
	namedargs.Words("predictor", func(v *settings) *string { return &v.predictor }, func(i int) string { return predictors[i] },
		predictors...),
	namedargs.Number("tau", 0, 1, func(v *settings) *float64 { return &v.tau }),
	namedargs.Whole("every", 1, 1<<20, func(v *settings) *int { return &v.every }),
	namedargs.Either("decrement_anchor", "false", "true", func(v *settings) *bool { return &v.decrement }),
	namedargs.Whole("budget", 0, 1<<24, func(v *settings) *int { return &v.budget }),
	namedargs.Number("kappa", 0, 1, func(v *settings) *float64 { return &v.kappa }),
	orAuto("age_weight", 1e6, func(v *settings) *float64 { return &v.ageWeight }),
	namedargs.Number("hold", 0, 1000, func(v *settings) *float64 { return &v.holdSteps }).Meaning(
		"the number of steps for which a longer step counts, from 0 to 1000; 0 holds nothing back where ranks only decode"),
	namedargs.Number("patience", 0, 100, func(v *settings) *float64 { return &v.patience }),
	namedargs.Number("max_hold", 0, 3600, func(v *settings) *float64 { return &v.maxHoldS }).Meaning("seconds from 0 to 3600"),
	namedargs.Either("requests", "false", "true", func(v *settings) *bool { return &v.countRequests }),
	namedargs.Number("max_age_ms", 0, math.MaxInt32,
		func(v *settings) *float64 { return &v.maxAgeMs }).Meaning("milliseconds, 0 turns the guard off"),
	namedargs.Either("ahead", "false", "true", func(v *settings) *bool { return &v.sendsAhead }),
	namedargs.Number("watermark", 0, 0.9,
		func(v *settings) *float64 { return &v.watermark }).Meaning("the share of KV capacity kept empty, from 0 to 0.9"),
}

// oracle works in simulations only.
var predictors = []string{"none", "survival", "exact", "oracle"}

func orAuto(name string, most float64, field func(*settings) *float64) key {
	return namedargs.Or(namedargs.Number(name, 0, most, field), "auto", auto, field)
}

// keysNamed keeps the order of allSettings.
func keysNamed(names ...string) (keys []key) {
	for _, k := range allSettings {
		if slices.Contains(names, k.Name) {
			keys = append(keys, k)
		}
	}
	return keys
}
