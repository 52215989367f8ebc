package request

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/mooncake"
)

// At the deadline of a drain what still runs goes on elsewhere where it can; where not, it ends
// with an error event.
func TestTheDeadlineOfADrain(t *testing.T) {
	t.Parallel()
	const story = "a long story"
	for _, row := range []struct{ name, body, fail string }{
		{"a completion goes on", completion(story, `"stream":true,"max_tokens":300,`), ""},
		{"one that is not streamed begins anew", completion(story, `"max_tokens":300,`), ""},
		{"a chat that has a way to go on does", chat(story, `"stream":true,"max_tokens":300,`), ""},
		{"a fan-out goes on", completion(story, `"stream":true,"n":2,"max_tokens":300,`), ""},
		{"an answer with tools ends", chat(story, `"stream":true,"max_tokens":300,"logprobs":true,`), "engine_drained"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{
				decode: []refengine.Config{{Steps: refengine.Steps{C0: 500 * time.Millisecond}}, {}}, waits: true,
				profile: mooncake.Profile{ChatResume: mooncake.ChatResumeContinue},
			})
			b.only(0)
			path, key := mooncake.Completions.Path(), reftext.Of(story).Key
			if strings.Contains(row.body, "messages") {
				path, key = mooncake.Chat.Path(), reftext.OfUser(story).Answer
			}
			legs, got := 1+strings.Count(row.body, `"n":2`), make(chan reply, 1)
			go func() { defer close(got); got <- b.post(path, row.body) }()
			b.eventually("it is decoded", func() bool { return b.begun() == legs })
			b.only(1)
			require.Equal(t, legs, b.move("decode d0"))
			r := <-got
			require.Equal(t, http.StatusOK, r.status, r.body)
			s := readSeamless(t, r)
			b.clean()
			require.Equal(t, row.fail, s.fail)
			require.EqualValues(t, 1, b.metric(t, "evenkeel_requests_total", map[bool]string{true: "ok", false: row.fail}[row.fail == ""]))
			if row.fail != "" {
				return
			}
			require.EqualValues(t, legs, b.d[1].Stats().Decodes)
			require.Len(t, s.finishes, legs)
			if legs == 1 {
				require.Equal(t, min(300, reftext.NaturalLength(key)), right(t, key, s.texts[0]))
			}
		})
	}
}
