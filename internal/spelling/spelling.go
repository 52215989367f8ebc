// Package spelling guesses which name a user meant by a misspelt one.
package spelling

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxDistance is how many letters of a word may be wrong; in one of two to four letters only one.
// The parser of the command line uses the same number (kong, findPotentialCandidates).
const maxDistance = 2

// Hint returns ` (did you mean "name"?)` with the closest names, or nothing if none is close.
func Hint(word string, names []string) string {
	var closest []string
	// at first the largest distance that counts as close
	nearest := min(maxDistance, (utf8.RuneCountInString(word)+1)/3)
	for _, name := range names {
		switch d := distance(strings.ToLower(word), strings.ToLower(name)); {
		case d > nearest:
			continue
		case d < nearest:
			closest, nearest = closest[:0], d
		}
		closest = append(closest, strconv.Quote(name))
	}
	if len(closest) == 0 {
		return ""
	}
	return " (did you mean " + strings.Join(closest, " or ") + "?)"
}

// distance is the Levenshtein distance. It is 1 if a is a prefix of b with at least two letters:
// the user may have left off the end.
func distance(a, b string) int {
	if a != b && len(a) > 1 && strings.HasPrefix(b, a) {
		return 1
	}
	from, to := []rune(a), []rune(b)
	// row[j] is the distance between the first i letters of a and the first j of b
	row := make([]int, len(to)+1)
	for j := range row {
		row[j] = j
	}
	for i, x := range from {
		diagonal := row[0] // without x and the next letter of b
		row[0] = i + 1
		for j, y := range to {
			change := diagonal
			if x != y {
				change++
			}
			above := row[j+1]                         // without x
			row[j+1] = min(change, above+1, row[j]+1) // change x to y, remove x, or add y
			diagonal = above
		}
	}
	return row[len(to)]
}
