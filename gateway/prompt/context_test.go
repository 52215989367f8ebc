package prompt

import (
	"fmt"
	"strings"
	"testing"

	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"github.com/stretchr/testify/require"
)

// A request that no engine would serve is refused before it costs a prefill. The engine of these
// tests counts a token for two bytes of what it is asked, which are 25 more than the text.
func TestAPromptThatIsTooLongIsRefusedBeforeItsPrefill(t *testing.T) {
	text := strings.Repeat("a", 100)
	asks := func(most int, more string) string { return fmt.Sprintf(`{"model":"m"%s,"max_tokens":%d}`, more, most) }
	written, ids := fmt.Sprintf(`,"prompt":%q`, text), `,"prompt":[1,2,3,4,5,6,7,8,9,10]`
	said := func(content string) string { return `,"messages":[{"role":"user","content":` + content + `}]` }
	image := said(`[{"type":"text","text":"` + text + `"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]`)
	for _, c := range []struct {
		name  string
		ep    mooncake.Endpoint
		body  string
		model roster.Route
		asked int    // of the engine
		says  string // empty: it is let in
	}{
		{"nobody knows the context", mooncake.Completions, asks(999, written), roster.Route{}, 0, ""},
		{"no length is asked for", mooncake.Completions, `{"model":"m"` + written + `}`, roster.Route{MaxLen: 50}, 0, ""},
		{"the answer alone is longer", mooncake.Completions, asks(51, ids), roster.Route{MaxLen: 50}, 0,
			`the model's context is 50 tokens; "max_tokens" asks for 51`},
		{"even where engines cut", mooncake.Completions, asks(51, ids), roster.Route{MaxLen: 50, Clamps: true}, 0,
			`the model's context is 50 tokens; "max_tokens" asks for 51`},
		{"engines cut to fit", mooncake.Completions, asks(10, written), roster.Route{MaxLen: 71, Clamps: true}, 0, ""},
		{"token ids fit exactly", mooncake.Completions, asks(40, ids), roster.Route{MaxLen: 50}, 0, ""},
		{"token ids are one too many", mooncake.Completions, asks(41, ids), roster.Route{MaxLen: 50}, 0,
			`the model's context is 50 tokens; the prompt has 10 and "max_tokens" asks for 41 more`},
		{"the engine is asked to cut the prompt", mooncake.Completions, asks(45, ids+`,"truncate_prompt_tokens":4`),
			roster.Route{MaxLen: 50}, 0, ""},
		{"no more bytes than tokens fit", mooncake.Completions, asks(10, written), roster.Route{MaxLen: 112}, 0, ""},
		{"an engine counts, and it fits", mooncake.Chat, asks(10, said(`"`+text+text+`"`)), roster.Route{MaxLen: 160}, 1, ""},
		{"an engine counts, and it does not fit", mooncake.Completions, asks(10, written), roster.Route{MaxLen: 71}, 1,
			`the model's context is 71 tokens; the prompt has 62 and "max_tokens" asks for 10 more`},
		{"several answers to a prompt ask once", mooncake.Completions, asks(10, written+`,"n":3`), roster.Route{MaxLen: 111, Name: "refused"}, 1, ""},
		{"one of several prompts is too long", mooncake.Completions, asks(41, `,"prompt":[[1,2],[1,2,3,4,5,6,7,8,9,10]]`), roster.Route{MaxLen: 50}, 0,
			`the model's context is 50 tokens; the prompt has 10 and "max_tokens" asks for 41 more`},
		{"an image is counted by its engine", mooncake.Chat, asks(10, image), roster.Route{MaxLen: 50}, 0, ""},
		{"messages are counted by their engine", mooncake.Messages, asks(10, said(`"`+text+`"`)), roster.Route{MaxLen: 50}, 0, ""},
		{"nobody tells", mooncake.Completions, asks(10, written), roster.Route{MaxLen: 50, Name: "unknown"}, 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, e := newReader(t, nil)
			if c.model.Name == "refused" {
				e.status = 400
			}
			req, fail := openai.Parse(c.ep, []byte(c.body), openai.Limits{})
			require.Nil(t, fail, "%v", fail)
			if c.model.Name == "" {
				c.model.Name = "m"
			}
			fail = r.CheckBeforePrefill(c.model, req, req.Parts())
			require.Len(t, e.asked(), c.asked)
			if c.says == "" {
				require.Nil(t, fail, "%v", fail)
				return
			}
			require.Equal(t, &openai.Error{Status: 400, Code: "context_length_exceeded", Param: "max_tokens", Message: c.says}, fail)
		})
	}
}

// What an answer that goes on elsewhere has given already is a part of its prompt there.
func TestTheAnswerSoFarDoesNotCountTwice(t *testing.T) {
	req := &openai.Request{MaxTokens: 40, MaxTokensKey: "max_tokens"}
	require.Nil(t, CheckContext(roster.Route{MaxLen: 50}, req, 10, 0))
	require.NotNil(t, CheckContext(roster.Route{MaxLen: 50}, req, 11, 0))
	require.Nil(t, CheckContext(roster.Route{MaxLen: 50}, req, 11, 1))
	require.Nil(t, CheckContext(roster.Route{MaxLen: 50, Clamps: true}, req, 11, 0))
	require.Nil(t, CheckContext(roster.Route{}, req, 11, 0))
	require.Nil(t, CheckContext(roster.Route{MaxLen: 50}, &openai.Request{MaxTokens: 40}, 11, 0))
}

// A count that no model can have must not reach the accounts, nor overflow them.
func TestACountIsBelievedUpToTheContext(t *testing.T) {
	const most = int(^uint(0) >> 1)
	for _, c := range []struct {
		prompt, completion, context int
		want                        bool
	}{
		{60, 40, 100, true}, {60, 41, 100, false}, {101, 0, 100, false}, {0, 0, 100, true}, {-1, 5, 100, false}, {5, -1, 100, false},
		{most, most, 100, false}, {1, most, 0, false}, {maxTokensOfAnyModel, 0, 0, true}, {maxTokensOfAnyModel, 1, 0, false}, {1, 1, -7, true},
	} {
		require.Equal(t, c.want, PlausibleCounts(c.prompt, c.completion, c.context), "%+v", c)
	}
}

// A client's minute is charged before anybody has counted.
func TestAnEstimateIsExactForTokenIDs(t *testing.T) {
	for body, want := range map[string]int{
		`{"model":"m","prompt":"` + strings.Repeat("a", 398) + `"}`:                                      100, // with its quotes
		`{"model":"m","prompt":[1,2,3,4,5]}`:                                                             5,
		`{"model":"m","prompt":[1,2,3,4,5],"n":3}`:                                                       15,
		`{"model":"m","prompt":["` + strings.Repeat("a", 398) + `","` + strings.Repeat("b", 798) + `"]}`: 300,
	} {
		req, fail := openai.Parse(mooncake.Completions, []byte(body), openai.Limits{})
		require.Nil(t, fail, "%v", fail)
		require.Equal(t, want, AllTokens(req, req.Parts()), body)
	}
}
