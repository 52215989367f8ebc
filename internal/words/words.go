// Package words forms the parts of English sentences that depend on a number or on their position.
// It also bounds the length of texts that come from clients or engines, and says which names may be
// shown.
package words

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"evenkeel/internal/stats"
)

// Count returns a number with a noun, whose plural ends in s: "1 rank" or "1,200 ranks".
func Count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return stats.Grouped(n) + " " + what + "s"
}

// Are returns the verb after a number: is or are.
func Are(n int) string {
	if n == 1 {
		return "is"
	}
	return "are"
}

// Capital returns s with a capital first letter, to begin a sentence. The first letter must be
// ASCII.
func Capital(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:]
}

// FirstOf lists the first three names, and says how many more there are: "a, b, c and 2 more".
func FirstOf(names []string) (s string) {
	const maxListed = 3
	for i, n := range names[:min(maxListed, len(names))] {
		if i > 0 {
			s += ", "
		}
		s += n
	}
	if len(names) > maxListed {
		s += fmt.Sprintf(" and %d more", len(names)-maxListed)
	}
	return s
}

// MaxText bounds each text of a client or an error in a log, a span or a receipt, in bytes.
const MaxText = 256

// Clip cuts a text to MaxText bytes, and makes it valid UTF-8: a run of invalid bytes, such as a
// rune that was cut, becomes U+FFFD.
func Clip(s string) string {
	if len(s) > MaxText {
		s = s[:MaxText]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// MaxName bounds each name of a model, a group or a key, in bytes.
const MaxName = 512

// IsName says whether a name may be shown in metrics, logs and terminals. U+FFFD is refused,
// because a decoder has put it in the place of bytes that were not valid.
func IsName(s string) bool {
	cannotBeShown := func(r rune) bool { return r == utf8.RuneError || !unicode.IsPrint(r) }
	return s != "" && len(s) <= MaxName && !strings.ContainsFunc(s, cannotBeShown)
}
