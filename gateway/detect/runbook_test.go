package detect

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A drain has no alert, because somebody wants it. So all three kinds of it share an entry, and
// rules.yaml leaves them out.
var drainKinds = []Kind{Drains, EngineDrains, RanksDrain}

// entries are those of the runbook, by their titles.
func entries(t *testing.T) map[string]string {
	t.Helper()
	page, err := os.ReadFile("../../docs/runbook.md")
	require.NoError(t, err)
	all := map[string]string{}
	for _, part := range strings.Split(string(page), "\n## ")[1:] {
		title, text, _ := strings.Cut(part, "\n")
		all[title] = text
	}
	return all
}

func alertRules(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../configs/prometheus/rules.yaml")
	require.NoError(t, err)
	return string(text)
}

// The live page finds an entry by what an incident says, and an alert by the kind.
func TestEachKindHasItsEntryInTheRunbook(t *testing.T) {
	begins := map[Kind]string{tooMuch: "*ticket*. "}
	for kind, d := range kinds {
		switch {
		case d.takesEngineAway, d.slowsTokens:
			begins[kind] = "*ticket* or *page*. "
		case d.severity() == Bad:
			begins[kind] = "*page*. "
		default:
			begins[kind] = "*ticket*. "
		}
	}
	all := entries(t)
	for kind, first := range begins {
		if slices.Contains(drainKinds, kind) {
			require.Equal(t, string(Drains), kinds[kind].runbook, kind)
			kind, first = Drains, "*no alert*. "
		}
		text, ok := all[string(kind)]
		require.True(t, ok, "the runbook has no entry %s", kind)
		require.True(t, strings.HasPrefix(text, "\n"+first), "the entry %s begins with %q, which its severity tells", kind, first)
		if d := kinds[kind]; d != nil && d.runbook != string(kind) {
			require.Contains(t, text, "](#"+d.runbook+")", "%s: its own entry sends the reader to the one that the page shows", kind)
		}
	}
}

func TestEachEntryOfTheRunbookIsOfAKindOrAnAlert(t *testing.T) {
	known := map[string]bool{"How to check": true, string(tooMuch): true}
	for kind := range kinds {
		known[string(kind)] = true
	}
	for _, m := range regexp.MustCompile(`- alert: (\w+)`).FindAllStringSubmatch(alertRules(t), -1) {
		known[m[1]] = true
	}
	alert := regexp.MustCompile(`\bEvenkeel[A-Z]\w*`)
	for title, text := range entries(t) {
		require.True(t, known[title], "the entry %s is of no kind and of no alert", title)
		for _, name := range alert.FindAllString(text, -1) {
			require.True(t, known[name], "the entry %s names the alert %s, which does not exist", title, name)
		}
	}
}

// A kind that the rules leave out by its name is one that there is.
func TestTheRulesLeaveOutDrains(t *testing.T) {
	names := make([]string, len(drainKinds))
	for i, k := range drainKinds {
		names[i] = string(k)
	}
	left := regexp.MustCompile(`evenkeel_incident\{[^}]*kind!~"([^"]*)"`).FindAllStringSubmatch(alertRules(t), -1)
	require.Len(t, left, 2, "that of pages and that of tickets")
	for _, m := range left {
		require.Equal(t, strings.Join(names, "|"), m[1])
	}
}
