package sse

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// grows is an engine of SGLang that makes the rest of a known answer, behind so many of its tokens.
type grows struct {
	texts  []string // of the tokens
	prompt int      // tokens of the client's own prompt
	made   int      // before
	growth Growth
	ids    bool // no tokenizer: no text
	cached int
	late   bool // which weights made the tokens is told at the end only
}

// events are those of the engine up to a token, the last one with its end.
func (g *grows) events(to int) (all []string) {
	for n := g.made + 1; n <= to; n++ {
		from := g.made
		if g.growth == Delta {
			from = n - 1
		}
		var ids, probs, spans, input []string
		for i := from; i < n; i++ {
			ids, probs = append(ids, fmt.Sprint(100+i)), append(probs, fmt.Sprintf("[-0.5,%d,null]", 100+i))
		}
		for i := g.made; i < n && !g.late; i++ {
			spans = append(spans, fmt.Sprintf(`{"version":"v%d","start":%d,"end":%d}`, i, i-g.made, i-g.made+1))
		}
		told := fmt.Sprintf(`,"weight_versions":[%s]`, strings.Join(spans, ","))
		if g.late {
			told = `,"weight_version":"w"`
			if n == len(g.texts) {
				told += fmt.Sprintf(`,"weight_versions":[{"version":"w","start":0,"end":%d}]`, n-g.made)
			}
		}
		for i := range g.prompt + g.made {
			input = append(input, fmt.Sprintf("[-1,%d,null]", i))
		}
		end := "null"
		if n == len(g.texts) {
			end = fmt.Sprintf(`{"type":"length","length":%d}`, len(g.texts)-g.made)
		}
		text := ""
		if !g.ids {
			said, _ := json.Marshal(strings.Join(g.texts[from:n], ""))
			text = fmt.Sprintf(`"text":%s,`, said)
		}
		all = append(all, fmt.Sprintf(`{%s"output_ids":[%s],"meta_info":{"id":"x","finish_reason":%s,"prompt_tokens":%d,"input_token_logprobs":[%s],"output_token_logprobs":[%s],"output_token_logprobs_length":%d,"output_top_logprobs":null,"reasoning_tokens":0,"completion_tokens":%d,"cached_tokens":%d%s},"prompt_token_ids":[%d]}`,
			text, strings.Join(ids, ","), end, g.prompt+g.made, strings.Join(input, ","), strings.Join(probs, ","), n-g.made, n-g.made, g.cached,
			told, g.prompt+g.made))
	}
	return all
}

// relayed are the events that a client gets, and what is kept of them.
func relayed(t require.TestingT, events []string, continuation *Continuation, kept *Transcript) (out []string) {
	f := NewFilter(Options{Form: Generated, Choice: -1, Cached: OwnCached, Transcript: kept, Continuation: continuation})
	for _, e := range events {
		raw := []byte("data: " + e + "\n\n")
		got, end := f.Event(Event{Raw: raw, Data: raw[6 : len(raw)-2], Kind: KindData, dataAt: 6}, nil)
		require.Equal(t, NotEnded, end, e)
		require.NotNil(t, got, e)
		out = append(out, strings.TrimSuffix(strings.TrimPrefix(string(got), "data: "), "\n\n"))
	}
	return out
}

