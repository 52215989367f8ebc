package refclient

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/reftext"
)

// Chat is the body of a chat request of one user message, with more members in front.
func Chat(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"messages":[{"role":"user","content":%q}]}`, more, Model, prompt)
}

// Talk is a chat of turns, the user's first.
func Talk(more string, turns ...string) string {
	var messages []string
	for i, text := range turns {
		messages = append(messages, fmt.Sprintf(`{"role":%q,"content":%q}`, [...]string{"user", "assistant"}[i%2], text))
	}
	return fmt.Sprintf(`{%s"model":%q,"messages":[%s]}`, more, Model, strings.Join(messages, ","))
}

// Completion is the body of a completion.
func Completion(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"prompt":%q}`, more, Model, prompt)
}

// Message is the body of a message to a prompt.
func Message(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"max_tokens":4000,"messages":[{"role":"user","content":%q}]}`, more, Model, prompt)
}

// Response is the body of a response to a prompt.
func Response(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"input":%q}`, more, Model, prompt)
}

// Events are the data of a stream's events.
func Events(t *testing.T, body string) (all []string) {
	t.Helper()
	body = strings.ReplaceAll(body, "\r\n", "\n")
	for event := range strings.SplitSeq(strings.TrimSuffix(body, "\n\n"), "\n\n") {
		for strings.HasPrefix(event, ":") { // a comment is a line of the event that follows
			_, event, _ = strings.Cut(event, "\n")
		}
		data, ok := strings.CutPrefix(event, "data: ")
		require.True(t, ok, "not an event: %q", event)
		all = append(all, data)
	}
	return all
}

// Answer is a stream put together.
type Answer struct {
	Text   map[int]string // by choice
	Finish map[int]string
	Usage  int // events with usage
	Fail   string
	Done   bool
}

// Whole says whether a choice came to its end.
func (a *Answer) Whole(choice int) bool { return a.Done && a.Fail == "" && a.Finish[choice] != "" }

// Read puts a stream together.
func Read(t *testing.T, body string) Answer {
	t.Helper()
	a := Answer{Text: map[int]string{}, Finish: map[int]string{}}
	for _, data := range Events(t, body) {
		require.False(t, a.Done, "an event after [DONE]: %s", data)
		if data == "[DONE]" {
			a.Done = true
			continue
		}
		var e struct {
			Choices []struct {
				Index  int
				Text   string
				Delta  struct{ Content string }
				Finish string `json:"finish_reason"`
			}
			Usage *struct{}
			Error *struct{ Message, Type, Code string }
		}
		require.NoError(t, json.Unmarshal([]byte(data), &e), data)
		if e.Error != nil {
			require.NotEmpty(t, e.Error.Message)
			a.Fail = e.Error.Code
		}
		if e.Usage != nil {
			a.Usage++
		}
		for _, c := range e.Choices {
			a.Text[c.Index] += c.Text + c.Delta.Content
			if c.Finish != "" {
				a.Finish[c.Index] = c.Finish
			}
		}
	}
	return a
}

// RightText fails unless text is the beginning of the answer to key.
func RightText(t *testing.T, key uint64, text string) (tokens int) {
	t.Helper()
	tokens, err := reftext.Check(key, 0, text)
	require.NoError(t, err)
	return tokens
}

// WholeText fails unless text is the whole answer to key.
func WholeText(t *testing.T, key uint64, text string) {
	t.Helper()
	require.Equal(t, reftext.NaturalLength(key), RightText(t, key, text))
}

// Whole are the texts of an answer that is not streamed.
func Whole(t *testing.T, body string) (texts []string) {
	t.Helper()
	var a struct {
		Choices []struct {
			Index   int
			Text    string
			Message struct{ Content string }
			Finish  string `json:"finish_reason"`
		}
	}
	require.NoError(t, json.Unmarshal([]byte(body), &a), body)
	for i, c := range a.Choices {
		require.Equal(t, i, c.Index)
		require.NotEmpty(t, c.Finish)
		texts = append(texts, c.Text+c.Message.Content)
	}
	return texts
}

// Failure reads OpenAI's error object and holds its shape.
func Failure(t *testing.T, r Reply) (code, param, kind string) {
	t.Helper()
	require.NoError(t, r.Err)
	require.Equal(t, "application/json", r.Header.Get("Content-Type"), r.Body)
	var e struct {
		Error struct {
			Message, Type, Code string
			Param               *string
		}
	}
	require.NoError(t, json.Unmarshal([]byte(r.Body), &e), r.Body)
	require.NotEmpty(t, e.Error.Message)
	if e.Error.Param != nil {
		param = *e.Error.Param
	}
	return e.Error.Code, param, e.Error.Type
}
