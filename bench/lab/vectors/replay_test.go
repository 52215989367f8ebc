package vectors

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/report"
)

// Three rounds of two ranks. jsq-kv's were recorded in the first two.
const decisions = `{"tick":1,"t_ms":10,"group":"main","in":{"policy":"pjsq-kv","workers":[{"id":0,"free":1,"running":[{"prompt":500,"generated":1}]},{"id":1,"free":1,"running":[]}],"pool":[{"id":7,"prompt":100,"age_ms":5}]},"assign":[[7,1]]}
{"tick":2,"t_ms":20,"group":"main","in":{"workers":[{"id":0,"free":1,"running":[{"prompt":500,"generated":2}]},{"id":1,"free":1,"running":[{"prompt":100}]}],"pool":[{"id":8,"prompt":300},{"id":9,"prompt":50}]},"assign":[[8,1],[9,0]]}

{"tick":3,"t_ms":30,"group":"main","in":{"workers":[{"id":0,"free":1,"running":[]},{"id":1,"free":1,"running":[]}],"pool":[{"id":10,"prompt":300}]},"assign":[]}
`

func TestReplay(t *testing.T) {
	var told int
	runs, cut, err := Replay(context.Background(), strings.NewReader(decisions), "log.jsonl", []string{"pjsq-kv", "prr"},
		func(n int) { told = n })
	require.NoError(t, err)
	require.False(t, cut)
	require.Equal(t, 4, told)
	require.Equal(t, []string{"recorded", "pjsq-kv", "prr"}, []string{runs[0].Policy, runs[1].Policy, runs[2].Policy})

	m := runs[0].Metrics
	require.EqualValues(t, 3, m[report.Rounds].Mean)
	require.EqualValues(t, 1, m[report.Placed].Mean)
	require.EqualValues(t, 1, m[report.Agreement].Mean)
	require.EqualValues(t, 1, m[report.SamePairs].Mean)
	require.InDelta(t, (401.+152+0)/3, m[report.Imbalance].Mean, 1e-9, "501 and 100; 552 and 400; nobody")

	m = runs[1].Metrics
	require.InDelta(t, 2./3, m[report.Agreement].Mean, 1e-9, "in the third round it admits")
	require.InDelta(t, 1, m[report.SamePairs].Mean, 1e-9)
	require.InDelta(t, (401.+152+300)/3, m[report.Imbalance].Mean, 1e-9)

	m = runs[2].Metrics
	require.InDelta(t, 1./3, m[report.Agreement].Mean, 1e-9)
	require.InDelta(t, 2./3, m[report.SamePairs].Mean, 1e-9, "7 went to 0; in its turn 8 to 1 and 9 to 0")
}

func TestReplaySaysWhereTheLogIsWrong(t *testing.T) {
	first, _, _ := strings.Cut(decisions, "\n")
	for _, c := range []struct{ name, log, want string }{
		{"an empty one", "", "log: no rounds in it"},
		{"no JSON", first + "\nhello\n", "log:2: not a line of a decision log"},
		{"no snapshot", `{"tick":1,"in":{"workerz":[]}}`, "log:1: snapshot"},
		{"an assignment of nobody", strings.Replace(first, "[7,1]", "[8,1]", 1), "log:1: entry 8 to worker 1"},
		{"an assignment to nobody", strings.Replace(first, "[7,1]", "[7,5]", 1), "log:1: entry 7 to worker 5"},
		{"a worker that is no number", strings.Replace(first, "[7,1]", "[7,99999999999]", 1), "log:1: assign[0]"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, _, err := Replay(context.Background(), strings.NewReader(c.log), "log", []string{"jsq"}, nil)
			require.ErrorContains(t, err, c.want)
		})
	}
	_, _, err := Replay(context.Background(), strings.NewReader(decisions), "log", []string{"jsqq"}, nil)
	require.ErrorContains(t, err, "unknown policy")
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	_, _, err = Replay(ended, strings.NewReader(decisions), "log", []string{"jsq"}, nil)
	require.ErrorIs(t, err, context.Canceled)
}

// A proxy may write its next line just now.
func TestTheLineThatIsBeingWrittenIsNotReplayed(t *testing.T) {
	replay := func(log string) ([]report.Run, bool) {
		runs, cut, err := Replay(context.Background(), strings.NewReader(log), "log", []string{"jsq"}, nil)
		require.NoError(t, err)
		return runs, cut
	}
	whole, cut := replay(decisions)
	require.False(t, cut)
	same, cut := replay(decisions + `{"tick":4,"t_ms":40,"group":"ma`)
	require.True(t, cut)
	require.Equal(t, whole, same)
	same, cut = replay(strings.TrimSuffix(decisions, "\n"))
	require.False(t, cut, "only its line end is missing")
	require.Equal(t, whole, same)
}