// However often an answer breaks off, the client reads what one engine would have sent.
func TestWhatIsJoinedIsWhatOneEngineSends(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := grows{
			texts: rapid.SliceOfN(rapid.SampledFrom([]string{"a", " b", `"`, "ü", "\n", "\\u12"}), 2, 12).Draw(t, "texts"), prompt: rapid.IntRange(0, 3).Draw(t, "prompt"),
			growth: rapid.SampledFrom([]Growth{Cumulative, Delta}).Draw(t, "growth"), ids: rapid.Bool().Draw(t, "ids only"), cached: 1,
			late: rapid.Bool().Draw(t, "late"),
		}
		want, legs, sofar := g.events(len(g.texts)), g, &Transcript{}
		var got []string
		for n := 0; n < len(g.texts); {
			next := rapid.IntRange(n+1, len(g.texts)).Draw(t, "up to")
			if n == 0 && next < len(g.texts) {
				next = max(2, next)
			}
			var continuation *Continuation
			if n > 0 {
				continuation = &Continuation{Head: sofar.Head, Prompt: g.prompt, Tokens: n, Last: sofar.Last, Grows: sofar.Grows}
			}
			kept := &Transcript{}
			legs.made = n
			got = append(got, relayed(t, legs.events(next), continuation, kept)...)
			sofar.Join(kept)
			require.False(t, sofar.Unread)
			require.Len(t, sofar.IDs, next)
			require.True(t, sofar.Exact())
			if g.late && next < len(g.texts) { // it is told there nevertheless, as the next engine does not know it
				want := strings.Replace(want[next-1], `"weight_version":"w"`, fmt.Sprintf(`"weight_version":"w","weight_versions":[{"version":"w","start":0,"end":%d}]`, next), 1)
				require.JSONEq(t, want, string(sofar.Last))
			} else {
				require.JSONEq(t, want[next-1], string(sofar.Last))
			}
			legs.cached, n = 7, next
		}
		require.Len(t, got, len(want))
		for i := range want {
			require.JSONEq(t, want[i], got[i])
		}
	})
}

// Each part of an answer is told with the weights that made it, also if an engine tells them at the
// end only.
func TestEachPartHasTheWeightsThatMadeIt(t *testing.T) {
	sofar, got := &Transcript{}, ""
	for i, version := range []string{"a", "b", "b", "c"} {
		g := grows{texts: strings.Split("abcdefgh", ""), growth: Cumulative, late: true, made: 2 * i}
		var events []string
		for _, e := range g.events(2*i + 2) {
			events = append(events, strings.ReplaceAll(e, `"w"`, `"`+version+`"`))
		}
		var continuation *Continuation
		if i > 0 {
			continuation = &Continuation{Head: sofar.Head, Tokens: 2 * i, Last: sofar.Last, Grows: sofar.Grows}
		}
		kept := &Transcript{}
		out := relayed(t, events, continuation, kept)
		sofar.Join(kept)
		got = out[len(out)-1]
	}
	require.Contains(t, got, `"weight_versions":[{"version":"a","start":0,"end":2},{"version":"b","start":2,"end":6},{"version":"c","start":6,"end":8}]`)
}

// Only its end tells which weights an engine has had. The end may be an abort, after which another
// engine goes on.
func TestWeightsAreToldByAnAbort(t *testing.T) {
	const event = `{"output_ids":[%s],"meta_info":{"id":"x","finish_reason":%s,"completion_tokens":%d,"weight_version":"b"%s}}`
	kept, sofar := &Transcript{}, &Transcript{}
	f := NewFilter(Options{Form: Generated, Choice: -1, Cached: OwnCached, Transcript: kept, Aborted: func() bool { return false }})
	for _, e := range []string{
		fmt.Sprintf(event, "1", "null", 1, ""), fmt.Sprintf(event, "1,2", "null", 2, ""),
		fmt.Sprintf(event, "1,2,3", `{"type":"abort","message":"Aborted","status_code":null}`, 3,
			`,"weight_versions":[{"version":"a","start":0,"end":1},{"version":"b","start":1,"end":3}]`),
	} {
		_, _ = f.Event(frames(t, "data: "+e+"\n\n")[0], nil)
	}
	sofar.Join(kept)
	next := fmt.Sprintf(event, "3", `{"type":"stop"}`, 1, `,"weight_versions":[{"version":"c","start":0,"end":1}]`)
	got := relayed(t, []string{next}, &Continuation{Head: sofar.Head, Tokens: 2, Last: sofar.Last, Grows: sofar.Grows}, &Transcript{})
	require.Contains(t, got[0], `"weight_versions":[{"version":"a","start":0,"end":1},{"version":"b","start":1,"end":2},{"version":"c","start":2,"end":3}]`)
}

