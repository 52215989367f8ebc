package request

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/mooncake"
)

// generated is one answer of /generate, or the last event of one.
type generated struct {
	Text  string
	IDs   []int32 `json:"output_ids"`
	Index *int
	Meta  struct {
		ID     string
		Finish *struct{ Type string } `json:"finish_reason"`
		Prompt int                    `json:"prompt_tokens"`
		Made   int                    `json:"completion_tokens"`
		Probs  [][]json.RawMessage    `json:"output_token_logprobs"`
	} `json:"meta_info"`
	Error *struct{ Code any }
}

// readGenerated are the answers, by their index, and the code of an error.
func readGenerated(t *testing.T, r reply, listed bool) (all map[int]generated, fail string) {
	t.Helper()
	all = map[int]generated{}
	switch {
	case strings.HasPrefix(r.body, "["):
		var list []generated
		require.True(t, listed)
		require.NoError(t, json.Unmarshal([]byte(r.body), &list), r.body)
		for i, g := range list {
			all[i] = g
		}
	case strings.HasPrefix(r.body, "{"):
		var g generated
		require.False(t, listed)
		require.NoError(t, json.Unmarshal([]byte(r.body), &g), r.body)
		all[0] = g
	default:
		events := strings.Split(strings.TrimSuffix(r.body, "\n\n"), "\n\n")
		require.Equal(t, "data: [DONE]", events[len(events)-1], r.body)
		for _, data := range events[:len(events)-1] {
			var g generated
			require.NoError(t, json.Unmarshal([]byte(strings.TrimPrefix(data, "data: ")), &g), data)
			if g.Error != nil {
				return all, fmt.Sprint(g.Error.Code)
			}
			i := 0
			if require.Equal(t, listed, g.Index != nil, data); listed {
				i = *g.Index
			}
			require.Greater(t, len(g.IDs), len(all[i].IDs)-1, "each event has all so far")
			all[i] = g
		}
	}
	return all, ""
}

func TestGenerateOfSGLang(t *testing.T) {
	t.Parallel()
	one := reftext.Of(reftext.MakePrompt(3, 40)).IDs
	ids, err := json.Marshal(one)
	require.NoError(t, err)
	key := func(seed *int64) uint64 { return reftext.OfIDs(one, seed).Answer }
	words := reftext.MakePrompt(4, 30)
	for _, row := range []struct {
		name, body string
		listed     bool
		keys       []uint64
		names      []string
		most       int
	}{
		{"token ids", fmt.Sprintf(`"input_ids":%s,"rid":"mine"`, ids), false, []uint64{key(nil)}, []string{"mine"}, 128},
		{"a text", fmt.Sprintf(`"text":%q,"rid":"mine","return_logprob":true,"sampling_params":{"max_new_tokens":300}`, words), false, []uint64{reftext.Of(words).Answer}, []string{"mine"}, 300},
		{"a list of one prompt", fmt.Sprintf(`"input_ids":[%s],"rid":"mine","sampling_params":{"max_new_tokens":9}`, ids), true, []uint64{key(nil)}, []string{"mine_0"}, 9},
		{"a list", fmt.Sprintf(`"text":[%q,%q],"rid":"mine"`, words, words+" more"), true, []uint64{reftext.Of(words).Answer, reftext.Of(words + " more").Answer}, []string{"mine_0", "mine_1"}, 128},
		{"several answers", fmt.Sprintf(`"input_ids":%s,"rid":"mine","sampling_params":{"n":2,"sampling_seed":7}`, ids), true, []uint64{key(new(int64(7))), key(new(int64(8)))}, []string{"mine_0", "mine_1"}, 128},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			o := setup{profile: mooncake.Profile{Connector: mooncake.SGLang}}
			b := start(t, o)
			for _, stream := range []bool{true, false} {
				r := b.post(mooncake.Generate.Path(), fmt.Sprintf(`{"model":%q,"stream":%t,%s}`, refModel, stream, row.body))
				require.Equal(t, http.StatusOK, r.status, r.body)
				got, fail := readGenerated(t, r, row.listed)
				require.Empty(t, fail, r.body)
				require.Len(t, got, len(row.keys))
				for i, key := range row.keys {
					n := min(row.most, reftext.NaturalLength(key))
					require.Len(t, got[i].IDs, n)
					expect(t, key, got[i].IDs)
					require.Equal(t, reftext.Text(key, n), got[i].Text)
					require.Equal(t, n, got[i].Meta.Made)
					require.Positive(t, got[i].Meta.Prompt)
					require.Equal(t, row.names[i], got[i].Meta.ID)
					require.NotNil(t, got[i].Meta.Finish)
					if strings.Contains(row.body, "return_logprob") {
						require.Len(t, got[i].Meta.Probs, n)
					}
				}
				b.over()
				last := b.asked[len(b.asked)-1].Record
				require.Equal(t, "ok", last.Outcome)
				require.Positive(t, last.OutputTokens)
			}
			b.settle()
		})
	}
}

