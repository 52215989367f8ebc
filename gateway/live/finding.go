package live

import (
	"fmt"
	"strings"
	"time"

	"evenkeel/gateway/incident"
	"evenkeel/internal/stats"
)

// Severities of a finding.
const (
	Bad  = incident.Bad
	Warn = incident.Warn
)

// findings are what is wrong.
type findings []incident.Finding

// at is where something is wrong: what it is, its name, and the panel that shows more.
type at struct{ of, where, panel string }

// proxyAt is the proxy as a whole.
func proxyAt(panel string) at { return at{panel: panel} }

func (a at) String() string { return a.of + " " + a.where }

// begin is its name at the begin of a sentence.
func (a at) begin() string { return capital(a.String()) }

// find notes one of them, in a whole sentence.
type find func(kind incident.Kind, severity string, where at, reason, format string, args ...any) *incident.Finding

func (f *findings) say(kind incident.Kind, severity string, where at, reason, format string, args ...any) *incident.Finding {
	*f = append(*f, incident.Finding{Kind: kind, Severity: severity, Panel: where.panel, Of: where.of, Where: where.where, Reason: reason, What: fmt.Sprintf(format, args...)})
	return &(*f)[len(*f)-1]
}

// firstLine is what an error says; below it a file's lines may follow.
func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

// waits says how many requests wait.
func waits(n int) string {
	if n == 1 {
		return "1 request waits"
	}
	return requests(n) + " wait"
}

// requests says how many there are.
func requests(n int) string {
	switch n {
	case 0:
		return "no requests"
	case 1:
		return "1 request"
	}
	return stats.Grouped(max(0, n)) + " requests"
}

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

// listed names the first few.
func listed(names []string) (s string) {
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

func capital(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:]
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