// Nothing is joined to events of another kind.
func TestEventsThatDoNotFitAreNotJoined(t *testing.T) {
	for _, of := range []Growth{Cumulative, Delta} {
		g := grows{texts: strings.Split("abcdefgh", ""), growth: of}
		kept, sofar := &Transcript{}, &Transcript{}
		relayed(t, g.events(3), nil, kept)
		sofar.Join(kept)
		require.Equal(t, of, sofar.Grows)
		g.made, g.growth = 3, Cumulative+Delta-of
		f := NewFilter(Options{Form: Generated, Choice: -1, Cached: OwnCached, Transcript: &Transcript{},
			Continuation: &Continuation{Head: sofar.Head, Tokens: 3, Last: sofar.Last, Grows: of}})
		var last End
		for _, e := range g.events(5) {
			raw := []byte("data: " + e + "\n\n")
			_, last = f.Event(Event{Raw: raw, Data: raw[6 : len(raw)-2], Kind: KindData, dataAt: 6}, nil)
		}
		require.Equal(t, Broken, last)
		require.ErrorIs(t, f.Fault(), ErrOtherGrowth)
	}
}

// Spans that are no JSON are left out, in the answer of the engine before as in that of the next
// one.
func TestSpansOfWeightsThatAreNoJSON(t *testing.T) {
	const whole, torn = `[{"version":"a","start":0,"end":1}]`, `[{"version":"b","start":1,"end":2},,]`
	for _, spans := range [][2]string{{whole, torn}, {torn, whole}, {`[,]`, `[}`}} {
		last := `{"output_ids":[1],"meta_info":{"id":"x","completion_tokens":1,"weight_versions":` + spans[0] + `}}`
		next := `{"output_ids":[2],"meta_info":{"id":"x","completion_tokens":1,"weight_versions":` + spans[1] + `}}`
		continuation := &Continuation{Head: Head{ID: []byte(`"x"`)}, Tokens: 1, Last: []byte(last), Grows: Cumulative}
		got := relayed(t, []string{next}, continuation, &Transcript{})
		require.Len(t, got, 1)
		require.True(t, json.Valid([]byte(got[0])), got[0])
	}
}

// A text may lack a character whose tokens are there: nothing goes on behind it.
func TestWhenATextIsWhole(t *testing.T) {
	for _, row := range []struct {
		texts []string
		whole bool
	}{
		{[]string{"a", "b"}, true},
		{[]string{"a", ""}, false},            // nothing new, or a character that is not whole
		{[]string{"a", "", "c"}, true},        // it is by now
		{[]string{"a", "b "}, false},          // up to the space before such a character
		{[]string{"a", "好"}, false},           // a Chinese character may stand before one
		{[]string{"a", "ü"}, true},            // no other
		{[]string{"a", "b\n"}, true},          // a line that ends is flushed
		{[]string{"a", "b", "\u0001"}, false}, // written as an escape
	} {
		for _, of := range []Growth{Cumulative, Delta} {
			kept := &Transcript{}
			g := grows{texts: append(slices.Clone(row.texts), "end"), growth: of}
			relayed(t, g.events(len(row.texts)), nil, kept)
			require.Equal(t, row.whole, kept.Shown == len(kept.IDs), "%q", row.texts)
		}
	}
}

// What an engine counts wrongly is not gone on with.
func TestCountsThatDoNotFit(t *testing.T) {
	for name, events := range map[string][]string{
		"fewer ids than it says":  {`{"output_ids":[1],"meta_info":{"id":"x","completion_tokens":2,"prompt_tokens":1}}`},
		"no ids":                  {`{"text":"a","meta_info":{"id":"x","completion_tokens":1,"prompt_tokens":1}}`},
		"an id that is too large": {`{"output_ids":[4294967297],"meta_info":{"id":"x","completion_tokens":1,"prompt_tokens":1}}`},
		"no number":               {`{"output_ids":["a"],"meta_info":{"id":"x","completion_tokens":1,"prompt_tokens":1}}`},
		"first one, then another": {`{"output_ids":[1],"meta_info":{"id":"x","completion_tokens":1}}`, `{"output_ids":[1,2],"meta_info":{"id":"x","completion_tokens":2}}`, `{"output_ids":[3],"meta_info":{"id":"x","completion_tokens":3}}`},
	} {
		kept := &Transcript{}
		relayed(t, events, nil, kept)
		require.True(t, kept.Unread, name)
	}
}
