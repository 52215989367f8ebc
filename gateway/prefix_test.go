package gateway_test

import (
	"net/http"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
)

// One caller asks for nothing but prompts that begin with what one rank holds, while there are more requests than slots. Others
// ask beside it. The rank is not kept for that caller, and the caller does not wait for that rank: all are answered, and all ranks
// take part in both.
func TestOneCallerWhosePrefixOneRankHolds(t *testing.T) {
	t.Parallel()
	ranks := refengine.Config{DPSize: 4, Slots: 2, PrefixCache: 1 << 16, PromptTokensDetails: true}
	apart, both := conditional(nil), together(nil)
	apart.decode, both.mixed = []refengine.Config{ranks}, []refengine.Config{ranks}
	for name, o := range map[string]options{"decode ranks that may prefill": apart, "ranks that prefill and decode": both} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := start(t, o)
			prefix := reftext.MakePrompt(1, 3000)
			c.say(talk(streamed, prefix))
			c.settledRequests(1)
			holder := c.records()[0].Rank
			const each = 24
			var wg sync.WaitGroup
			for i := range each {
				for _, body := range []string{
					talk(streamed, prefix, "well", reftext.MakePrompt(uint64(100+i), 1500)), talk(streamed, reftext.MakePrompt(uint64(200+i), 9000)),
				} {
					wg.Go(func() {
						p, err := reftext.Render(true, []byte(body))
						require.NoError(t, err)
						r := c.post(chatPath, body)
						require.NoError(t, r.err)
						require.Equal(t, http.StatusOK, r.status, r.body)
						wholeText(t, p.Answer, read(t, r.body).text[0])
					})
				}
			}
			wg.Wait()
			c.settledRequests(1 + 2*each)
			on := map[string]map[string]int{"near": {}, "far": {}}
			for _, r := range c.records()[1:] {
				who := "near"
				if r.PromptTokens > 7000 {
					who = "far"
				}
				on[who][r.Rank]++
			}
			t.Log(holder, on)
			require.Len(t, on["near"], ranks.DPSize, "it does not wait for the rank that holds the prefix")
			require.Contains(t, on["far"], holder, "the rank is not kept for one caller")
		})
	}
}
