package gateway_test

import (
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/internal/race"
	"evenkeel/mooncake"
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

// A decode engine dies under 200 streams. All go on, to the last token.
func TestADecodeEngineDiesUnderManyStreams(t *testing.T) {
	t.Parallel()
	// What the one that dies has begun is far from its end.
	dies, lives := refengine.Config{Slots: 128, DPSize: 2, C0: time.Second}, refengine.Config{Slots: 256, DPSize: 2, C0: 5 * time.Millisecond}
	c := start(t, options{
		decode: []refengine.Config{dies, lives}, dirty: true, profile: mooncake.Profile{ChatResume: mooncake.ChatResumeVLLM},
		configure: func(cfg *config.Config) {
			cfg.Pool.Size, cfg.Dispatch.Policy = 1024, "prr"
			cfg.Prefill.Retry.Base = 50 * time.Millisecond // three attempts must outlast the news that the engine is down
		},
	})
	c.allUp()
	streams := 200
	if race.Enabled {
		streams = 100
	}
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait) // they fail the test, so they end before it
	for i := range streams {
		wg.Go(func() {
			prompt := reftext.MakePrompt(uint64(i), 50)
			path, body := completionPath, completion(prompt, `"stream":true,"max_tokens":300,`)
			if i%2 == 1 {
				path, body = chatPath, chat(prompt, `"stream":true,`)
			}
			p, err := reftext.Render(i%2 == 1, []byte(body))
			if err != nil {
				t.Error(err)
				return
			}
			r := c.post(path, body)
			got := read(t, r.body)
			if n, err := reftext.Check(p.Answer, 0, got.text[0]); r.status != 200 || got.fail != "" || err != nil || n != reftext.NaturalLength(p.Answer) {
				t.Errorf("%s: %d %s, %d tokens of %d, %v", path, r.status, got.fail, n, reftext.NaturalLength(p.Answer), err)
			}
		})
	}
	c.eventually("many have begun there", func() bool {
		dispatched := c.decodes()
		return c.metric("evenkeel_ttft_seconds_count") >= float64(dispatched) && c.decode[0].Stats().Running > int64(streams/8)
	})
	c.decode[0].Kill()
	wg.Wait()
	require.Positive(t, c.metric(`evenkeel_decode_losses_total{tier="1"}`))
}
