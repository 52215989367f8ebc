package gateway_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/race"
	"evenkeel/bench/refengine"
	"evenkeel/bench/reftext"
	"evenkeel/gateway/config"
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

// A decode engine dies under 200 streams. All that can go on does, to the last
// token.
func TestADecodeEngineDiesUnderManyStreams(t *testing.T) {
	t.Parallel()
	for name, resume := range map[string]string{"by token ids": mooncake.ChatResumeVLLM, "by text": mooncake.ChatResumeContinue, "none": mooncake.ChatResumeNone} {
		t.Run(name, func(t *testing.T) {
			// What the one that dies has begun is far from its end.
			dies, lives := refengine.Config{Slots: 128, DPSize: 2, C0: time.Second}, refengine.Config{Slots: 256, DPSize: 2, C0: 5 * time.Millisecond}
			c := start(t, options{
				decode: []refengine.Config{dies, lives}, dirty: true, profile: mooncake.Profile{ChatResume: resume},
				configure: func(cfg *config.Config) {
					cfg.Pool.Size, cfg.Dispatch.Policy = 1024, "prr"
					cfg.Prefill.Retry.Base = 50 * time.Millisecond // three attempts must outlast the news that the engine is down
				},
			})
			c.eventually("all ranks are up", func() bool {
				up := 0
				for _, w := range c.gw.Status(t.Context()).Dispatch.Models[0].Workers {
					if w.Up {
						up++
					}
				}
				return up == 4
			})
			streams := 200
			if race.Enabled {
				streams = 100
			}
			var wg sync.WaitGroup
			t.Cleanup(wg.Wait) // they fail the test, so they end before it
			fails := make(chan string, streams)
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
					if got.fail != "" || r.status != 200 {
						fails <- fmt.Sprint(path, r.status, got.fail)
						if i%2 == 0 || resume != mooncake.ChatResumeNone {
							t.Error(path, r.status, got.fail)
						}
						return
					}
					if n, err := reftext.Check(p.Answer, 0, got.text[0]); err != nil || n != reftext.NaturalLength(p.Answer) {
						t.Errorf("%s: %d tokens of %d, %v", path, n, reftext.NaturalLength(p.Answer), err)
					}
				})
			}
			c.eventually("many have begun there", func() bool {
				dispatched := c.decodes()
				return c.metric("evenkeel_ttft_seconds_count") >= float64(dispatched) && c.decode[0].Stats().Running > int64(streams/8)
			})
			c.decode[0].Kill()
			wg.Wait()
			close(fails)
			if resume == mooncake.ChatResumeNone {
				require.NotEmpty(t, fails)
			}
			require.Positive(t, c.metric(`evenkeel_decode_losses_total{tier="1"}`))
		})
	}
}

// Under real want of KV memory the same requests are given back again and
// again, with text held back or none at all out yet. Every answer is right.
func TestAnswersThatDoNotFitGoOn(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		decode:  []refengine.Config{{RecomputeEnable: true, KVTokens: 1024, Slots: 16, C0: 2 * time.Millisecond}},
		profile: mooncake.Profile{RecomputeMax: new(50)}, dirty: true,
		configure: func(cfg *config.Config) { cfg.Dispatch.Policy = "rr" },
	})
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			prompt := reftext.MakePrompt(uint64(i), 60)
			r := c.post(completionPath, completion(prompt, fmt.Sprintf(`"stream":%v,"max_tokens":300,`, i%3 > 0)))
			if r.status != 200 {
				t.Error(r.status, r.body)
				return
			}
			got := readSeamless(t, r.body)
			key := reftext.Of(prompt).Answer
			if n, err := reftext.Check(key, 0, got.text); err != nil || n != reftext.NaturalLength(key) || got.fail != "" {
				t.Errorf("%d tokens of %d, %v %s", n, reftext.NaturalLength(key), err, got.fail)
			}
		})
	}
	wg.Wait()
	require.Positive(t, c.metric(`evenkeel_recomputes_total{tier="1"}`))
}
