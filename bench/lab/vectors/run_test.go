package vectors

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEveryKnownKindPasses(t *testing.T) {
	for kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			var out strings.Builder
			passed, failed, err := Run([]string{filepath.Join("testdata", kind+".jsonl")}, &out)
			require.NoError(t, err)
			require.Zero(t, failed, out.String())
			require.Positive(t, passed)
		})
	}
}

func TestNoVectorIsLeftOut(t *testing.T) {
	var out strings.Builder
	passed, failed, err := Run([]string{"testdata"}, &out)
	require.NoError(t, err)
	require.Zero(t, failed, out.String())
	require.Equal(t, vectorsIn(t, "testdata"), passed)
	files, err := filepath.Glob(filepath.Join("testdata", "*.jsonl"))
	require.NoError(t, err)
	require.Len(t, files, len(kinds), "a file for each kind")
}

func vectorsIn(t *testing.T, dir string) (n int) {
	files, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	require.NoError(t, err)
	for _, file := range files {
		data, err := os.ReadFile(file)
		require.NoError(t, err)
		n += strings.Count(string(data), "\n")
	}
	return n
}

func TestAWrongAnswerFails(t *testing.T) {
	for _, c := range []struct{ name, line, want string }{
		{
			"a score", `{"kind":"fscore0","id":"a","in":{"w":5,"m":9,"G":2},"want":{"F":6}}`,
			"fscore0 a: F = 5, want 6",
		},
		{
			"a subset below the best", `{"kind":"subset","id":"a","in":{"sizes":[3,4],"cap":1,"margins":[9],"alpha":1,"beta":2,"gamma":1},"want":{"best":7}}`,
			"subset a: best = 4, want 7",
		},
		{
			"an assignment", `{"kind":"br0","id":"a","in":{"policy":"br0","workers":[{"id":1,"free":1}],"pool":[{"id":2,"prompt":3}]},"want":{"assign":[]}}`,
			"br0 a: assign = [[2 1]], want []",
		},
		{
			"a key nobody reads", `{"kind":"fscore0","id":"a","in":{"w":5,"m":9,"G":2,"H":3},"want":{"F":5}}`,
			`fscore0 a: in: json: unknown field "H"`,
		},
		{
			"a policy that does not exist", `{"kind":"br0","id":"a","in":{"policy":"br9","workers":[],"pool":[]},"want":{"assign":[]}}`,
			`br0 a: unknown policy "br9"`,
		},
		{"a kind nobody knows", `{"kind":"br9","id":"a","in":{},"want":{}}`, `unknown kind "br9" (a)`},
		{
			"a prediction", `{"kind":"survival","id":"a","in":{"outputs":[5,15],"age":0,"H":10,"tau":0.5},"want":{"p_hat":0.5,"mu_hat":5,"r_hat":8}}`,
			"survival a: r_hat = 7.5, want 8",
		},
		{
			"a prediction later on", `{"kind":"refresh","id":"a","in":{"outputs":[5],"H":10,"tau":0.5,"every":20,"tokens":2},"want":{"r_hat":[5,4,4]}}`,
			"refresh a: r_hat[2] = 3, want 4",
		},
		{
			"a score that is not defined", `{"kind":"score","id":"a","in":{"finished":[1],"p_hat":[1],"mu_hat":[2],"remaining":[2]},"want":{"auc":0.5,"brier":0,"conditional_mae":0}}`,
			"score a: auc = NaN, want 0.5",
		},
		{
			"a load without its column", `{"kind":"cost","id":"a","in":{"loads":[[1,2],[3]],"weights":[0.5,0.5]},"want":{"J":2}}`,
			"cost a: in: worker 1 has 1 columns, there are 2 weights",
		},
		{"a line that is no vector", `{"kind":`, "not a vector: unexpected end of JSON input"},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "x.jsonl")
			require.NoError(t, os.WriteFile(file, []byte("\n"+c.line+"\n"), 0o600))
			var out strings.Builder
			passed, failed, err := Run([]string{file}, &out)
			require.NoError(t, err)
			require.Equal(t, 0, passed)
			require.Equal(t, 1, failed)
			require.Contains(t, out.String(), file+":2: "+c.want)
			require.Contains(t, out.String(), "\n0 passed, 1 failed\n")
		})
	}
}

func TestNothingToRunIsAnError(t *testing.T) {
	_, _, err := Run([]string{filepath.Join(t.TempDir(), "none.jsonl")}, &strings.Builder{})
	require.ErrorIs(t, err, os.ErrNotExist)
	_, _, err = Run([]string{t.TempDir()}, &strings.Builder{})
	require.ErrorContains(t, err, "no vector in")
}

const snapshot = `{"policy":"br0","window":5,"theta":0,"queue":"capacity","order":"fcfs","watermark":0,"max_age_ms":1000,
	"workers":[{"id":11,"free":1,"capacity_tokens":0,"running":[{"prompt":700,"generated":10,"rhat":1}]},
	           {"id":10,"free":1,"capacity_tokens":900,"running":[]}],
	"pool":[{"id":1,"prompt":901,"age_ms":20},{"id":2,"prompt":60,"age_ms":10},{"id":3,"prompt":70,"age_ms":10}]}`

