package lifecycle

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/mooncake"
	"evenkeel/sse"
)

// said is an answer of three tokens, the last of which had no text yet.
func said() *sse.Transcript {
	return &sse.Transcript{Head: sse.Head{ID: []byte(`"a"`)}, IDs: []int32{7, 8, 9}, Shown: 2, Text: []byte("ab"), Runes: 2, Content: true, Prompt: 2, Completed: 3}
}

func lost() *Loss {
	return &Loss{
		AnswerSoFar: said(), MayResume: true, Retention: KeepAll, Streamed: true, MayExtendPrompt: true,
		Method: mooncake.ResumePrompt, PromptIDs: json.RawMessage(`[1,2]`), PromptTokens: 2, MaxAnswerTokens: 100, TokenLimitKey: "max_tokens",
	}
}

func TestHowALostAnswerGoesOn(t *testing.T) {
	ids := func(method, list string, tokens int) *mooncake.Resume {
		return &mooncake.Resume{Method: method, IDs: json.RawMessage(list), Tokens: tokens}
	}
	text := func(method, text string, tokens int) *mooncake.Resume {
		return &mooncake.Resume{Method: method, Text: json.RawMessage(text), Tokens: tokens}
	}
	limited := ids(mooncake.ResumePrompt, "[1,2,7,8]", 2)
	limited.Limit, limited.LimitKey = 7, "max_tokens"
	for _, row := range []struct {
		name   string
		change func(*Loss)
		tier   Tier
		resume *mooncake.Resume
		tokens int // of the answer so far that are not made anew
	}{
		{"a completion goes on behind the tokens whose text is out", func(*Loss) {}, ByPrompt, ids(mooncake.ResumePrompt, "[1,2,7,8]", 2), 2},
		{"where the client is told of tokens, none is made anew", func(l *Loss) { l.TokensVisible, l.AnswerSoFar.Shown = true, 3 }, ByPrompt, ids(mooncake.ResumePrompt, "[1,2,7,8,9]", 3), 3},
		{"nor can it go on where the last one has no text yet", func(l *Loss) { l.TokensVisible = true }, Broken, nil, 0},
		{"but begin again, in one piece", func(l *Loss) { l.TokensVisible, l.Streamed = true, false }, Repeated, nil, 0},
		{"a chat goes on by its token ids", func(l *Loss) { l.Method = mooncake.ChatResumeVLLM }, ByIDs, ids(mooncake.ChatResumeVLLM, "[1,2,7,8]", 2), 2},
		{"a chat goes on by its text", func(l *Loss) { l.Method = mooncake.ChatResumeContinue }, ByText, text(mooncake.ChatResumeContinue, `"ab"`, 3), 3},
		{"a completion goes on by its text", func(l *Loss) { l.Method, l.PromptText = mooncake.ResumeText, []byte(`"once "`) }, ByText, text(mooncake.ResumeText, `"once ab"`, 3), 3},
		{"what the client allows is less by what it has", func(l *Loss) { l.TokenLimit, l.MaxAnswerTokens = 9, 9 }, ByPrompt, limited, 2},
		{"nothing is out", func(l *Loss) { l.AnswerSoFar = &sse.Transcript{Head: said().Head} }, Repeated, nil, 0},
		{"ids of tokens without text are out, and nobody was told", func(l *Loss) { l.AnswerSoFar.Content = false }, Repeated, nil, 0},
		{"an answer in one piece whose tokens are not known begins again", func(l *Loss) { l.Streamed, l.Method = false, "" }, Repeated, nil, 0},
		{"a stream whose tokens are not known breaks off", func(l *Loss) { l.Method = "" }, Broken, nil, 0},
		{"a token is missing", func(l *Loss) { l.AnswerSoFar.Completed = 4 }, Broken, nil, 0},
		{"the engines count different prompts", func(l *Loss) { l.AnswerSoFar.Prompt = 5 }, Broken, nil, 0},
		{"an event was not understood", func(l *Loss) { l.AnswerSoFar.Unread = true }, Broken, nil, 0},
		{"there was more than text", func(l *Loss) { l.AnswerSoFar.MoreThan = true }, Broken, nil, 0},
		{"tools and text", func(l *Loss) { l.Method, l.HasTools = mooncake.ChatResumeContinue, true }, Broken, nil, 0},
		{"tokens are told, and only text goes on", func(l *Loss) { l.Method, l.TokensVisible = mooncake.ChatResumeContinue, true }, Broken, nil, 0},
		{"something in the request hinders it", func(l *Loss) { l.MayExtendPrompt = false }, Broken, nil, 0},
		{"it was lost too often", func(l *Loss) { l.MayResume = false }, Broken, nil, 0},
		{"its body is gone", func(l *Loss) { l.Retention = KeepNothing }, Broken, nil, 0},
		{"only the body is kept, and text is out", func(l *Loss) { l.Retention = KeepStart }, Broken, nil, 0},
		{"only its end is missing", func(l *Loss) { l.Finished, l.Retention = true, KeepNothing }, Concluding, nil, 3},
		{"it has no token left", func(l *Loss) { l.MaxAnswerTokens, l.TokensVisible = 3, true }, Concluding, nil, 3},
		{"it has none left by a count that was guessed", func(l *Loss) {
			l.MaxAnswerTokens, l.Method, l.AnswerSoFar.Guessed = 3, mooncake.ChatResumeContinue, true
		}, ByText, text(mooncake.ChatResumeContinue, `"ab"`, 2), 2},
	} {
		t.Run(row.name, func(t *testing.T) {
			l := lost()
			row.change(l)
			before := *l.AnswerSoFar
			before.IDs = slices.Clone(before.IDs)
			p := l.Plan()
			require.Equal(t, row.tier, p.Tier)
			require.Equal(t, row.resume, p.Resume)
			require.Equal(t, before, *l.AnswerSoFar, "what was said stays as it is")
			if row.tier != Broken {
				require.Equal(t, row.tokens, p.AnswerSoFar.Completed)
			}
			require.Equal(t, row.tier == Repeated && !l.Streamed && l.AnswerSoFar.Content, p.ClientHasNothing)
		})
	}
}

