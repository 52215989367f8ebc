//go:build !race

// Thousands of requests, which the race detector makes ten times as slow; what
// they share is behind this test's own lock.

package index_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/prefill/index"
)

// What the index predicts against what an engine's own cache had, while
// conversations push each other out of it: several probes at once, and nothing
// to go by but their answers.
func TestPredictedAgainstRealHits(t *testing.T) {
	const blocks, block, probes, atOnce = 300, 128, 600, 4
	for _, row := range []struct {
		name        string
		capacity    int
		least, most float64 // Σ|predicted - real| / Σ predicted
	}{
		{"capacity known", blocks, 0, 0.1},
		{"capacity thought four times as large", 4 * blocks, 0.1, 10},
	} {
		e, err := refengine.Start(refengine.Config{Role: refengine.Prefill,
			KV:      refengine.KV{PrefixCache: blocks, Tokens: 1 << 23, HoldTimeout: 100 * time.Millisecond},
			Prompts: refengine.Prompts{Concurrency: atOnce, Base: 100 * time.Microsecond, PerToken: time.Nanosecond},
			Answers: refengine.Answers{PromptTokensDetails: true},
		})
		require.NoError(t, err)
		tr := &http.Transport{MaxIdleConnsPerHost: atOnce}
		var mu sync.Mutex
		x := index.New(index.Config{})
		s := x.Add("p0/0", row.capacity)
		root := index.Scope{Model: "ref"}.Root(index.Tokens, block)
		talks := make([][]int32, 24)
		rng := rand.New(rand.NewPCG(1, 2))
		var predicted, missed, left int
		var group sync.WaitGroup
		for own := range atOnce { // a conversation's next turn comes after its answer
			group.Go(func() {
				var h index.Hasher
				for {
					mu.Lock()
					if left++; left > probes {
						mu.Unlock()
						return
					}
					at := rng.IntN(len(talks)/atOnce)*atOnce + own
					if len(talks[at]) > 4000 {
						talks[at] = nil
					}
					for range 100 + rng.IntN(500) {
						talks[at] = append(talks[at], 1+rng.Int32N(50_000))
					}
					ids := append([]int32(nil), talks[at]...)
					keys := h.Tokens(nil, root, ids, block)
					hit := index.UsableHit(int(x.Match(nil, keys)[s.N])*block, len(ids), block)
					probe := x.Speculate(s, keys)
					mu.Unlock()
					cached, err := ask(&http.Client{Transport: tr}, e.URLs()[0], ids)
					mu.Lock()
					if err != nil {
						t.Error(err)
						mu.Unlock()
						return
					}
					predicted += hit
					missed += max(hit-cached, cached-hit)
					if cached < hit {
						x.Correct(s, keys, cached/block)
					}
					x.Confirm(&probe)
					mu.Unlock()
				}
			})
		}
		group.Wait()
		tr.CloseIdleConnections()
		e.Close()
		off := float64(missed) / float64(predicted)
		t.Logf("%s: %d tokens predicted, %.1f %% off", row.name, predicted, 100*off)
		require.Positive(t, predicted)
		require.True(t, off >= row.least && off < row.most, "%s: %.3f", row.name, off)
	}
}

func ask(c *http.Client, url string, ids []int32) (cached int, err error) {
	prompt, err := json.Marshal(ids)
	if err != nil {
		return 0, err
	}
	body := fmt.Sprintf(`{"prompt":%s,"max_tokens":1,"min_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}`, prompt)
	res, err := c.Post(url+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	var answer struct {
		Usage struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := json.NewDecoder(res.Body).Decode(&answer); err != nil {
		return 0, err
	}
	if res.StatusCode != 200 {
		return 0, fmt.Errorf("status %d", res.StatusCode)
	}
	return answer.Usage.Details.Cached, nil
}
