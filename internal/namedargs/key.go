package namedargs

import (
	"math"
	"strconv"
	"strings"
)

// Key is one setting of a policy. T is the type that holds all settings of the policy. Read stores
// a value in it, and Show writes the value as text again.
type Key[T any] struct {
	Name string
	Must string // what the value must be, such as "a number from 0 to 1", for error messages
	Read func(v *T, text string) (ok bool)
	Show func(v *T) string
}

// Meaning returns the key with must as its Must: the words in error messages that say what the
// value must be. It is for a key whose own words give only a range of numbers, but not what the
// numbers mean.
func (k Key[T]) Meaning(must string) Key[T] {
	k.Must = must
	return k
}

// Whole returns a key for a whole number from low to high. at points to the field of a T that has
// the value.
func Whole[T any, N int | int32 | int64](name string, low, high N, at func(*T) *N) Key[T] {
	return Key[T]{
		Name: name, Must: "a whole number from " + show(float64(low)) + " to " + show(float64(high)),
		Read: func(v *T, text string) (ok bool) {
			x, inRange := number(text, float64(low), float64(high))
			*at(v) = N(x) // after a false result this value means nothing
			return inRange && x == math.Trunc(x)
		},
		Show: func(v *T) string { return strconv.FormatInt(int64(*at(v)), 10) },
	}
}

// Number returns a key for a number from low to high. at points to the field of a T that has the
// value.
func Number[T any](name string, low, high float64, at func(*T) *float64) Key[T] {
	return Key[T]{
		Name: name, Must: "a number from " + show(low) + " to " + show(high),
		Read: func(v *T, text string) (ok bool) {
			*at(v), ok = number(text, low, high)
			return ok
		},
		Show: func(v *T) string { return strconv.FormatFloat(*at(v), 'g', -1, 64) },
	}
}

// Words returns a key whose value is one of these words. at points to the field of a T that has the
// value. value(i) is the value that words[i] stands for.
func Words[T any, N comparable](name string, at func(*T) *N, value func(i int) N, words ...string) Key[T] {
	must := strings.Join(words, ", ")
	if len(words) == 2 {
		must = words[0] + " or " + words[1]
	}
	return Key[T]{
		Name: name, Must: must,
		Read: func(v *T, text string) (ok bool) {
			for i, word := range words {
				if word == text {
					*at(v) = value(i)
					return true
				}
			}
			return false
		},
		Show: func(v *T) string {
			for i, word := range words {
				if value(i) == *at(v) {
					return word
				}
			}
			return "" // no word stands for this value
		},
	}
}

// Either returns a key whose value is one of two words: the word in no stands for false, the word
// in yes for true.
func Either[T any](name, no, yes string, at func(*T) *bool) Key[T] {
	return Words(name, at, func(i int) bool { return i == 1 }, no, yes)
}

// Or returns the key k with one more word, which stands for the value value, for example auto for
// -1. at points to the field of a T that has the value.
func Or[T any, N comparable](k Key[T], word string, value N, at func(*T) *N) Key[T] {
	with := k
	with.Must = word + " or " + k.Must
	with.Read = func(v *T, text string) (ok bool) {
		if text == word {
			*at(v) = value
			return true
		}
		return k.Read(v, text)
	}
	with.Show = func(v *T) string {
		if *at(v) == value {
			return word
		}
		return k.Show(v)
	}
	return with
}

// number reads a number from low to high; ok is false for any other text, and for NaN.
func number(text string, low, high float64) (x float64, ok bool) {
	x, err := strconv.ParseFloat(text, 64)
	return x, err == nil && x >= low && x <= high
}

// show returns a number as text without an exponent, because people read it in error messages.
func show(x float64) string { return strconv.FormatFloat(x, 'f', -1, 64) }
