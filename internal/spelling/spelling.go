// Package spelling guesses which name a user meant by a misspelt one.
package spelling

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxDistance is how many letters a word may lack, have too many or have wrong for Hint to name the right word. In a word of two to four
// letters, Hint allows only one such letter. The parser of the command line uses the same number for commands and flags (kong,
// findPotentialCandidates).
const maxDistance = 2

// Hint returns ` (did you mean "name"?)` with the names that are closest to word, or nothing if no name is close.
// An error message has it after the unknown word.
func Hint(word string, names []string) string {
	var closest []string                                            // the quoted names whose distance is nearest
	nearest := min(maxDistance, (utf8.RuneCountInString(word)+1)/3) // at first the largest distance that counts as close, see maxDistance
	for _, name := range names {
		switch d := distance(strings.ToLower(word), strings.ToLower(name)); {
		case d > nearest:
			continue
		case d < nearest: // closer than all names so far
			closest, nearest = closest[:0], d
		}
		closest = append(closest, strconv.Quote(name))
	}
	if len(closest) == 0 {
		return ""
	}
	return " (did you mean " + strings.Join(closest, " or ") + "?)"
}

// distance returns how many letters must be added, removed or changed to turn a into b (Levenshtein). If a is a prefix of b with at least
// two letters, the distance is 1, because the user may have left off the end of the name.
func distance(a, b string) int {
	if a != b && len(a) > 1 && strings.HasPrefix(b, a) {
		return 1
	}
	from, to := []rune(a), []rune(b)
	row := make([]int, len(to)+1) // row[j] is the distance between the first i letters of a and the first j letters of b
	for j := range row {
		row[j] = j
	}
	for i, x := range from {
		diagonal := row[0] // the distance without x and without the next letter of b
		row[0] = i + 1
		for j, y := range to {
			change := diagonal
			if x != y {
				change++
			}
			above := row[j+1]                         // the distance without x
			row[j+1] = min(change, above+1, row[j]+1) // change x to y, remove x, or add y
			diagonal = above
		}
	}
	return row[len(to)]
}
