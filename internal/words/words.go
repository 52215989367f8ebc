// Package words has the few words of English sentences that depend on a number or on their place.
package words

import (
	"fmt"
	"strings"

	"evenkeel/internal/stats"
)

// Count says how many there are of something that gets an s.
func Count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return stats.Grouped(n) + " " + what + "s"
}

// Are is the verb behind a number.
func Are(n int) string {
	if n == 1 {
		return "is"
	}
	return "are"
}

// Capital has the first letter of a sentence large.
func Capital(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:]
}

// FirstOf names the first few.
func FirstOf(names []string) (s string) {
	const most = 3
	for i, n := range names[:min(most, len(names))] {
		if i > 0 {
			s += ", "
		}
		s += n
	}
	if len(names) > most {
		s += fmt.Sprintf(" and %d more", len(names)-most)
	}
	return s
}
