package policy

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"evenkeel/dispatcher/subset"
)

// settings are the values of all keys; each form takes some of them.
type settings struct {
	window    int
	theta     int64 // or groupSize
	capacity  bool  // queue
	longest   bool  // order
	maxAgeMs  float64
	watermark float64
	margin    int32
	seed      uint64

	// Of policies that look ahead.
	horizon    int     // or auto
	gamma      float64 // or auto
	alpha      float64
	beta       float64
	predictor  string
	tau        float64
	every      int
	decrement  bool // decrement_anchor
	mode       mode
	samples    int
	candidates int
	budget     int
	pairs      int
	refill     int
	mix        bool // objective
	kappa      float64
	ageWeight  float64 // or auto
	hold       float64
	holdSteps  float64
}

// setting is one key of a policy: how it reads and how it is written.
type setting struct {
	key   string
	parse func(*settings, string) error
	show  func(*settings) string
}

// allSettings in the order in which a policy's name shows them.
var allSettings = []setting{
	{
		"window",
		func(v *settings, text string) (err error) {
			v.window, err = whole[int](text, 1, subset.MaxItems)
			return err
		},
		func(v *settings) string { return strconv.Itoa(v.window) },
	},
	{
		"theta",
		func(v *settings, text string) (err error) {
			if text == "G" {
				v.theta = groupSize
				return nil
			}
			if v.theta, err = whole[int64](text, 0, math.MaxInt32); err != nil {
				return errors.New("want G, the number of workers, or a whole number from 0")
			}
			return nil
		},
		func(v *settings) string {
			if v.theta == groupSize {
				return "G"
			}
			return strconv.FormatInt(v.theta, 10)
		},
	},
	{
		"queue",
		func(v *settings, text string) (err error) {
			v.capacity, err = either(text, "margin", "capacity")
			return err
		},
		func(v *settings) string { return word(v.capacity, "margin", "capacity") },
	},
	{
		"order",
		func(v *settings, text string) (err error) {
			v.longest, err = either(text, "fcfs", "desc")
			return err
		},
		func(v *settings) string { return word(v.longest, "fcfs", "desc") },
	},
	{
		"margin",
		func(v *settings, text string) (err error) {
			v.margin, err = whole[int32](text, 0, 1024)
			return err
		},
		func(v *settings) string { return strconv.Itoa(int(v.margin)) },
	},
	{
		"seed",
		func(v *settings, text string) (err error) {
			if v.seed, err = strconv.ParseUint(text, 10, 64); err != nil {
				return errors.New("want a whole number from 0")
			}
			return nil
		},
		func(v *settings) string { return strconv.FormatUint(v.seed, 10) },
	},
	{
		"mode",
		func(v *settings, text string) error {
			at := slices.Index(modeWords, text)
			if at < 0 {
				return errors.New("want " + strings.Join(modeWords, ", "))
			}
			v.mode = mode(at)
			return nil
		},
		func(v *settings) string { return modeWords[v.mode] },
	},
	wholeSetting("samples", 1, 16, func(v *settings) *int { return &v.samples }),
	{
		"horizon",
		func(v *settings, text string) (err error) {
			if text == "auto" {
				v.horizon = auto
				return nil
			}
			if v.horizon, err = whole[int](text, 0, maxHorizon); err != nil {
				return fmt.Errorf("want auto or a whole number of steps from 0 to %d", maxHorizon)
			}
			return nil
		},
		func(v *settings) string {
			if v.horizon == auto {
				return "auto"
			}
			return strconv.Itoa(v.horizon)
		},
	},
	numberSetting("alpha", 1e6, func(v *settings) *float64 { return &v.alpha }),
	numberSetting("beta", 1e6, func(v *settings) *float64 { return &v.beta }),
	autoSetting("gamma", 1, func(v *settings) *float64 { return &v.gamma }),
	{
		"predictor",
		func(v *settings, text string) error {
			if !slices.Contains(predictors, text) {
				return errors.New("want " + strings.Join(predictors, ", "))
			}
			v.predictor = text
			return nil
		},
		func(v *settings) string { return v.predictor },
	},
	numberSetting("tau", 1, func(v *settings) *float64 { return &v.tau }),
	wholeSetting("every", 1, 1<<20, func(v *settings) *int { return &v.every }),
	{
		"decrement_anchor",
		func(v *settings, text string) (err error) {
			v.decrement, err = either(text, "false", "true")
			return err
		},
		func(v *settings) string { return word(v.decrement, "false", "true") },
	},
	wholeSetting("candidates", 0, 1<<16, func(v *settings) *int { return &v.candidates }),
	wholeSetting("budget", 0, 1<<24, func(v *settings) *int { return &v.budget }),
	wholeSetting("pairs", 0, 1<<10, func(v *settings) *int { return &v.pairs }),
	wholeSetting("refill", 0, 1<<16, func(v *settings) *int { return &v.refill }),
	{
		"objective",
		func(v *settings, text string) (err error) {
			v.mix, err = either(text, "max", "mix")
			return err
		},
		func(v *settings) string { return word(v.mix, "max", "mix") },
	},
	numberSetting("kappa", 1, func(v *settings) *float64 { return &v.kappa }),
	autoSetting("age_weight", 1e6, func(v *settings) *float64 { return &v.ageWeight }),
	numberSetting("hold", 100, func(v *settings) *float64 { return &v.hold }),
	numberSetting("hold_steps", 1e6, func(v *settings) *float64 { return &v.holdSteps }),
	{
		"max_age_ms",
		func(v *settings, text string) error {
			var ok bool
			if v.maxAgeMs, ok = number(text, math.MaxInt32); !ok {
				return errors.New("want milliseconds, 0 turns the guard off")
			}
			return nil
		},
		func(v *settings) string { return strconv.FormatFloat(v.maxAgeMs, 'g', -1, 64) },
	},
	{
		"watermark",
		func(v *settings, text string) error {
			var ok bool
			if v.watermark, ok = number(text, 0.9); !ok {
				return errors.New("want the share of KV capacity kept empty, from 0 to 0.9")
			}
			return nil
		},
		func(v *settings) string { return strconv.FormatFloat(v.watermark, 'g', -1, 64) },
	},
}

