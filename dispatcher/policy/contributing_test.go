package policy

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The policy that CONTRIBUTING.md shows keeps the rules that every registered policy must keep.
func TestTheExamplePolicyKeepsTheRules(t *testing.T) {
	before := namedPolicies
	namedPolicies = append(slices.Clone(namedPolicies), bestFitForm)
	defer func() { namedPolicies = before }()
	require.Contains(t, Names(), "bestfit")
	t.Run("rules", TestEveryPolicyKeepsTheRules)
	t.Run("slots", TestNoPooledPolicyLeavesASlotIdleThatSomeoneFits)
	t.Run("overdue", TestOverdueEntriesArePlacedBeforeAllOthers)
	t.Run("allocations", TestDecideDoesNotAllocate)

	p, err := Parse("bestfit")
	require.NoError(t, err)
	s := &Snapshot{
		Workers: []Worker{
			{ID: 0, Free: 0, Up: true, Running: []Request{{Prompt: 5000}}},
			{ID: 1, Free: 1, Up: true, Running: []Request{{Prompt: 3000}}},
			{ID: 2, Free: 1, Up: true, Running: []Request{{Prompt: 1000}}},
		},
		Pool: []Entry{{ID: 1, Prompt: 1500}, {ID: 2, Prompt: 6000}},
	}
	got := p.Decide(s, nil)
	require.Equal(t,
		[]Assignment{{Entry: 1, Worker: 1, Score: 4500, Stage: stageSingle}, {Entry: 2, Worker: 2, Score: 7000, Stage: stageSingle}}, got)
}

// A policy that is registered stands in the table of policies.
func TestThePoliciesPageHasEveryPolicy(t *testing.T) {
	text, err := os.ReadFile("../../docs/policies.md")
	require.NoError(t, err)
	for _, name := range Names() {
		there := strings.Contains(string(text), "`"+name+"`")
		require.True(t, there, "docs/policies.md lacks the policy %s: add a row to its table of policies", name)
	}
}

func TestContributingNamesFilesThatThereAre(t *testing.T) {
	text, err := os.ReadFile("../../CONTRIBUTING.md")
	require.NoError(t, err)
	n := 0
	for i, quoted := range strings.Split(string(text), "`") {
		if i%2 == 0 || strings.ContainsAny(quoted, " <>*\n") || !strings.Contains(quoted, "/") || strings.HasPrefix(quoted, "./") ||
			strings.HasPrefix(quoted, "/") {
			continue
		}
		path := strings.TrimSuffix(quoted, "/…")
		if strings.HasPrefix(path, "dispatcher/policy/mine") { // what it has you write
			continue
		}
		_, err := os.Stat("../../" + path)
		require.NoError(t, err, "CONTRIBUTING.md names %s", quoted)
		n++
	}
	require.Greater(t, n, 15)
}

// The last line of namedPolicies that CONTRIBUTING.md quotes is the one in spec.go, with one more
// policy.
func TestContributingQuotesTheLineOfForms(t *testing.T) {
	page, err := os.ReadFile("../../CONTRIBUTING.md")
	require.NoError(t, err)
	code, err := os.ReadFile("spec.go")
	require.NoError(t, err)
	const more = ", []namedPolicy{mineForm})"
	for line := range strings.Lines(string(page)) {
		if is, quoted := strings.CutSuffix(strings.TrimSpace(line), more); quoted {
			require.Contains(t, string(code), "\t"+is+")\n")
			return
		}
	}
	t.Fatal("CONTRIBUTING.md does not say where a form is added")
}
