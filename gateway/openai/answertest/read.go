// Package answertest reads answers of /v1/messages and /v1/responses as clients do, for the tests
// of other packages.
package answertest

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Spent is the usage in an answer of Anthropic's API, in tokens.
type Spent struct {
	Input  int `json:"input_tokens"`
	Output int `json:"output_tokens"`
	Cached int `json:"cache_read_input_tokens"`
}

// Message is an answer in one piece, or the sum of a stream's events.
type Message struct {
	ID, Type, Role, Model string
	Stop                  string `json:"stop_reason"`
	Usage                 Spent
	Content               []struct {
		Type, Text, Thinking, Name, ID string
		Input                          json.RawMessage
	}
	First Spent    `json:"-"` // the usage in message_start
	Args  string   `json:"-"` // the arguments of all tool calls
	Kinds []string `json:"-"`
	Fail  string   `json:"-"` // type of the error event; empty: the stream has none
}

// Text joins the text of all blocks.
func (m Message) Text() (text string) {
	for _, block := range m.Content {
		text += block.Text
	}
	return text
}

// blocks returns the events of a stream, without comments.
func blocks(t *testing.T, body string) (all []string) {
	t.Helper()
	body = strings.ReplaceAll(body, "\r\n", "\n")
	require.True(t, strings.HasSuffix(body, "\n\n"), "it ends behind an event: %q", body)
	require.NotContains(t, body, "[DONE]")
	require.NotContains(t, body, "kv_transfer_params")
	for block := range strings.SplitSeq(strings.TrimSuffix(body, "\n\n"), "\n\n") {
		for strings.HasPrefix(block, ":") { // a line that begins with a colon is a comment
			_, block, _ = strings.Cut(block, "\n")
		}
		if block != "" {
			all = append(all, block)
		}
	}
	return all
}

// ReadMessage joins the events of a stream of /v1/messages. The test fails if the stream lacks what
// Anthropic's clients rely on.
func ReadMessage(t *testing.T, body string) (got Message) {
	t.Helper()
	for _, block := range blocks(t, body) {
		head, data, ok := strings.Cut(block, "\ndata: ")
		require.True(t, ok, block)
		var e struct {
			Type    string
			Index   int
			Message json.RawMessage
			Block   json.RawMessage `json:"content_block"`
			Delta   struct {
				Type, Text, Thinking string
				JSON                 string  `json:"partial_json"`
				Stop                 *string `json:"stop_reason"`
			}
			Usage Spent
			Error struct{ Type, Message string }
		}
		require.NoError(t, json.Unmarshal([]byte(data), &e), data)
		require.Equal(t, "event: "+e.Type, head)
		require.Equal(t, len(got.Kinds) == 0, e.Type == "message_start" || e.Type == "error" && len(got.Kinds) == 0, "%s stands first, and once",
			block)
		got.Kinds = append(got.Kinds, e.Type)
		switch e.Type {
		case "message_start":
			require.NoError(t, json.Unmarshal(e.Message, &got))
			got.First = got.Usage
		case "content_block_start":
			require.Len(t, got.Content, e.Index)
			got.Content = slices.Grow(got.Content, 1)[:e.Index+1]
			require.NoError(t, json.Unmarshal(e.Block, &got.Content[e.Index]))
		case "content_block_delta":
			got.Content[e.Index].Text += e.Delta.Text
			got.Content[e.Index].Thinking += e.Delta.Thinking
			got.Args += e.Delta.JSON
		case "message_delta":
			require.NotNil(t, e.Delta.Stop)
			got.Stop, got.Usage = *e.Delta.Stop, e.Usage
		case "error":
			got.Fail = e.Error.Type
			require.NotEmpty(t, e.Error.Message)
		}
	}
	ends := func(kind string) bool { return kind == "message_stop" || kind == "error" }
	require.True(t, ends(got.Kinds[len(got.Kinds)-1]), "an end that says how it ended: %v", got.Kinds)
	require.Len(t, slices.DeleteFunc(slices.Clone(got.Kinds), func(kind string) bool { return !ends(kind) }), 1)
	return got
}

// ReadWholeMessage reads an answer of /v1/messages that is not a stream.
func ReadWholeMessage(t *testing.T, body string) (got Message) {
	t.Helper()
	require.NotContains(t, body, "kv_transfer_params")
	require.NoError(t, json.Unmarshal([]byte(body), &got), body)
	require.Equal(t, "message", got.Type)
	require.Equal(t, "assistant", got.Role)
	return got
}

// Refused reads an error in Anthropic's shape, and returns its type and its message.
func Refused(t *testing.T, body string) (kind, says string) {
	t.Helper()
	var got struct {
		Type  string
		Error struct{ Type, Message string }
	}
	require.NoError(t, json.Unmarshal([]byte(body), &got), body)
	require.Equal(t, "error", got.Type, body)
	require.NotEmpty(t, got.Error.Message)
	return got.Error.Type, got.Error.Message
}

// Response is the sum of the events of a stream of /v1/responses.
type Response struct {
	Text, Args string
	Kinds      []string
	Last       struct {
		Status string
		Model  string
		Output []struct {
			Type, Name, Arguments string
			Content               []struct{ Text string }
		}
		Usage struct {
			Input   int `json:"input_tokens"`
			Output  int `json:"output_tokens"`
			Details struct {
				Cached  int   `json:"cached_tokens"`
				PerTurn []int `json:"cached_tokens_per_turn"`
			} `json:"input_tokens_details"`
		}
	}
	Fail string // code of the error event; empty: the stream has none
}

// ReadResponse joins the events of a stream of /v1/responses. The test fails if the stream lacks
// what clients rely on.
func ReadResponse(t *testing.T, body string) (got Response) {
	t.Helper()
	for _, block := range blocks(t, body) {
		head, data, ok := strings.Cut(block, "\ndata: ")
		require.True(t, ok, block)
		var e struct {
			Type, Delta, Code string
			Sequence          int `json:"sequence_number"`
			Response          json.RawMessage
		}
		require.NoError(t, json.Unmarshal([]byte(data), &e), data)
		require.Equal(t, "event: "+e.Type, head)
		require.Equal(t, len(got.Kinds), e.Sequence, block)
		got.Kinds = append(got.Kinds, e.Type)
		switch e.Type {
		case "response.output_text.delta":
			got.Text += e.Delta
		case "response.function_call_arguments.delta":
			got.Args += e.Delta
		case "response.completed", "response.incomplete":
			require.NoError(t, json.Unmarshal(e.Response, &got.Last))
		case "error":
			got.Fail = e.Code
			require.NotEmpty(t, e.Code)
		}
	}
	ends := got.Kinds[len(got.Kinds)-1]
	last := []string{"response.completed", "response.incomplete", "error"}
	require.Contains(t, last, ends, "an end that says how it ended")
	require.Equal(t, 1, len(slices.DeleteFunc(slices.Clone(got.Kinds), func(k string) bool { return !slices.Contains(last, k) })), "%v",
		got.Kinds)
	return got
}
