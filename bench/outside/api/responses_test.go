package api

import (
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/responses"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
)

func TestResponses(t *testing.T) {
	t.Parallel()
	c := start(t, options{connector: refengine.NIXLPull})
	client := c.client()
	prompt := reftext.MakePrompt(1, 300)
	key := reftext.OfUser(prompt).Answer
	natural := reftext.NaturalLength(key)
	ask := func() responses.ResponseNewParams {
		return responses.ResponseNewParams{Model: model, Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(prompt)}}
	}
	t.Run("not streamed", func(t *testing.T) {
		got, err := client.Responses.New(t.Context(), ask())
		require.NoError(t, err)
		require.Equal(t, "completed", string(got.Status))
		wholeText(t, key, got.OutputText())
		require.EqualValues(t, 300, got.Usage.InputTokens)
		require.EqualValues(t, natural, got.Usage.OutputTokens)
		require.NotContains(t, got.RawJSON(), "kv_transfer_params")
	})
	t.Run("streamed", func(t *testing.T) {
		stream := client.Responses.NewStreaming(t.Context(), ask())
		text, whole := "", ""
		for stream.Next() {
			switch e := stream.Current().AsAny().(type) {
			case responses.ResponseTextDeltaEvent:
				text += e.Delta
			case responses.ResponseCompletedEvent:
				whole = e.Response.OutputText()
			}
		}
		require.NoError(t, stream.Err())
		wholeText(t, key, text)
		require.Equal(t, text, whole)
	})
	t.Run("an answer that is cut says so", func(t *testing.T) {
		p := ask()
		p.MaxOutputTokens = openai.Int(5)
		got, err := client.Responses.New(t.Context(), p)
		require.NoError(t, err)
		require.Equal(t, "incomplete", string(got.Status))
		require.Equal(t, reftext.Text(key, 5), got.OutputText())
	})
	t.Run("tools", func(t *testing.T) {
		p := ask()
		p.Tools = []responses.ToolUnionParam{{OfFunction: &responses.FunctionToolParam{Name: "look_up", Strict: openai.Bool(false),
			Parameters: map[string]any{"type": "object"}}}}
		p.ToolChoice = responses.ResponseNewParamsToolChoiceUnion{OfFunctionTool: &responses.ToolChoiceFunctionParam{Name: "look_up"}}
		got, err := client.Responses.New(t.Context(), p)
		require.NoError(t, err)
		require.Equal(t, "look_up", got.Output[0].Name)
		want := got.Output[0].Arguments.OfString
		require.NotEmpty(t, want)
		stream := client.Responses.NewStreaming(t.Context(), p)
		args := ""
		for stream.Next() {
			if e, ok := stream.Current().AsAny().(responses.ResponseFunctionCallArgumentsDeltaEvent); ok {
				args += e.Delta
			}
		}
		require.NoError(t, stream.Err())
		require.Equal(t, want, args)
	})
}

func TestResponsesOfSGLang(t *testing.T) {
	t.Parallel()
	c := start(t, options{connector: refengine.SGLang,
		decode: []refengine.Config{{DPSize: 2, DPMode: "internal", Answers: refengine.Answers{PromptTokensDetails: true}}}})
	client := c.client()
	prompt := reftext.MakePrompt(1, 300)
	key := reftext.OfUser(prompt).Answer
	natural := reftext.NaturalLength(key)
	ask := func() responses.ResponseNewParams {
		return responses.ResponseNewParams{Model: model, Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(prompt)}}
	}
	streamed := func(t *testing.T, p responses.ResponseNewParams) (text, args string, last responses.Response) {
		stream := client.Responses.NewStreaming(t.Context(), p)
		for stream.Next() {
			switch e := stream.Current().AsAny().(type) {
			case responses.ResponseTextDeltaEvent:
				text += e.Delta
			case responses.ResponseFunctionCallArgumentsDeltaEvent:
				args += e.Delta
			case responses.ResponseCompletedEvent:
				last = e.Response
			case responses.ResponseIncompleteEvent:
				last = e.Response
			}
		}
		require.NoError(t, stream.Err())
		return text, args, last
	}
	t.Run("not streamed", func(t *testing.T) {
		got, err := client.Responses.New(t.Context(), ask())
		require.NoError(t, err)
		require.Equal(t, "completed", string(got.Status))
		wholeText(t, key, got.OutputText())
		require.EqualValues(t, 300, got.Usage.InputTokens)
		require.EqualValues(t, natural, got.Usage.OutputTokens)
	})
	t.Run("streamed", func(t *testing.T) {
		text, _, last := streamed(t, ask())
		wholeText(t, key, text)
		require.Equal(t, text, last.OutputText())
	})
	t.Run("an answer that is cut says so", func(t *testing.T) {
		p := ask()
		p.MaxOutputTokens = openai.Int(7)
		text, _, last := streamed(t, p)
		require.Equal(t, "incomplete", string(last.Status))
		require.Equal(t, reftext.Text(key, 5), text, "SGLang keeps two tokens back")
		got, err := client.Responses.New(t.Context(), p)
		require.NoError(t, err)
		require.Equal(t, text, got.OutputText())
	})
	t.Run("tools", func(t *testing.T) {
		p := ask()
		p.Tools = []responses.ToolUnionParam{{OfFunction: &responses.FunctionToolParam{Name: "look_up", Strict: openai.Bool(false),
			Parameters: map[string]any{"type": "object"}}}}
		text, _, last := streamed(t, p)
		require.NotEmpty(t, text)
		require.Equal(t, text, last.OutputText(), "which comes in one event")
		p.ToolChoice = responses.ResponseNewParamsToolChoiceUnion{OfFunctionTool: &responses.ToolChoiceFunctionParam{Name: "look_up"}}
		got, err := client.Responses.New(t.Context(), p)
		require.NoError(t, err)
		require.Equal(t, "look_up", got.Output[0].Name)
		_, args, _ := streamed(t, p)
		require.NotEmpty(t, args)
		require.Equal(t, got.Output[0].Arguments.OfString, args)
	})
}
