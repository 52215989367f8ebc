package gateway_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
)

// seamless is what a client reads of an answer's parts.
type seamless struct {
	text     string
	finishes []string
	fail     string
}

func readSeamless(t *testing.T, body string) *seamless {
	t.Helper()
	s := &seamless{}
	all := []string{strings.TrimSpace(body)}
	if !strings.HasPrefix(body, "{") {
		all = events(t, body)
		require.Equal(t, "[DONE]", all[len(all)-1], body)
		require.Equal(t, 1, strings.Count(body, "[DONE]"))
		all = all[:len(all)-1]
	}
	for _, data := range all {
		require.NotContains(t, data, "recomputed\"")
		var e struct {
			Choices []struct {
				Text           string
				Delta, Message struct{ Content string }
				Finish         string `json:"finish_reason"`
			}
			Error *struct{ Code string }
		}
		require.NoError(t, json.Unmarshal([]byte(data), &e), data)
		if e.Error != nil {
			s.fail = e.Error.Code
			continue
		}
		for _, c := range e.Choices {
			s.text += c.Text + c.Delta.Content + c.Message.Content
			if c.Finish != "" {
				s.finishes = append(s.finishes, c.Finish)
			}
		}
	}
	return s
}

// slow keeps the answer's beginning from coming in one read, before which all
// begins anew; halting, all of it.
var (
	slow    = refengine.Rule{Fault: refengine.Slow, DelayMS: 120, Tokens: 6, Leg: refengine.LegDecode}
	halting = refengine.Rule{Fault: refengine.Slow, DelayMS: 250, Leg: refengine.LegDecode}
)
