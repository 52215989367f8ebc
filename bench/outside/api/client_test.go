package api

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
)

func ask(prompt string) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{Model: model, Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(prompt)}}
}

func TestChat(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	client := c.client()
	prompt := reftext.MakePrompt(1, 300)
	key := reftext.OfUser(prompt).Answer
	natural := reftext.NaturalLength(key)

	t.Run("not streamed", func(t *testing.T) {
		got, err := client.Chat.Completions.New(t.Context(), ask(prompt))
		require.NoError(t, err)
		require.Len(t, got.Choices, 1)
		wholeText(t, key, got.Choices[0].Message.Content)
		require.Equal(t, "stop", got.Choices[0].FinishReason)
		require.Equal(t, "chat.completion", string(got.Object))
		require.Equal(t, model, got.Model)
		require.EqualValues(t, 300, got.Usage.PromptTokens)
		require.EqualValues(t, natural, got.Usage.CompletionTokens)
		require.EqualValues(t, 300+natural, got.Usage.TotalTokens)
	})

	t.Run("streamed, and no usage leaks out", func(t *testing.T) {
		stream := client.Chat.Completions.NewStreaming(t.Context(), ask(prompt))
		var acc openai.ChatCompletionAccumulator
		for stream.Next() {
			chunk := stream.Current()
			require.False(t, chunk.JSON.Usage.Valid(), chunk.RawJSON())
			require.NotContains(t, chunk.RawJSON(), "token_ids")
			require.NotContains(t, chunk.RawJSON(), "kv_transfer_params")
			require.Len(t, chunk.Choices, 1)
			acc.AddChunk(chunk)
		}
		require.NoError(t, stream.Err())
		wholeText(t, key, acc.Choices[0].Message.Content)
		require.Equal(t, "stop", acc.Choices[0].FinishReason)
	})

	t.Run("streamed with include_usage: once, at the end, with the prefill engine's cached_tokens", func(t *testing.T) {
		p := ask(prompt)
		p.StreamOptions = openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)}
		stream := client.Chat.Completions.NewStreaming(t.Context(), p)
		var last openai.ChatCompletionChunk
		usages := 0
		for stream.Next() {
			last = stream.Current()
			if last.JSON.Usage.Valid() {
				usages++
			}
		}
		require.NoError(t, stream.Err())
		require.Equal(t, 1, usages)
		require.Empty(t, last.Choices)
		require.EqualValues(t, 300, last.Usage.PromptTokens)
		require.EqualValues(t, natural, last.Usage.CompletionTokens)
		require.EqualValues(t, 256, last.Usage.PromptTokensDetails.CachedTokens,
			"two blocks that the first request left in prefill's prefix cache")
	})

	t.Run("max_completion_tokens", func(t *testing.T) {
		p := ask(prompt)
		p.MaxCompletionTokens = openai.Int(5)
		got, err := client.Chat.Completions.New(t.Context(), p)
		require.NoError(t, err)
		require.Equal(t, reftext.Text(key, 5), got.Choices[0].Message.Content)
		require.Equal(t, "length", got.Choices[0].FinishReason)
	})

	t.Run("logprobs", func(t *testing.T) {
		p := ask(prompt)
		p.MaxTokens, p.Logprobs, p.TopLogprobs = openai.Int(7), openai.Bool(true), openai.Int(2)
		got, err := client.Chat.Completions.New(t.Context(), p)
		require.NoError(t, err)
		require.Len(t, got.Choices[0].Logprobs.Content, 7)
		var text string
		for _, token := range got.Choices[0].Logprobs.Content {
			require.Len(t, token.TopLogprobs, 2)
			text += token.Token
		}
		require.Equal(t, reftext.Text(key, 7), text)

		stream := client.Chat.Completions.NewStreaming(t.Context(), p)
		streamed := 0
		for stream.Next() {
			for _, choice := range stream.Current().Choices {
				streamed += len(choice.Logprobs.Content)
			}
		}
		require.NoError(t, stream.Err())
		require.Equal(t, 7, streamed)
	})

	t.Run("extra members reach the client: token ids that it asked for", func(t *testing.T) {
		var raw map[string]json.RawMessage
		err := client.Post(t.Context(), "chat/completions", ask(prompt), &raw, option.WithJSONSet("return_token_ids", true))
		require.NoError(t, err)
		require.Contains(t, raw, "prompt_token_ids")
		require.Contains(t, string(raw["choices"]), `"token_ids":[`)
	})
}

