package ranks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/bench/lab/report"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestAnAnswerIsTakenDownChunkByChunk(t *testing.T) {
	event := func(n string) string {
		return `data: {"choices":[{"text":"x"}],"usage":{"prompt_tokens":9,"total_tokens":10,"completion_tokens":` + n + "}}\n\n"
	}
	for _, c := range []struct {
		name, body, fault string
		tokens            []int
	}{
		{"a token each", event("1") + event("2") + event("3") + event("3") + "data: [DONE]\n\n", "", []int{1, 2, 3}},
		{"two tokens in one chunk count as two", event("1") + event("3"), "", []int{1, 3}},
		{"an answer that is too short", event("1") + event("2"), "2 tokens, and 3 were asked for", []int{1, 2}},
		{"a token that reads error", strings.ReplaceAll(event("3"), `"x"`, `"error"`), "", []int{3}},
		{"an error in the stream", event("1") + `data: {"error":{"message":"gone"}}`, "an error event after 1 tokens", []int{1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var a Answer
			err := a.read(strings.NewReader(c.body), 3)
			if c.fault == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.fault)
			}
			var tokens []int
			for _, x := range a.Chunks {
				tokens = append(tokens, x.Tokens)
			}
			require.Equal(t, c.tokens, tokens)
		})
	}
}

func TestTheFullPartOfARun(t *testing.T) {
	start := time.Date(2026, 11, 21, 0, 0, 0, 0, time.UTC)
	at := func(s float64) time.Time { return start.Add(time.Duration(s * 1e9)) }
	p := Played{Began: at(0), Full: at(2), Empty: at(6), Answers: []Answer{
		{Sent: at(0), Chunks: []Chunk{{at(1), 1}, {at(2), 2}, {at(3), 4}, {at(9), 5}}},
		{Sent: at(3), Chunks: []Chunk{{at(5), 1}}},
		{Err: errors.New("no")},
	}}
	s, failed, why := p.Measure()
	require.Equal(t, 1, failed)
	require.EqualError(t, why, "no")
	require.InDelta(t, 2000, s[report.TPOTP95], 1e-9, "of the answer that has more than a token")
	require.InDelta(t, 6./9, s[WholeTokens], 1e-9)
	require.InDelta(t, 4./4, s[report.TokensPerS], 1e-9)
	require.InDelta(t, 1000, s[GapMean], 1e-9, "the gap that begins outside does not count")
	require.InDelta(t, 2000, s[report.TTFTMean], 1e-9)
}

// engine answers two tokens to every request, and counts how many it had at a time.
func engine(t *testing.T, most *atomic.Int64) string {
	var open atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := open.Add(1)
		defer open.Add(-1)
		for was := most.Load(); n > was && !most.CompareAndSwap(was, n); was = most.Load() {
		}
		_, _ = io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, `data: {"usage":{"completion_tokens":2}}`+"\n\n")
	}))
	t.Cleanup(server.Close)
	return server.URL
}

func TestAListIsSentToItsEnd(t *testing.T) {
	list := Draw(1, 30, Lengths{Median: 5, Least: 5, Most: 5}, Lengths{Median: 2, Least: 2, Most: 2})
	for name, send := range map[string]func(Client, string) *Played{
		"closed": func(c Client, url string) *Played { return c.Closed(t.Context(), url, list, 3) },
		"open": func(c Client, url string) *Played {
			return c.Open(t.Context(), url, list, make([]time.Duration, len(list)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			var most atomic.Int64
			c := NewClient()
			defer c.CloseIdleConnections()
			p := send(c, engine(t, &most))
			for _, a := range p.Answers {
				require.NoError(t, a.Err)
				require.Len(t, a.Chunks, 1)
			}
			if name == "closed" {
				require.LessOrEqual(t, most.Load(), int64(3))
			}
			require.False(t, p.Empty.Before(p.Full))
		})
	}
}

func TestAnOpenListThatIsCutShortSaysSo(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p := NewClient().Open(ctx, "http://127.0.0.1:1", []Request{{Prompt: 1, Output: 1}, {Prompt: 1, Output: 1}}, []time.Duration{0, time.Hour})
	require.ErrorIs(t, p.Answers[1].Err, context.Canceled)
}

func TestTablesAreWrittenOnceAllIsMeasured(t *testing.T) {
	var out strings.Builder
	tables := Tables{Out: &out, Target: "real-x"}
	tables.Show("law", "The law", func(out io.Writer) { fmt.Fprintln(out, "a table") })
	require.Equal(t, "\n## The law\n\na table\n", out.String())
	require.NoError(t, tables.Save(""))
	file := t.TempDir() + "/page.md"
	require.NoError(t, tables.Save(file))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(text), "<!-- law: written by `make real-x` -->\na table\n")
}

func TestEveryRoundPlaysAllInAnOrderOfItsOwn(t *testing.T) {
	var order []int
	all, err := Rounds(6, 3, 1, func(round, i int) (int, error) {
		order = append(order, i)
		return 10*round + i, nil
	})
	require.NoError(t, err)
	require.Equal(t, []int{50, 51, 52}, all[5])
	orders := map[string]bool{}
	for round := range 6 {
		orders[fmt.Sprint(order[3*round:3*round+3])] = true
	}
	require.Greater(t, len(orders), 2)
	_, err = Rounds(1, 1, 1, func(int, int) (int, error) { return 0, errors.New("no") })
	require.EqualError(t, err, "no")
}

func TestADifferenceIsThatOfItsRound(t *testing.T) {
	var rounds [][]report.Sample
	for i := range 5 {
		base := 100 + 50*float64(i) // rounds differ by far more than what is compared
		rounds = append(rounds, []report.Sample{{report.TokensPerS: 1.1 * base, report.TTFTMean: 1}, {report.TokensPerS: base}})
	}
	m := Paired(rounds, 0, 1)
	require.Equal(t, "+10.0 ± 0.0", Off(m[report.TokensPerS], 5))
	require.NotContains(t, m, report.TTFTMean, "the base has none")
	require.Equal(t, "200 ± 79", Show(Summary(rounds, 1)[report.TokensPerS], 0))
}