// predictors a policy may ask for; oracle in simulations only.
var predictors = []string{"none", "survival", "exact", "learned", "oracle"}

func wholeSetting(key string, least, most int, field func(*settings) *int) setting {
	return setting{
		key,
		func(v *settings, text string) (err error) {
			*field(v), err = whole[int](text, least, most)
			return err
		},
		func(v *settings) string { return strconv.Itoa(*field(v)) },
	}
}

func numberSetting(key string, most float64, field func(*settings) *float64) setting {
	return setting{
		key,
		func(v *settings, text string) error {
			x, ok := number(text, most)
			if !ok {
				return errors.New("want a number from 0 to " + strconv.FormatFloat(most, 'f', -1, 64))
			}
			*field(v) = x
			return nil
		},
		func(v *settings) string { return strconv.FormatFloat(*field(v), 'g', -1, 64) },
	}
}

// autoSetting is a numberSetting that may also follow what the policy sees.
func autoSetting(key string, most float64, field func(*settings) *float64) setting {
	plain := numberSetting(key, most, field)
	return setting{
		key,
		func(v *settings, text string) error {
			if text == "auto" {
				*field(v) = auto
				return nil
			}
			if plain.parse(v, text) != nil {
				return errors.New("want auto or a number from 0 to " + strconv.FormatFloat(most, 'f', -1, 64))
			}
			return nil
		},
		func(v *settings) string {
			if *field(v) == auto {
				return "auto"
			}
			return plain.show(v)
		},
	}
}

func settingOf(key string) *setting {
	for i := range allSettings {
		if allSettings[i].key == key {
			return &allSettings[i]
		}
	}
	return nil
}

func whole[T int | int32 | int64](text string, least, most T) (T, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < int64(least) || n > int64(most) {
		return 0, errors.New("want a whole number from " + strconv.FormatInt(int64(least), 10) + " to " + strconv.FormatInt(int64(most), 10))
	}
	return T(n), nil
}

// number reads a number from 0 to most; NaN is not one.
func number(text string, most float64) (x float64, ok bool) {
	x, err := strconv.ParseFloat(text, 64)
	return x, err == nil && x >= 0 && x <= most
}

func either(text, no, yes string) (bool, error) {
	if text != no && text != yes {
		return false, errors.New("want " + no + " or " + yes)
	}
	return text == yes, nil
}

func word(b bool, no, yes string) string {
	if b {
		return yes
	}
	return no
}
