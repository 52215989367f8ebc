package policy

import (
	"errors"
	"math"
	"strconv"

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