func TestDecidePrintsTheRound(t *testing.T) {
	r, err := Decide([]byte(snapshot), "")
	require.NoError(t, err)
	got, err := json.Marshal(r)
	require.NoError(t, err)
	require.JSONEq(t, `{"policy":"br0:window=5,theta=0,queue=capacity,max_age_ms=1000,watermark=0",
		"assignments":[{"entry":3,"worker":10,"score":70,"stage":1},{"entry":2,"worker":11,"score":-60,"stage":1}],
		"left":[{"entry":1,"why":"no free slot left"}]}`, string(got))
}

func TestParametersOfTheSnapshotStandWhereTheSpecSetsNone(t *testing.T) {
	for _, c := range []struct{ name, spec, want string }{
		{"the spec's settings win", "br0:window=2,max_age_ms=5", "br0:window=2,theta=0,queue=capacity,max_age_ms=5,watermark=0"},
		{"so does what a preset decides", "br0:paper", "br0:paper,window=5,theta=0,watermark=0"},
		{"a policy takes what it knows", "pjsq-kv", "pjsq-kv:max_age_ms=1000,watermark=0"},
		{"or nothing", "jsq", "jsq"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, err := Decide([]byte(snapshot), c.spec)
			require.NoError(t, err)
			require.Equal(t, c.want, r.Policy)
		})
	}
}

const saturated = `{"step_ms":60,"c0_ms":50,"c1_ms":0.001,"outputs":[200,300,400],
	"workers":[{"id":0,"free":1,"running":[{"prompt":10000,"generated":40}]},{"id":1,"free":1,"running":[{"prompt":10000,"generated":40}]}],
	"pool":[{"id":1,"prompt":90000,"age_ms":60},{"id":2,"prompt":300}]}`

func TestRequestsWithoutAnIDAreTold(t *testing.T) {
	s, _, err := ReadSnapshot([]byte(saturated))
	require.NoError(t, err)
	x, y := s.Workers[0].Running[0], s.Workers[1].Running[0]
	require.NotEqual(t, x.ID, y.ID)
	require.NotEqual(t, x.Slot, y.Slot)
	require.InDelta(t, 300, s.MeanOutput, 1e-9)
}

func TestALineOfTheDecisionLogIsASnapshot(t *testing.T) {
	line := `{"tick":7,"t_ms":12.5,"group":"main","in":` + snapshot + `,"assign":[[3,10],[2,11]]}`
	want, err := Decide([]byte(snapshot), "")
	require.NoError(t, err)
	got, err := Decide([]byte(line), "")
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func TestASnapshotThatMakesNoSenseIsRefused(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"a misspelt key", `{"workers":[{"id":1,"fre":2}]}`, `unknown field "fre"`},
		{"two workers of one id", `{"workers":[{"id":4},{"id":4}]}`, "two workers have id 4"},
		{"two entries of one id", `{"pool":[{"id":9,"prompt":1},{"id":9,"prompt":1}]}`, "two pool entries have id 9"},
		{"a negative prompt", `{"pool":[{"id":9,"prompt":-1}]}`, "pool entry 9: prompt cannot be negative"},
		{"more of a request on other workers than it has", `{"workers":[{"id":1,"running":[{"prompt":3,"away":4}]}]}`, "worker 1, running[0]: away is a part of prompt and generated"},
		{"a negative load", `{"workers":[{"id":1,"running":[{"generated":-3}]}]}`, "worker 1, running[0]: prompt and generated cannot be negative"},
		{"a negative capacity", `{"workers":[{"id":1,"capacity_tokens":-3}]}`, "worker 1: want capacity_tokens from 0 and cost from 0 to 1000"},
		{"a cost without measure", `{"workers":[{"id":1,"cost":1e9}]}`, "worker 1: want capacity_tokens from 0 and cost from 0 to 1000"},
		{"another one after it, as in a log", `{"workers":[]} {}`, "more than one JSON value"},
		{"text after it", `{"workers":[]} x`, "invalid character"},
		{"no object", `[]`, "cannot unmarshal array"},
		{"a parameter out of range", `{"policy":"br0","window":0}`, "snapshot: policy br0: window=0: want a whole number from 1 to 64"},
		{"no policy anywhere", `{"workers":[]}`, "the snapshot names no policy"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Decide([]byte(c.in), "")
			require.ErrorContains(t, err, c.want)
		})
	}
}

func FuzzReadSnapshot(f *testing.F) {
	f.Add([]byte(snapshot))
	f.Add([]byte(saturated))
	f.Add([]byte(`{"in":{"workers":[{"id":1,"up":false,"cost":1.5}],"pool":[{"id":1,"prompt":2,"urgent":true}]}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, _, err := ReadSnapshot(data)
		if err != nil {
			return
		}
		for i := 1; i < len(s.Workers); i++ {
			require.Less(t, s.Workers[i-1].ID, s.Workers[i].ID)
		}
		for _, spec := range []string{"br0", "brh", "evenkeel"} { // must not panic, whatever the numbers
			_, _ = Decide(data, spec)
		}
	})
}