func TestTools(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	p := ask(reftext.MakePrompt(2, 40))
	p.Tools = []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(openai.FunctionDefinitionParam{
		Name:       "look_up",
		Parameters: openai.FunctionParameters{"type": "object", "properties": map[string]any{"text": map[string]any{"type": "string"}}},
	})}
	p.ToolChoice = openai.ToolChoiceOptionFunctionToolChoice(openai.ChatCompletionNamedToolChoiceFunctionParam{Name: "look_up"})
	body, err := json.Marshal(p)
	require.NoError(t, err)
	prompt, err := reftext.Render(true, body)
	require.NoError(t, err)
	want := reftext.ToolArguments(prompt.Answer, reftext.NaturalLength(prompt.Answer))

	client := c.client()
	got, err := client.Chat.Completions.New(t.Context(), p)
	require.NoError(t, err)
	message := got.Choices[0].Message
	require.Equal(t, "tool_calls", got.Choices[0].FinishReason)
	require.Len(t, message.ToolCalls, 1)
	require.Equal(t, "look_up", message.ToolCalls[0].Function.Name)
	require.Equal(t, want, message.ToolCalls[0].Function.Arguments)
	require.NotEmpty(t, message.ToolCalls[0].ID)
	require.Empty(t, message.Content, "as its engine says it: %s", message.RawJSON())

	stream := client.Chat.Completions.NewStreaming(t.Context(), p)
	var acc openai.ChatCompletionAccumulator
	for stream.Next() {
		acc.AddChunk(stream.Current())
	}
	require.NoError(t, stream.Err())
	require.Equal(t, want, acc.Choices[0].Message.ToolCalls[0].Function.Arguments)
	require.Equal(t, "tool_calls", acc.Choices[0].FinishReason)
}

