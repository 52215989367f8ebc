package sse

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/rigs/real/recording"
)

// streamed are the recorded streams of real engines that came with status 200.
func streamed(t *testing.T) []*recording.Recording {
	all, err := recording.All()
	require.NoError(t, err)
	all = slices.DeleteFunc(all, func(r *recording.Recording) bool { return !r.Streams() })
	require.Greater(t, len(all), 40)
	return all
}

// said is what a stream says, read by encoding/json.
type said struct {
	finish     string
	usage      *recordedUsage // of the last event that has one
	ids        int            // token ids of all choices
	asked      bool           // for token ids
	choices    int
	prompt     []int // token ids
	failed     bool
	done       bool
	withTokens int // events with text, a piece of a tool call or other content
}

type recordedUsage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
	Details    *struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

func saidBy(t *testing.T, body string) (s said) {
	for part := range strings.SplitSeq(strings.TrimSuffix(body, "\n\n"), "\n\n") {
		data, ok := strings.CutPrefix(part, "data: ")
		require.True(t, ok, "an event of another shape: %q", part)
		if data == "[DONE]" {
			s.done = true
			continue
		}
		var e struct {
			Error   any            `json:"error"`
			Usage   *recordedUsage `json:"usage"`
			Prompt  []int          `json:"prompt_token_ids"`
			Choices []struct {
				Index  int            `json:"index"`
				Text   string         `json:"text"`
				Delta  map[string]any `json:"delta"`
				Finish string         `json:"finish_reason"`
				IDs    []int          `json:"token_ids"`
				Prompt []int          `json:"prompt_token_ids"`
			} `json:"choices"`
		}
		require.NoError(t, json.Unmarshal([]byte(data), &e))
		s.failed = s.failed || e.Error != nil
		if e.Usage != nil {
			s.usage = e.Usage
		}
		for _, c := range e.Choices {
			s.choices = max(s.choices, c.Index+1)
			s.ids += len(c.IDs)
			s.asked = s.asked || c.IDs != nil
			s.prompt = append(s.prompt, c.Prompt...)
			if c.Finish != "" {
				s.finish = c.Finish
			}
			if text, _ := c.Delta["content"].(string); text != "" || c.Text != "" || c.Delta["tool_calls"] != nil {
				s.withTokens++
			}
		}
		s.prompt = append(s.prompt, e.Prompt...)
	}
	return s
}

// passed is a stream in pieces, past a filter.
type passed struct {
	client   string
	verdicts []string
	m        *Filter
}

func pass(options Options, pieces []string) (p passed) {
	f := NewFramer(0)
	p.m = NewFilter(options)
	var client []byte
	for _, piece := range pieces {
		f.Feed([]byte(piece))
		for e, ok := f.Next(); ok; e, ok = f.Next() {
			out, end := p.m.Event(e, nil)
			client, p.verdicts = append(client, out...), append(p.verdicts, verdict(out, end))
		}
	}
	p.client = string(client)
	return p
}

func inPiecesOf(n int, body string) (pieces []string) {
	for piece := range slices.Chunk([]byte(body), n) {
		pieces = append(pieces, string(piece))
	}
	return pieces
}

// TestRecordedStreamsAreRead holds the filter to what real engines sent, however the bytes were
// cut.
func TestRecordedStreamsAreRead(t *testing.T) {
	all := Options{Usage: true, ContinuousUsage: true, TokenIDs: true, Cached: OwnCached, Choice: -1}
	for _, r := range streamed(t) {
		t.Run(r.Name, func(t *testing.T) {
			body := string(r.Body())
			want := saidBy(t, body)
			for _, options := range []Options{all, nothing} {
				whole := pass(options, r.Pieces)
				for _, n := range []int{1, 2, 3, 7, 61, 1021, len(body)} {
					cut := pass(options, inPiecesOf(n, body))
					require.Equal(t, whole.client, cut.client, "in pieces of %d", n)
					require.Equal(t, whole.verdicts, cut.verdicts, "in pieces of %d", n)
				}
				if want.failed {
					require.Contains(t, whole.verdicts, "failed")
					require.NotEmpty(t, whole.m.Failure().Message)
					continue
				}
				require.NotContains(t, whole.verdicts, "failed")
				require.NotContains(t, whole.verdicts, "overrun")
				require.Equal(t, want.done, whole.verdicts[len(whole.verdicts)-1] == "ended")
				require.Equal(t, want.finish, whole.m.FinishReason())
				require.True(t, whole.m.Started())
				switch {
				case want.usage != nil:
					require.Equal(t, want.usage.Completion, whole.m.Tokens(), "tokens")
				case want.asked:
					require.Equal(t, want.ids, whole.m.Tokens(), "tokens by their ids")
				default:
					require.Equal(t, want.withTokens, whole.m.Tokens(), "tokens by their chunks")
				}
				usage, known := whole.m.Usage()
				require.Equal(t, want.usage != nil, known)
				if known {
					require.Equal(t, []int{want.usage.Prompt, want.usage.Completion, want.usage.Total}, []int{usage.Prompt, usage.Completion, usage.Total})
				}
				if len(want.prompt) > 0 && want.choices == 1 {
					require.Equal(t, cmpPrompt(want), whole.m.Prompt(), "tokens of the prompt")
				}
			}
			if asked := pass(all, r.Pieces); asked.m.usageSeen && want.usage.Details != nil {
				require.Equal(t, want.usage.Details.Cached, asked.m.usage.Cached)
				require.Equal(t, body, asked.client, "nothing changes for a client that asked for all of it")
			}
			client := saidBy(t, pass(nothing, r.Pieces).client)
			require.Nil(t, client.usage, "a client that did not ask")
			require.Zero(t, client.ids)
			require.Empty(t, client.prompt)
		})
	}
}

