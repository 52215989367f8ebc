package predictor

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAFitFileHoldsTheFit(t *testing.T) {
	for _, kind := range []string{"survival", "exact"} {
		t.Run(kind, func(t *testing.T) {
			f, err := Train(kind, recurrent(400), Options{
				Created: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Source: Source{File: "a.csv", SHA256: "00", From: "0s", To: "80s"},
			})
			require.NoError(t, err)
			b, err := f.Encode()
			require.NoError(t, err)
			require.True(t, strings.HasPrefix(string(b), `{"evenkeel_fit":1,"kind":"`+kind+`","created":"2026-01-02T03:04:05Z","source":{"file":"a.csv","sha256":"00","rows":400,`), "%.200s", b)
			back, err := ParseFit(b)
			require.NoError(t, err)
			again, err := back.Encode()
			require.NoError(t, err)
			require.Equal(t, string(b), string(again))

			p, table, err := f.Build()
			require.NoError(t, err)
			q, qtable, err := back.Build()
			require.NoError(t, err)
			require.Equal(t, table.Version(), qtable.Version())
			for _, query := range []Query{{}, {Prompt: 300, Age: 40, Key: 5}, {Prompt: 9999, Age: 580}, {Prompt: 100, Age: 9999, Key: 99}} {
				require.Equal(t, ask(p, 80, query), ask(q, 80, query), "%+v", query)
			}
		})
	}
}

// small is a valid file, with one part replaced.
func small(old, replacement string) []byte {
	const file = `{"evenkeel_fit":1,"kind":"exact","created":"2026-01-02T03:04:05Z",` +
		`"source":{"file":"f","sha256":"","rows":3,"from":"","to":""},"outputs":[[10,2],[20,1]],"prompt_quantiles":[1,2,3,4,5,6,7],` +
		`"buckets":[{"key":"q3","outputs":[[10,2]]},{"key":"00000000000000ff","outputs":[[20,1]]}],` +
		`"holdout":{"requests":1,"horizon":80,"rows":1,"auc":null,"brier":0.1,"conditional_mae":3,"base":{"rows":1,"auc":null,"brier":0.2,"conditional_mae":4}}}`
	return []byte(strings.Replace(file, old, replacement, 1))
}

func TestAFileIsReadStrictly(t *testing.T) {
	_, err := ParseFit(small("", ""))
	require.NoError(t, err)
	for _, row := range []struct{ name, old, replacement, want string }{
		{"a later version", `"evenkeel_fit":1`, `"evenkeel_fit":2`, "version 2, this evenkeel reads version 1"},
		{"no version", `"evenkeel_fit":1,`, ``, "no evenkeel_fit"},
		{"not JSON", `{"evenkeel_fit"`, `evenkeel`, "invalid character"},
		{"a key nobody knows", `"kind":"exact"`, `"kind":"exact","evry":20`, `unknown field "evry"`},
		{"something behind it", `"conditional_mae":4}}}`, `"conditional_mae":4}}} {}`, "after top-level value"},
		{"a kind that is no fit", `"exact"`, `"oracle"`, `kind "oracle"`},
		{"outputs of nothing", `[[10,2],[20,1]]`, `[[0,2]]`, "outputs: pair 0 is [0 2]"},
		{"counts of nothing", `[[10,2],[20,1]]`, `[[5,-2]]`, "outputs: pair 0 is [5 -2]"},
		{"lengths out of order", `[[10,2],[20,1]]`, `[[20,2],[10,1]]`, "pair 1"},
		{"more outputs than fit in memory", `[[10,2],[20,1]]`, `[[20,2000000000],[21,2000000000]]`, "more than"},
		{"quantiles missing", `[1,2,3,4,5,6,7]`, `[1,2]`, "prompt_quantiles [1 2]"},
		{"quantiles out of order", `[1,2,3,4,5,6,7]`, `[2,1,3,4,5,6,7]`, "prompt_quantiles"},
		{"a length bucket without quantiles", `[1,2,3,4,5,6,7]`, `[]`, "q3 without"},
		{"a bucket past the last", `"q3"`, `"q8"`, `bucket "q8"`},
		{"a key too short", `"00000000000000ff"`, `"ff"`, `bucket "ff"`},
		{"the key that means none", `"00000000000000ff"`, `"0000000000000000"`, "neither"},
		{"a bucket twice", `"00000000000000ff"`, `"q3"`, "twice"},
		{"a bucket of nothing", `"outputs":[[20,1]]`, `"outputs":[[20,0]]`, "bucket 00000000000000ff: pair 0"},
	} {
		t.Run(row.name, func(t *testing.T) {
			_, err := ParseFit(small(row.old, row.replacement))
			require.ErrorContains(t, err, row.want)
		})
	}
}

func FuzzParseFit(f *testing.F) {
	f.Add(small("", ""))
	f.Add(small("exact", "survival"))
	f.Fuzz(func(t *testing.T, b []byte) {
		fit, err := ParseFit(b)
		if err != nil || fit.Outputs.Len() > 100_000 {
			return
		}
		p, table, err := fit.Build()
		require.NoError(t, err, "what is read can be built")
		for _, q := range []Query{{}, {Prompt: 5, Age: 10, Key: 255}, {Prompt: 1 << 30, Age: 1 << 30}} {
			got := ask(p, 80, q)
			require.True(t, got.P >= 0 && got.P <= 1, "%+v: %+v", q, got)
		}
		online, err := NewOnline(OnlineConfig{Kind: fit.Kind, Fit: fit})
		require.NoError(t, err)
		_, seeded := online.Build()
		require.Equal(t, min(table.Len(), OutputsMost), seeded.Len())
	})
}
