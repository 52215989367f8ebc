package decode

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestScenario(t *testing.T) {
	like := Uniform(3, 16, 1000)
	got, err := ParseScenario([]byte(`
groups:
  - name: main
    c0_ms: 40
    ranks:
      - {count: 2}
      - {slots: 8, capacity: 500000, cost: 1.5, joins: 90s, leaves: step 500}
  - c1_ms: 1e-3
    ranks:
      - {fails: 2m, capacity: 0, keeps: 480s}
      - {}
`), like)
	require.NoError(t, err)
	require.Equal(t, Fleet{Groups: []Group{
		{Name: "main", C0Ms: 40, C1Ms: DefaultC1Ms, Ranks: []Rank{
			{Slots: 16, Capacity: 1000, Cost: 1},
			{Slots: 16, Capacity: 1000, Cost: 1},
			{Slots: 8, Capacity: 500_000, Cost: 1.5, Join: Moment{Ms: 90_000}, Leave: Moment{Step: 500}},
		}},
		{Name: "group 1", C0Ms: DefaultC0Ms, C1Ms: 1e-3, Ranks: []Rank{
			{Slots: 16, Cost: 1, Keeps: 480 * time.Second, Leave: Moment{Ms: 120_000}, Fails: true},
			{Slots: 16, Capacity: 1000, Cost: 1},
		}},
	}}, got)

	asJSON, err := ParseScenario([]byte(`{"groups": [{"name": "a", "ranks": [{"count": 2, "slots": 3}]}]}`), like)
	require.NoError(t, err)
	require.Equal(t, 2, asJSON.Ranks())
	require.Equal(t, 6, asJSON.slots())
}

func TestScenarioSaysWhatIsWrong(t *testing.T) {
	for _, c := range []struct {
		name, text string
		want       string
	}{
		{"nothing", "", "not a scenario"},
		{"no YAML", "{groups: [", "not a scenario"},
		{"another document", "listen: 8000", "unknown field"},
		{"a key nobody knows", "groups: [{ranks: [{slot: 4}]}]", "unknown field"},
		{"words for a number", "groups: [{ranks: [{slots: many}]}]", "not a scenario"},
		{"no slots", "groups: [{name: a, ranks: [{slots: 0}]}]", "group \"a\", rank 0: 0 slots"},
		{"no ranks in a count", "groups: [{ranks: [{count: 0}]}]", "count 0"},
		{"a cost of nothing", "groups: [{ranks: [{cost: 0}]}]", "cost 0"},
		{"less than no KV", "groups: [{ranks: [{capacity: -1}]}]", "capacity of -1"},
		{"less than no time", "groups: [{ranks: [{keeps: -1s}]}]", "keeps answers for -1s"},
		{"no step time", "groups: [{c0_ms: 0, ranks: [{}]}]", "c0_ms 0"},
		{"a moment without a unit", "groups: [{ranks: [{}, {joins: \"90\"}]}]", "joins: \"90\"; want a step of the group"},
		{"a step before the first", "groups: [{ranks: [{leaves: step 0}]}]", "leaves: \"step 0\""},
		{"a time before the start", "groups: [{ranks: [{leaves: -5s}]}]", "leaves: \"-5s\""},
		{"leaving twice", "groups: [{ranks: [{leaves: 5s, fails: 9s}]}]", "it leaves and fails"},
		{"nobody at the start", "groups: [{ranks: [{joins: 5s}]}]", "no rank is there from the start"},
		{"too many", "groups: [{ranks: [{count: 60000}, {count: 60000}]}]", "120000 ranks"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := ParseScenario([]byte(c.text), Uniform(1, 16, 0))
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestReadScenarioNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	_, err := ReadScenario(path, Uniform(1, 1, 0))
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.WriteFile(path, []byte("groups: [{ranks: [{}]}]"), 0o600))
	f, err := ReadScenario(path, Uniform(1, 5, 0))
	require.NoError(t, err)
	require.Equal(t, 5, f.slots())
	require.NoError(t, os.WriteFile(path, []byte("groups: 3"), 0o600))
	_, err = ReadScenario(path, Uniform(1, 5, 0))
	require.ErrorContains(t, err, "fleet.yaml")
}

func FuzzScenario(f *testing.F) {
	for _, text := range []string{
		"groups: [{name: a, c0_ms: 5, ranks: [{count: 2, slots: 4, capacity: 9, cost: 2, joins: step 4, leaves: 9s}, {fails: 1m, keeps: 8m}]}]",
		`{"groups":[{"ranks":[{}]}]}`, "groups:\n- ranks:\n  - &a {slots: 2}\n  - *a\n", "? [", "groups: [{c0_ms: .inf, ranks: [{cost: .nan}]}]",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if strings.Count(text, "*") > 3 { // aliases of aliases are the library's business
			return
		}
		got, err := ParseScenario([]byte(text), Uniform(1, 16, 0))
		if err == nil {
			require.NoError(t, got.Validate())
		}
	})
}