func TestCompletions(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	client := c.client()
	prompt := reftext.MakePrompt(3, 100)
	key := reftext.Of(prompt).Answer
	ask := func() openai.CompletionNewParams {
		return openai.CompletionNewParams{Model: model, Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String(prompt)}}
	}

	t.Run("without max_tokens it has 16", func(t *testing.T) {
		got, err := client.Completions.New(t.Context(), ask())
		require.NoError(t, err)
		n := min(16, reftext.NaturalLength(key))
		require.Equal(t, reftext.Text(key, n), got.Choices[0].Text)
		require.EqualValues(t, n, got.Usage.CompletionTokens)
	})

	t.Run("streamed", func(t *testing.T) {
		p := ask()
		p.MaxTokens = openai.Int(1000)
		stream := client.Completions.NewStreaming(t.Context(), p)
		var text, finish string
		for stream.Next() {
			for _, choice := range stream.Current().Choices {
				text += choice.Text
				finish += string(choice.FinishReason)
			}
		}
		require.NoError(t, stream.Err())
		wholeText(t, key, text)
		require.Equal(t, "stop", finish)
	})

	t.Run("logprobs", func(t *testing.T) {
		p := ask()
		p.MaxTokens, p.Logprobs = openai.Int(6), openai.Int(1)
		got, err := client.Completions.New(t.Context(), p)
		require.NoError(t, err)
		require.Len(t, got.Choices[0].Logprobs.Tokens, 6)
		require.Equal(t, reftext.Text(key, 6), strings.Join(got.Choices[0].Logprobs.Tokens, ""))
		require.Len(t, got.Choices[0].Logprobs.TextOffset, 6)
	})

	t.Run("echo with logprobs is the engine's own answer", func(t *testing.T) {
		p := ask()
		p.MaxTokens, p.Logprobs, p.Echo = openai.Int(6), openai.Int(1), openai.Bool(true)
		// its decode engines compute such a prompt by themselves
		version := []refengine.Config{{Version: "0.32.0", Answers: refengine.Answers{PromptTokensDetails: true}}}
		c := start(t, options{connector: refengine.NIXLPull, prefill: slices.Clone(version), decode: version})
		client := c.client()
		got, err := client.Completions.New(t.Context(), p)
		require.NoError(t, err)
		require.Equal(t, prompt+reftext.Text(key, 6), got.Choices[0].Text)
		require.EqualValues(t, 6, got.Usage.CompletionTokens)
		require.Zero(t, got.Usage.PromptTokensDetails.CachedTokens, "the decode engine counts what it pulled; prefill had nothing cached")
	})

	t.Run("a list of strings", func(t *testing.T) {
		prompts := []string{reftext.MakePrompt(4, 20), reftext.MakePrompt(5, 30), reftext.MakePrompt(6, 40)}
		p := ask()
		p.Prompt = openai.CompletionNewParamsPromptUnion{OfArrayOfStrings: prompts}
		p.MaxTokens = openai.Int(1000)
		got, err := client.Completions.New(t.Context(), p)
		require.NoError(t, err)
		require.Len(t, got.Choices, 3)
		total := 0
		for i, choice := range got.Choices {
			require.EqualValues(t, i, choice.Index)
			wholeText(t, reftext.Of(prompts[i]).Answer, choice.Text)
			total += reftext.NaturalLength(reftext.Of(prompts[i]).Answer)
		}
		require.EqualValues(t, 90, got.Usage.PromptTokens)
		require.EqualValues(t, total, got.Usage.CompletionTokens)
	})

	t.Run("lists of token ids, two answers each, streamed", func(t *testing.T) {
		prompts := [][]int64{{1, 2, 3}, {7, 8, 9, 10}}
		p := ask()
		p.Prompt = openai.CompletionNewParamsPromptUnion{OfArrayOfTokenArrays: prompts}
		p.N, p.MaxTokens, p.Seed = openai.Int(2), openai.Int(1000), openai.Int(40)
		p.StreamOptions = openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)}
		stream := client.Completions.NewStreaming(t.Context(), p)
		text, id := map[int64]string{}, ""
		var last openai.Completion
		for stream.Next() {
			last = stream.Current()
			require.True(t, id == "" || id == last.ID, "one answer has one id")
			id = last.ID
			for _, choice := range last.Choices {
				text[choice.Index] += choice.Text
			}
		}
		require.NoError(t, stream.Err())
		require.Len(t, text, 4)
		total := 0
		for i := range int64(4) {
			ids := make([]int32, 0, 4)
			for _, id := range prompts[i/2] {
				ids = append(ids, int32(id))
			}
			seed := 40 + i%2
			key := reftext.OfIDs(ids, &seed).Answer
			wholeText(t, key, text[i])
			total += reftext.NaturalLength(key)
		}
		require.EqualValues(t, 7, last.Usage.PromptTokens, "every prompt once")
		require.EqualValues(t, total, last.Usage.CompletionTokens)
	})

	t.Run("a flat list of token ids is one prompt", func(t *testing.T) {
		p := ask()
		p.Prompt = openai.CompletionNewParamsPromptUnion{OfArrayOfTokens: []int64{5, 6, 7}}
		p.MaxTokens = openai.Int(1000)
		got, err := client.Completions.New(t.Context(), p)
		require.NoError(t, err)
		wholeText(t, reftext.OfIDs([]int32{5, 6, 7}, nil).Answer, got.Choices[0].Text)
	})
}

