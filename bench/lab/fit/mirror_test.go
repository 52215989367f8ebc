package fit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/policy"
)

const wall = 1_763_632_800_000 // Unix ms

// stepsOf is a trace of two ranks, one step each 50 ms from began on.
func stepsOf(t *testing.T, began float64, loads ...[2]int) *StepTrace {
	t.Helper()
	var b strings.Builder
	for k, l := range loads {
		for rank, kv := range l {
			fmt.Fprintf(&b, `{"t_ms":%.3f,"group":"main","rank":%d,"step":%d,"running":1,"kv_tokens":%d}`+"\n", began+50*float64(k), rank, k+1, kv)
		}
	}
	s, err := ReadStepTrace(write(t, "steps.jsonl", b.String()))
	require.NoError(t, err)
	return s
}

// tickOf is a line as the dispatcher writes it; each worker runs one request
// whose last token is generated.
func tickOf(at int64, group string, loads ...int32) string {
	s := &policy.Snapshot{}
	for i, kv := range loads {
		w := policy.Worker{ID: int32(10 + i), Up: true, Free: 1}
		if kv > 0 {
			w.Running = []policy.Request{{ID: uint64(i), Prompt: kv - 1, Generated: 1, Age: 1}}
		}
		s.Workers = append(s.Workers, w)
	}
	l := dispatcher.LogLine{Tick: 1, TimeMs: at, Group: group, Policy: "br0", Snapshot: s, Assign: []policy.Assignment{{Entry: 1, Worker: 10}}}
	return string(l.AppendJSON(nil))
}

func TestMirror(t *testing.T) {
	steps := stepsOf(t, wall, [2]int{100, 0}, [2]int{200, 400}, [2]int{300, 500})
	log := write(t, "decisions.jsonl",
		tickOf(wall-10, "main", 1, 1)+ // before the trace
			tickOf(wall+60, "main", 180, 440)+ // second step: 10 % low, 10 % high
			tickOf(wall+1, "main", 100, 30)+ // first step; the second rank holds nothing
			tickOf(wall+120, "main", 1, 1)) // the last step has no known end
	m, err := CompareMirror(steps, log, 0)
	require.NoError(t, err)
	require.Len(t, m.Groups, 1)
	g := m.Groups[0]
	require.Equal(t, []int{4, 2, 4}, []int{g.Ticks, g.Matched, g.Samples})
	require.InDelta(t, (0+0.1+0.1)/3, float64(g.Mean), 1e-12)
	require.InDelta(t, 0.1, float64(g.P99), 1e-12)
	require.InDelta(t, (0+30+20+40)/4.0, float64(g.Tokens), 1e-12)
	require.InDelta(t, (0+30-20+40)/4.0, float64(g.Bias), 1e-12)
	require.InDelta(t, (0+0.1)/2, float64(g.Largest), 1e-12)

	f := StepModels(steps)
	f.Mirror = m
	var b bytes.Buffer
	require.NoError(t, f.WriteText(&b))
	for _, want := range []string{"mirror of KV tokens against the trace", "6.667 %", "10.000 %", "22.5", "+12.5"} {
		require.Contains(t, b.String(), want)
	}
	data, err := json.Marshal(g)
	require.NoError(t, err)
	require.Contains(t, string(data), `"mean_relative":0.0`)
}

// What the proxy believes of a rank has the requests of other proxies, and the parts of those that
// an engine runs on any of its ranks.
func TestTheMirrorHasWhatOthersHold(t *testing.T) {
	steps := stepsOf(t, wall, [2]int{150, 250}, [2]int{200, 400})
	s := &policy.Snapshot{Workers: []policy.Worker{
		{ID: 10, Up: true, Others: 50, Running: []policy.Request{{ID: 1, Prompt: 99, Generated: 1, Age: 1}}},
		{ID: 11, Up: true, Others: 50, Running: []policy.Request{{ID: 2, Prompt: 249, Generated: 1, Age: 1, KVElsewhere: 50}}},
	}}
	l := dispatcher.LogLine{Tick: 1, TimeMs: wall + 25, Group: "main", Policy: "br0", Snapshot: s}
	m, err := CompareMirror(steps, write(t, "decisions.jsonl", string(l.AppendJSON(nil))), 0)
	require.NoError(t, err)
	require.Equal(t, 2, m.Groups[0].Samples)
	require.Zero(t, m.Groups[0].Tokens)
}

func TestAClockOfItsOwnIsShifted(t *testing.T) {
	steps := stepsOf(t, 0, [2]int{100, 50}, [2]int{200, 400})
	log := write(t, "decisions.jsonl", tickOf(wall+25, "main", 100, 50))
	_, err := CompareMirror(steps, log, 0)
	require.ErrorContains(t, err, "one counts from 1970, the other from its start; give --shift")
	m, err := CompareMirror(steps, log, wall)
	require.NoError(t, err)
	require.Zero(t, float64(m.Groups[0].Mean))
}

func TestGroupsAreMatchedByName(t *testing.T) {
	steps := stepsOf(t, wall, [2]int{100, 50}, [2]int{200, 400})
	m, err := CompareMirror(steps, write(t, "d", tickOf(wall+25, "decode-a", 100, 50)), 0)
	require.NoError(t, err)
	require.Equal(t, 1, m.Groups[0].Matched, "one group on each side needs no common name")

	m, err = CompareMirror(steps, write(t, "d", tickOf(wall+25, "main", 100, 50)+tickOf(wall+25, "other", 1, 1, 1)), 0)
	require.NoError(t, err)
	require.Equal(t, 1, m.Groups[0].Matched)

	_, err = CompareMirror(steps, write(t, "d", tickOf(wall+25, "a", 1, 1)+tickOf(wall+25, "b", 1, 1)), 0)
	require.ErrorContains(t, err, "no group of the trace is in it; it has a, b")
}

func TestMirrorErrors(t *testing.T) {
	steps := stepsOf(t, wall, [2]int{100, 50}, [2]int{200, 400})
	for _, tc := range []struct{ name, log, says string }{
		{"an empty log", "", "no ticks; is it a decision log?"},
		{"another kind of line", `{"t_ms":1,"group":"main","rank":0,"step":1,"running":1,"kv_tokens":49}` + "\n", "d:1: not a line of a decision log"},
		{"no JSON", "tick\n" + tickOf(wall, "main", 1, 1), "d:1: not a line of a decision log"},
		{"another number of ranks", tickOf(wall+25, "main", 1, 2, 3), "3 workers, the trace has 2 ranks"},
		{"another time", tickOf(wall+3_600_000, "main", 1, 2), "no tick lies within the trace"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := CompareMirror(steps, write(t, "d", tc.log), 0)
			require.ErrorContains(t, err, tc.says)
		})
	}
}
