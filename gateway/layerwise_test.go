package gateway_test

import (
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/gateway/config"
)

const streamed = `"stream":true,`

// layerwise is a proxy before layerwise engines whose decode engine has faults.
func layerwise(t *testing.T, o options, faults ...refengine.Rule) *cluster {
	t.Helper()
	o.dirty = o.dirty || len(faults) > 0
	c := early(t, refengine.AscendLayerwise, o)
	require.NoError(t, c.decode[0].SetFaults(faults...))
	return c
}

func callbacks(c *cluster, result string) float64 {
	return c.metric(fmt.Sprintf("evenkeel_bind_callbacks_total{result=%q}", result))
}

// A decode scheduler makes 32 callbacks at once: more prefills than that overlap only if each is answered at once.
func TestCallbacksAreAnsweredAtOnce(t *testing.T) {
	t.Parallel()
	c := layerwise(t, options{
		prefill: []refengine.Config{{PrefillBase: 2 * time.Second, PrefillConcurrency: 48}}, decode: []refengine.Config{{Slots: 48}},
		configure: func(cfg *config.Config) { cfg.Prefill.Push.MaxUnanswered = 48 },
	})
	done := make(chan map[string]int)
	go func() { done <- c.judgeAll(40, streamed) }()
	c.eventually("more prefills are under way than callbacks can be", func() bool {
		s := c.prefill[0].Stats()
		return s.Running+s.Waiting > 32
	})
	require.Equal(t, map[string]int{"right": 40}, <-done)
	require.EqualValues(t, 40, callbacks(c, "ok"))
}

// Nothing is prefilled before the decode engine has room.
func TestAPrefillWaitsForItsCallback(t *testing.T) {
	t.Parallel()
	c := layerwise(t, options{decode: []refengine.Config{{}}}, refengine.Rule{Fault: refengine.CallbackLate, DelayMS: 2000})
	done := make(chan string)
	go func() { done <- c.judge("one two three", streamed) }()
	c.eventually("the decode engine has it", func() bool { return c.decode[0].Stats().Decodes == 1 })
	require.Zero(t, c.prefill[0].Stats().Requests)
	require.Equal(t, "right", <-done)
}

// While a decode engine finds room, prefills end earlier or later than predicted: the prompt goes to the engine that
// is then the first to end it.
func TestAPrefillerIsChosenAnewAtTheCallback(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	keyFile(t, file, "ops ek-ops , trusted: true")
	c := layerwise(t, options{
		prefill: []refengine.Config{{PrefillBase: time.Second}, {PrefillBase: 12 * time.Second}}, decode: []refengine.Config{{}}, dirty: true,
		configure: func(cfg *config.Config) {
			cfg.KeysFile, cfg.ExposeRoute = file, true
			cfg.Prefill.Calibration.TPMs, cfg.Prefill.Calibration.T0Ms = 10, 10 // believed to be far slower than they are
		},
	})
	ids := c.candidates()
	ask := func(prompt int, header ...string) reply {
		return c.post(chatPath, chat(strings.Repeat("word ", prompt), streamed+`"max_tokens":3,`), append(header, "Authorization", "Bearer ek-ops")...)
	}
	moves := func() bool {
		var wg sync.WaitGroup
		defer wg.Wait()
		require.NoError(t, c.decode[0].SetFaults())
		for p, prompt := range map[int]int{0: 4000, 1: 2000} {
			wg.Go(func() {
				r := ask(prompt, "X-Evenkeel-Target-Prefill", ids[p].ID)
				assert.Equal(t, http.StatusOK, r.status, r.body)
			})
			before := c.prefill[p].Stats().Requests
			c.eventually("a prefill has begun", func() bool { return c.prefill[p].Stats().Requests > before || c.prefill[p].Stats().Running > 0 })
		}
		require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.CallbackLate, DelayMS: 4000}))
		before := c.prefill[0].Stats().Requests
		r := ask(10)
		require.Equal(t, http.StatusOK, r.status, r.body)
		return r.header.Get("X-Evenkeel-Prefill") == ids[0].ID && c.prefill[0].Stats().Requests == before+1
	}
	for tries := 1; !moves(); tries++ { // on a machine that is busy enough the first prefill may last beyond the callback
		require.Less(t, tries, 5, "the other one was to end sooner when it was bound")
	}
	require.Zero(t, c.decode[0].Stats().MixedPushes)
}

// A prefill engine that broke off may have written: no other one goes on for the same decode leg, whose blocks may be
// lost.
func TestNoSecondPrefillForABrokenOne(t *testing.T) {
	t.Parallel()
	c := layerwise(t, options{prefill: []refengine.Config{{}}, decode: []refengine.Config{{}, {}}, dirty: true})
	require.NoError(t, c.prefill[0].SetFaults(refengine.Rule{Fault: refengine.Reset, Count: 1}))
	require.Equal(t, "right", c.judge("one two three", streamed))
	decodes, lost := int64(0), 0.0
	for _, d := range c.decode {
		s := d.Stats()
		decodes += s.Decodes
		require.Zero(t, s.MixedPushes)
	}
	require.EqualValues(t, 2, decodes)
	c.eventually("the blocks are kept on the rank's account", func() bool { lost = c.sum("evenkeel_bind_orphan_tokens"); return lost > 0 })
	for _, d := range c.decode {
		d.Kill()
		require.NoError(t, d.Revive())
	}
	c.eventually("another process has its blocks back", func() bool { return c.sum("evenkeel_bind_orphan_tokens") == 0 })
}

// A client that leaves before the callback leaves blocks that only a prefill frees.
func TestALateCallbackIsPrefilledForNobody(t *testing.T) {
	t.Parallel()
	c := layerwise(t, options{decode: []refengine.Config{{}}}, refengine.Rule{Fault: refengine.CallbackLate, DelayMS: 2000})
	leave, wait := c.send(chat("one two three", streamed))
	c.eventually("the decode engine has blocks for it", func() bool { return c.decode[0].Stats().KVUsed > 0 })
	leave()
	wait()
	c.eventually("it was prefilled", func() bool { return c.metric(`evenkeel_bind_drains_total{cause="client_left"}`) == 1 })
	c.eventually("the blocks are free", func() bool {
		s := c.decode[0].Stats()
		return s.Ranks[0].Stranded == 0 && c.prefill[0].Stats().Requests == 1
	})
}

// Each prompt of a list is a request of its own, with a callback of its own.
func TestAListOfPromptsIsBoundOneByOne(t *testing.T) {
	t.Parallel()
	c := layerwise(t, options{})
	r := c.post("/v1/completions", fmt.Sprintf(`{"model":%q,"prompt":["one two","three four","five six"],"max_tokens":5}`, model))
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.EqualValues(t, 3, callbacks(c, "ok"))
	require.EqualValues(t, 3, c.prefill[0].Stats().Requests)
}