// A stream of token ids goes on by them. Nobody knows the ids of a text, so that a stream of one
// ends; what nobody has seen begins anew.
func TestAnAnswerOfGenerateThatBreaksOff(t *testing.T) {
	t.Parallel()
	one := reftext.Of(reftext.MakePrompt(3, 40)).IDs
	ids, err := json.Marshal(one)
	require.NoError(t, err)
	key := reftext.OfIDs(one, nil).Answer
	diesOften, diesSoon := died, died
	diesOften.Count, diesSoon.AfterTokens = 2, 1
	for name, row := range map[string]struct {
		body   string
		stream bool
		fault  refengine.Rule
		fail   string
		lists  bool
	}{
		"ids, streamed":             {body: fmt.Sprintf(`"input_ids":%s,"rid":"mine"`, ids), stream: true, fault: died},
		"with logprobs":             {body: fmt.Sprintf(`"input_ids":%s,"rid":"mine","return_logprob":true`, ids), stream: true, fault: died, lists: true},
		"broken twice":              {body: fmt.Sprintf(`"input_ids":%s,"rid":"mine","return_logprob":true`, ids), stream: true, fault: diesOften, lists: true},
		"cut at its length":         {body: fmt.Sprintf(`"input_ids":%s,"rid":"mine","sampling_params":{"max_new_tokens":9}`, ids), stream: true, fault: died},
		"of one event only":         {body: fmt.Sprintf(`"input_ids":%s,"rid":"mine"`, ids), stream: true, fault: diesSoon, fail: "upstream_broken"},
		"by a grammar":              {body: fmt.Sprintf(`"input_ids":%s,"sampling_params":{"regex":".*"}`, ids), stream: true, fault: died, fail: "upstream_broken"},
		"a text, streamed":          {body: `"text":"one two three four five six seven"`, stream: true, fault: died, fail: "upstream_broken"},
		"ids in one piece":          {body: fmt.Sprintf(`"input_ids":%s,"rid":"mine"`, ids), fault: died},
		"in one piece, and no more": {body: fmt.Sprintf(`"input_ids":%s,"rid":"mine","return_logprob":true`, ids), fault: died, lists: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{profile: mooncake.Profile{Connector: mooncake.SGLang}})
			require.NoError(t, b.d[0].SetFaults(row.fault))
			r := b.post(mooncake.Generate.Path(), fmt.Sprintf(`{"model":%q,"stream":%t,%s}`, refModel, row.stream, row.body))
			got, fail := readGenerated(t, r, false)
			if require.Equal(t, row.fail, fail, r.body); fail != "" {
				return
			}
			n, end := reftext.NaturalLength(key), "stop"
			if n = min(n, 128); strings.Contains(row.body, "max_new_tokens") {
				n = 9
			}
			if n < reftext.NaturalLength(key) {
				end = "length"
			}
			require.Len(t, got[0].IDs, n)
			expect(t, key, got[0].IDs)
			require.Equal(t, reftext.Text(key, n), got[0].Text)
			require.Equal(t, []any{n, len(one), "mine", end}, []any{got[0].Meta.Made, got[0].Meta.Prompt, got[0].Meta.ID, got[0].Meta.Finish.Type})
			if end == "length" {
				require.Contains(t, r.body, fmt.Sprintf(`{"type":"length","length":%d}`, n))
			}
			if row.lists {
				require.Len(t, got[0].Meta.Probs, n)
			}
			b.settle()
		})
	}
}

func TestARequestToGenerateIsEndedByItsRID(t *testing.T) {
	t.Parallel()
	for _, stream := range []bool{true, false} {
		t.Run(fmt.Sprintf("streamed %t", stream), func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{profile: mooncake.Profile{Connector: mooncake.SGLang},
				decode: []refengine.Config{{Steps: refengine.Steps{C0: 20 * time.Millisecond}}}})
			said := make(chan reply, 1)
			go func() {
				said <- b.post(mooncake.Generate.Path(), fmt.Sprintf(`{"model":%q,"stream":%t,"rid":"mine","input_ids":[1,2,3,4,5,6,7,8,9]}`, refModel, stream))
			}()
			b.eventually("it is under way", func() bool { return b.d[0].Stats().Tokens > 3 })
			require.Equal(t, 1, b.Running.End("", func(name string) bool { return name == "mine" }))
			r := <-said
			require.Equal(t, http.StatusOK, r.status, r.body)
			got, fail := readGenerated(t, r, false)
			require.Empty(t, fail, r.body)
			require.Equal(t, "abort", got[0].Meta.Finish.Type)
			require.Equal(t, "mine", got[0].Meta.ID)
			b.settle()
		})
	}
}

// Each prompt of a list may have a name, and ends by it alone.
func TestAPromptOfAListIsEndedByItsRID(t *testing.T) {
	t.Parallel()
	b := start(t, setup{profile: mooncake.Profile{Connector: mooncake.SGLang},
		decode: []refengine.Config{{Steps: refengine.Steps{C0: 20 * time.Millisecond}}}})
	said := make(chan reply, 1)
	go func() {
		said <- b.post(mooncake.Generate.Path(), fmt.Sprintf(`{"model":%q,"rid":["one","two"],"input_ids":[[1,2,3,4,5,6,7,8,9],[9,8,7,6,5,4,3,2,1]]}`, refModel))
	}()
	b.eventually("both are under way", func() bool { return b.d[0].Stats().Tokens > 6 })
	require.Equal(t, 1, b.Running.End("", func(name string) bool { return name == "two" }))
	r := <-said
	require.Equal(t, http.StatusOK, r.status, r.body)
	got, fail := readGenerated(t, r, true)
	require.Empty(t, fail, r.body)
	require.Equal(t, []string{"one", "two"}, []string{got[0].Meta.ID, got[1].Meta.ID})
	require.NotEqual(t, "abort", got[0].Meta.Finish.Type)
	require.Equal(t, "abort", got[1].Meta.Finish.Type)
	b.settle()
	require.Zero(t, b.Running.End("", func(string) bool { return true }), "nobody is known any more")
}
