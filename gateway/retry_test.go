package gateway_test

import (
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
)

// turns takes engines one after the other, on both sides.
func turns(cfg *config.Config) { cfg.Prefill.Policy, cfg.Dispatch.Policy = "round-robin", "rr" }

// allUp waits until every engine of the cluster takes requests.
func (c *cluster) allUp() {
	c.Helper()
	c.eventually("all engines are up", func() bool {
		s, up := c.gw.Status(c.Context()), 0
		for _, m := range s.Dispatch.Models {
			for _, w := range m.Workers {
				if w.Up {
					up++
				}
			}
		}
		want := len(c.prefill)
		for _, d := range c.decode {
			want += d.Config().DPSize
		}
		return float64(up)+c.metric(`evenkeel_prefill_candidates{state="open"}`) == float64(want)
	})
}

// probes and decodes are how many requests the engines got of each kind.
func (c *cluster) probes() (n int64) {
	for _, e := range c.prefill {
		n += e.Stats().Probes
	}
	return n
}

func (c *cluster) decodes() (n int64) {
	for _, e := range c.decode {
		n += e.Stats().Decodes
	}
	return n
}

// One engine of each side dies under a hundred requests. Who has nothing of an
// answer yet gets a right one, whatever became of the attempts before.
func TestAnEngineOfEachSideDiesUnderManyRequests(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		prefill: []refengine.Config{
			{PrefillConcurrency: 4, PrefillBase: 40 * time.Millisecond}, {PrefillConcurrency: 16, PrefillBase: 20 * time.Millisecond},
		},
		decode: []refengine.Config{
			{DPSize: 2, Slots: 32, TransferBase: 20 * time.Millisecond, C0: 10 * time.Millisecond},
			{DPSize: 2, Slots: 32, TransferBase: 20 * time.Millisecond, C0: 2 * time.Millisecond},
		},
		dirty: true,
	})
	c.allUp()
	const requests = 100
	var wg sync.WaitGroup
	var right, broken atomic.Int64
	for i := range requests {
		wg.Go(func() {
			prompt := reftext.MakePrompt(uint64(i), 50)
			more := `"stream":true,`
			if i%3 == 0 {
				more = ""
			}
			r := c.post(chatPath, chat(prompt, more))
			if r.err != nil || r.status != http.StatusOK {
				t.Error(i, r.status, r.err, r.body)
				return
			}
			text, fail := "", ""
			if more == "" {
				text = whole(t, r.body)[0]
			} else {
				got := read(t, r.body)
				text, fail = got.text[0], got.fail
			}
			key := reftext.OfUser(prompt).Answer
			n, err := reftext.Check(key, 0, text)
			switch {
			case err != nil, fail == "" && n != reftext.NaturalLength(key), fail != "" && n == 0:
				t.Error(i, n, reftext.NaturalLength(key), fail, err)
			case fail == "":
				right.Add(1)
			default:
				broken.Add(1)
			}
		})
	}
	c.eventually("they are everywhere", func() bool {
		d := c.decode[0].Stats()
		return d.Waiting > 0 && d.Running > 0 && c.prefill[0].Stats().Running > 0
	})
	var dead sync.WaitGroup
	dead.Go(c.prefill[0].Kill)
	dead.Go(c.decode[0].Kill)
	dead.Wait()
	wg.Wait()
	require.EqualValues(t, requests, right.Load()+broken.Load())
	require.Greater(t, right.Load(), int64(requests/2))
	t.Log(right.Load(), "right,", broken.Load(), "had begun")
	c.accounted()
	again := 0
	for _, r := range c.records() {
		again += r.Attempts - 1
	}
	require.Positive(t, again)
}