// However an answer was lost: what goes on has as many tokens as engines are told to count, and no
// more than it may have.
func TestAPlanFitsWhatWasSaid(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l, is := lost(), func(name string) bool { return rapid.Bool().Draw(t, name) }
		n := rapid.IntRange(0, 5).Draw(t, "ids")
		l.AnswerSoFar.IDs, l.AnswerSoFar.Completed = make([]int32, n), rapid.IntRange(0, 5).Draw(t, "tokens")
		l.AnswerSoFar.Shown, l.AnswerSoFar.Content, l.AnswerSoFar.Prompt = rapid.IntRange(0, n).Draw(t, "shown"), is("content"),
			rapid.SampledFrom([]int{0, 2, 3}).Draw(t, "prompt")
		l.AnswerSoFar.Guessed, l.AnswerSoFar.Unread, l.AnswerSoFar.MoreThan = is("guessed"), is("unread"), is("more")
		l.Streamed, l.TokensVisible, l.MayExtendPrompt, l.HasTools, l.Finished, l.PromptText = is("streamed"), is("seen"), is("plain"), is("tools"), is("finished"), []byte(`""`)
		l.Method = rapid.SampledFrom([]string{"", mooncake.ResumePrompt, mooncake.ResumeText, mooncake.ChatResumeVLLM,
			mooncake.ChatResumeContinue}).Draw(t, "how")
		l.MaxAnswerTokens = rapid.IntRange(1, 6).Draw(t, "most")
		p := l.Plan()
		if p.Tier == Broken {
			require.Equal(t, Plan{Tier: Broken}, p, "nothing of it goes on")
			return
		}
		if p.Resume == nil {
			require.Zero(t, p.PrefillCount+p.DecodeCount)
			return
		}
		require.Less(t, p.AnswerSoFar.Completed, l.MaxAnswerTokens, "a token is left to compute")
		require.Equal(t, p.AnswerSoFar.Completed, p.Resume.Tokens)
		if p.Resume.IDs != nil {
			require.Equal(t, p.PrefillCount, mooncake.CountIDs(p.Resume.IDs), "the prefill engine counts what it is sent")
			require.GreaterOrEqual(t, p.AnswerSoFar.Completed, l.AnswerSoFar.Shown, "text that is out is not made anew")
		}
		require.NotNil(t, p.Continuation, "the client reads one answer")
		require.Equal(t, p.AnswerSoFar.Completed, p.Continuation.Tokens)
	})
}
