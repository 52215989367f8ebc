package live

import (
	"strings"

	"evenkeel/internal/stats"
)

// requests says how many there are.
func requests(n int) string { return count(n, "request") }

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return stats.Grouped(n) + " " + what + "s"
}

func are(n int) string {
	if n == 1 {
		return "is"
	}
	return "are"
}

func capital(s string) string { return strings.ToUpper(s[:1]) + s[1:] }