// cmpPrompt is how long the prompt is by the usage, or else by its ids.
func cmpPrompt(s said) int {
	if s.usage != nil {
		return s.usage.Prompt
	}
	return len(s.prompt)
}

// TestRecordedStreamsCutAnywhere cuts each stream in two, at every byte.
func TestRecordedStreamsCutAnywhere(t *testing.T) {
	const most = 6 << 10 // longer streams have the same events again
	for _, r := range streamed(t) {
		body := r.Body()
		if len(body) > most {
			continue
		}
		want := frames(t, string(body))
		f := NewFramer(0)
		for cut := range body {
			f.Reset()
			var got []string
			for _, piece := range [][]byte{body[:cut], body[cut:]} {
				f.Feed(piece)
				for e, ok := f.Next(); ok; e, ok = f.Next() {
					got = append(got, string(e.Data))
				}
			}
			require.Len(t, got, len(want), "%s cut at %d", r.Name, cut)
			for i, e := range want {
				if string(e.Data) != got[i] {
					t.Fatalf("%s cut at %d: event %d is %q, not %q", r.Name, cut, i, got[i], e.Data)
				}
			}
		}
	}
}

// unequal are streams whose whole answer a real engine gives in other words, with the reason.
var unequal = map[string]string{
	"chat-tools-required-stream": "max_tokens cuts the call; vLLM sends pieces of it in a stream, and its markup as text in a whole answer",
}

// TestRecordedStreamsAssembleToTheWholeAnswer puts streams together and compares them with what the
// same engine answered to the same request without a stream.
func TestRecordedStreamsAssembleToTheWholeAnswer(t *testing.T) {
	all, err := recording.All()
	require.NoError(t, err)
	byName := map[string]*recording.Recording{}
	for _, r := range all {
		byName[r.Name] = r
	}
	compared := 0
	for _, r := range streamed(t) {
		base, suffix := strings.TrimSuffix(r.Name, "-stream"), "-stream"
		if base == r.Name {
			base, suffix = strings.TrimSuffix(r.Name, "-proxied"), "-proxied"
		}
		twin := byName[base]
		if twin == nil || twin == r || twin.Status != 200 || twin.Streams() {
			continue
		}
		compared++
		t.Run(r.Name, func(t *testing.T) {
			options := Options{Usage: true, TokenIDs: strings.Contains(twin.Ask.Body, "return_token_ids"), Cached: OwnCached, Choice: -1}
			f := NewFilter(options)
			a := NewAssembler(strings.Contains(r.Ask.Path, "chat"), 0)
			for _, e := range frames(t, string(r.Body())) {
				out, end := f.Event(e, nil)
				require.Contains(t, []End{NotEnded, Complete}, end)
				require.NoError(t, a.Add(out))
			}
			answer, err := a.JSON(nil)
			require.NoError(t, err)
			if why := unequal[r.Name]; why != "" {
				require.NotEqual(t, spoken(t, twin.Body()), spoken(t, answer), "they are equal now: %s", why)
				return
			}
			require.Equal(t, spoken(t, twin.Body()), spoken(t, answer), suffix)
		})
	}
	require.Greater(t, compared, 30)
}

// spoken are the choices and counts of an answer. Members that are null or empty are left out: a
// stream does not send them.
func spoken(t *testing.T, answer []byte) any {
	var doc struct {
		Object  string           `json:"object"`
		Choices []map[string]any `json:"choices"`
		Usage   map[string]any   `json:"usage"`
	}
	require.NoError(t, json.Unmarshal(answer, &doc))
	for _, c := range doc.Choices {
		if message, ok := c["message"].(map[string]any); ok {
			calls, _ := message["tool_calls"].([]any)
			for _, call := range calls {
				delete(call.(map[string]any), "id") // drawn anew for each answer
			}
		}
	}
	if details, ok := doc.Usage["prompt_tokens_details"].(map[string]any); ok {
		delete(details, "created_cache_tokens") // differs between streams and whole answers of vLLM itself
		delete(details, "cached_tokens")        // the second of two requests finds what the first has left
	}
	return bare(map[string]any{"object": doc.Object, "choices": toAny(doc.Choices), "usage": doc.Usage})
}

func toAny(list []map[string]any) (out []any) {
	for _, m := range list {
		out = append(out, m)
	}
	return out
}

// bare leaves out null, "" and [] at any depth.
func bare(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			switch value = bare(value); {
			case value == nil, value == "":
				delete(v, key)
			default:
				v[key] = value
			}
		}
		return v
	case []any:
		if len(v) == 0 {
			return nil
		}
		for i := range v {
			v[i] = bare(v[i])
		}
	}
	return v
}
