// Package spelling finds the name that was meant where an unknown one is written.
package spelling

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// most is how many letters may be missing, wrong or too many, as the command line has it for commands and flags (kong,
// findPotentialCandidates). In a word of two to four letters it is one: with two, it would be another word.
const most = 2

// Hint returns ` (did you mean "name"?)` with the names that are closest to word, or nothing where no name is close.
// It stands behind the unknown word in an error.
func Hint(word string, names []string) string {
	var closest []string
	least := min(most, (utf8.RuneCountInString(word)+1)/3)
	for _, name := range names {
		switch d := distance(word, name); {
		case d > least:
			continue
		case d < least:
			closest, least = closest[:0], d
		}
		closest = append(closest, strconv.Quote(name))
	}
	if len(closest) == 0 {
		return ""
	}
	return " (did you mean " + strings.Join(closest, " or ") + "?)"
}

// distance is how many letters must be added, removed or changed to make b of a. A beginning of b, from two letters
// on, counts as one letter away.
func distance(a, b string) int {
	if a != b && len(a) > 1 && strings.HasPrefix(b, a) {
		return 1
	}
	from, to := []rune(a), []rune(b)
	row := make([]int, len(to)+1) // of the first i letters of a, to each beginning of b
	for j := range row {
		row[j] = j
	}
	for i, x := range from {
		above := row[0]
		row[0] = i + 1
		for j, y := range to {
			change := above
			if x != y {
				change++
			}
			above = row[j+1]
			row[j+1] = min(change, above+1, row[j]+1)
		}
	}
	return row[len(to)]
}