func TestSeveralAnswers(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	client := c.client()
	prompt := reftext.MakePrompt(9, 60)
	p := ask(prompt)
	p.N, p.Seed = openai.Int(3), openai.Int(100)
	keys := make([]uint64, 3)
	total := 0
	for i := range keys {
		body, err := json.Marshal(map[string]any{"messages": p.Messages, "seed": 100 + i})
		require.NoError(t, err)
		rendered, err := reftext.Render(true, body)
		require.NoError(t, err)
		keys[i] = rendered.Answer
		total += reftext.NaturalLength(keys[i])
	}

	got, err := client.Chat.Completions.New(t.Context(), p)
	require.NoError(t, err)
	require.Len(t, got.Choices, 3)
	for i, choice := range got.Choices {
		require.EqualValues(t, i, choice.Index)
		wholeText(t, keys[i], choice.Message.Content)
	}
	require.EqualValues(t, 60, got.Usage.PromptTokens)
	require.EqualValues(t, total, got.Usage.CompletionTokens)

	for _, usage := range []bool{false, true} {
		p.StreamOptions.IncludeUsage = param.NewOpt(usage)
		stream := client.Chat.Completions.NewStreaming(t.Context(), p)
		var acc openai.ChatCompletionAccumulator
		usages := 0
		for stream.Next() {
			if stream.Current().JSON.Usage.Valid() {
				usages++
			}
			require.True(t, acc.AddChunk(stream.Current()), "all chunks belong to one answer")
		}
		require.NoError(t, stream.Err())
		require.Len(t, acc.Choices, 3)
		for i, choice := range acc.Choices {
			wholeText(t, keys[i], choice.Message.Content)
			require.Equal(t, "stop", choice.FinishReason)
		}
		if usage {
			require.Equal(t, 1, usages)
			require.EqualValues(t, total, acc.Usage.CompletionTokens)
		} else {
			require.Zero(t, usages)
		}
	}
	c.settled()
	require.Equal(t, []string{"ok", "ok", "ok"}, c.outcomes(), "one line a client's request, not one a leg")
}

func TestAbortInTheMiddle(t *testing.T) {
	t.Parallel()
	for name, n := range map[string]int64{"one answer": 1, "three": 3} {
		t.Run(name, func(t *testing.T) {
			c := start(t, options{decode: []refengine.Config{{DPSize: 2}}})
			client := c.client()
			p := ask("a long story")
			p.N = openai.Int(n)
			ctx, cancel := context.WithCancel(t.Context())
			stream := client.Chat.Completions.NewStreaming(ctx, p, option.WithJSONSet("ignore_eos", true))
			require.True(t, stream.Next())
			c.eventually("the engine runs it", func() bool { return c.decode[0].Stats().Running == n })
			cancel()
			c.eventually("the engine notices", func() bool { return c.decode[0].Stats().Running == 0 })
			require.NoError(t, stream.Close())
			c.settled()
			require.Equal(t, []string{"client_closed"}, c.outcomes())
		})
	}
}

func TestTheClientAsksForAModel(t *testing.T) {
	t.Parallel()
	c := start(t, options{prefill: []refengine.Config{{Model: refengine.Model{Name: "org/ref"}}},
		decode: []refengine.Config{{Model: refengine.Model{Name: "org/ref"}}}})
	client := c.client()
	m, err := client.Models.Get(t.Context(), "org/ref")
	require.NoError(t, err)
	require.Equal(t, "org/ref", m.ID)
}

func TestErrorsAsTheClientSeesThem(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	client := c.client()
	for name, row := range map[string]struct {
		change func(*openai.ChatCompletionNewParams)
		status int
		code   string
		param  string
	}{
		"a model nobody serves":  {func(p *openai.ChatCompletionNewParams) { p.Model = "gpt-9" }, 404, "model_not_found", "model"},
		"too many answers":       {func(p *openai.ChatCompletionNewParams) { p.N = openai.Int(9) }, 400, "invalid_value", "n"},
		"no messages":            {func(p *openai.ChatCompletionNewParams) { p.Messages = nil }, 400, "missing_required_parameter", "messages"},
		"more than the context":  {func(p *openai.ChatCompletionNewParams) { p.MaxTokens = openai.Int(1 << 20) }, 400, "context_length_exceeded", "max_tokens"},
		"top_logprobs by itself": {func(p *openai.ChatCompletionNewParams) { p.TopLogprobs = openai.Int(2) }, 400, "invalid_value", "top_logprobs"},
	} {
		t.Run(name, func(t *testing.T) {
			p := ask("hello")
			row.change(&p)
			_, err := client.Chat.Completions.New(t.Context(), p)
			var e *openai.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, row.status, e.StatusCode)
			require.Equal(t, row.code, e.Code)
			require.Equal(t, row.param, e.Param)
			require.Equal(t, "invalid_request_error", e.Type)
			require.NotEmpty(t, e.Message)

			stream := client.Chat.Completions.NewStreaming(t.Context(), p)
			require.False(t, stream.Next())
			require.True(t, errors.As(stream.Err(), &e), "before the stream began: %v", stream.Err())
			require.Equal(t, row.status, e.StatusCode)
		})
	}
}
