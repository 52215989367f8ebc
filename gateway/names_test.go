package gateway_test

import (
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// adapter is a LoRA adapter that some engines of a test have.
const adapter = "x"

// asks posts a chat of one message for a model.
func (c *cluster) asks(name, more, prompt string) reply {
	c.Helper()
	return c.post(chatPath, strings.Replace(talk(more, prompt), fmt.Sprintf("%q", model), fmt.Sprintf("%q", name), 1))
}

// answered says of a chat for the adapter that its answer is whole and the adapter's.
func (c *cluster) answered(r reply, prompt string) {
	c.Helper()
	require.NoError(c, r.err)
	require.Equal(c, http.StatusOK, r.status, r.body)
	require.Contains(c, r.body, fmt.Sprintf(`"model":%q`, adapter))
	p, err := reftext.Render(true, []byte(talk("", prompt)))
	require.NoError(c, err)
	text := ""
	if strings.HasPrefix(r.body, "data:") {
		text = read(c.T, r.body).text[0]
	} else {
		text = whole(c.T, r.body)[0]
	}
	wholeText(c.T, p.Answer, text)
}

// asksMany asks for the adapter, some at a time, and each time gets the answer.
func (c *cluster) asksMany(n int) {
	c.Helper()
	var all sync.WaitGroup
	for i := range 3 {
		all.Go(func() {
			for k := range n {
				prompt := fmt.Sprintf("adapter %d %d", i, k)
				more := [...]string{"", `"stream":true,`}[k%2]
				r := c.asks(adapter, more, prompt)
				if r.err != nil || r.status != http.StatusOK {
					c.Errorf("request %d of client %d: %d %s", k, i, r.status, r.body)
					return
				}
				c.answered(r, prompt)
			}
		})
	}
	all.Wait()
	if c.Failed() {
		c.FailNow()
	}
}

// listed waits until the proxy lists the adapter for so many engines, and serves it where more than the prefill engines have it.
func (c *cluster) listed(engines int) {
	c.Helper()
	c.eventually(fmt.Sprintf("%d engines list the adapter", engines), func() bool {
		n := 0
		for _, e := range c.gw.Status(c.Context()).Engines {
			for _, m := range e.Models {
				if m == adapter {
					n++
				}
			}
		}
		return n == engines && slices.Contains(c.models(), adapter) == (engines > len(c.prefill))
	})
}

// differing are two engines that decode, in each arrangement in which only one of them may have an adapter.
func differing() map[string]options {
	of := func(o options, more func(*config.Config)) options {
		o.configure = func(cfg *config.Config) {
			cfg.Health.Interval = 50 * time.Millisecond // lists are read every ten of them
			if more != nil {
				more(cfg)
			}
		}
		return o
	}
	grouped := func(barrier string, groups ...string) func(*config.Config) {
		return func(cfg *config.Config) {
			for _, list := range [][]config.Engine{cfg.Engines.Aggregated, cfg.Engines.Decode} {
				for i := range list {
					list[i].Barrier, list[i].Group = barrier, groups[i%len(groups)]
				}
			}
		}
	}
	both := func() options { return options{mixed: []refengine.Config{{Slots: 64}, {Slots: 64}}} }
	pair := func(e refengine.Config, p mooncake.Profile) options {
		e.Slots, e.RejectReleases = 64, true // as vLLM from 0.25 on
		return options{prefill: []refengine.Config{e}, decode: []refengine.Config{e, e}, profile: p}
	}
	parentless := both()
	for i := range parentless.mixed {
		parentless.mixed[i].Parentless = true
	}
	return map[string]options{
		"two engines that do both, without barrier": of(both(), grouped("none", "main")),
		"two engines that do both, in one group":    of(both(), grouped("dp", "main")),
		"two engines that do both, in two groups":   of(both(), grouped("dp", "one", "other")),
		"names without parent":                      of(parentless, grouped("none", "main")),
		"a pair, in one group":                      of(pair(refengine.Config{}, mooncake.Profile{}), grouped("dp", "main")),
		"a pair, in two groups":                     of(pair(refengine.Config{}, mooncake.Profile{}), grouped("dp", "one", "other")),
		"a pair whose KV is pushed":                 of(pair(refengine.Config{Connector: refengine.NIXLPush}, mooncake.Profile{Connector: mooncake.NIXLPush}), grouped("dp", "main")),
		pushed:                                      of(pair(refengine.Config{}, mooncake.Profile{}), grouped("dp", "main")),
		layerwise:                                   of(pair(refengine.Config{}, mooncake.Profile{}), grouped("none", "main")),
	}
}

// Arrangements in which the decode rank is chosen before the prefill.
const (
	pushed    = "a pair whose rank is chosen first, and whose KV is pushed"
	layerwise = "a pair whose rank is chosen first, and calls back"
)

// A request goes to the engines that list the name that it asks for, and to no other. An adapter is loaded on one engine, on both,
// and unloaded again while requests for it come. All the while, other clients ask for the base model, so that the engine without the
// adapter is sometimes the emptier one, and sometimes the fuller one.
func TestARequestGoesWhereItsNameIsListed(t *testing.T) {
	t.Parallel()
	for name, o := range differing() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.dirty = name == pushed // a prefill that ends before its decode engine has refused keeps its KV until the lease is over
			var c *cluster
			if connector := map[string]refengine.Connector{pushed: refengine.NIXLPush, layerwise: refengine.AscendLayerwise}[name]; connector != "" {
				c = early(t, connector, o)
				require.Equal(t, "right", c.judge("where the engines are reached is learned with this", streamed))
			} else {
				c = start(t, o)
			}
			require.Equal(t, http.StatusNotFound, c.asks(adapter, "", "hi").status)
			for _, p := range c.prefill {
				p.Load(0, adapter)
			}
			for _, busy := range []int{0, 20} {
				stop := c.keepAsking(busy)
				c.decode[0].Load(0, adapter)
				c.listed(1 + len(c.prefill))
				c.asksMany(10) // on one
				c.decode[1].Load(0, adapter)
				c.listed(2 + len(c.prefill))
				c.asksMany(5) // on both
				c.decode[0].Unload(0, adapter)
				c.asksMany(10) // on the other one, before the list is read again and after
				c.decode[1].Unload(0, adapter)
				c.listed(len(c.prefill))
				r := c.asks(adapter, "", "hi")
				require.Equal(t, http.StatusNotFound, r.status, r.body)
				require.Contains(t, r.body, "model_not_found", "no engine was asked")
				stop()
			}
			for _, e := range c.gw.Status(t.Context()).Engines {
				require.Equal(t, "up", e.State, "no engine is blamed: %s", e.Error)
			}
		})
	}
}

// Requests for an adapter of which all ranks are full wait, and hold up nobody whose ranks are free: neither in the pool nor before it.
func TestANameWhoseRanksAreFullHoldsNobodyElseUp(t *testing.T) {
	t.Parallel()
	slow := refengine.Config{Slots: 2, Adapters: []string{adapter}, C0: 3 * time.Millisecond}
	for name, o := range map[string]options{
		"engines that do both": {mixed: []refengine.Config{slow, {Slots: 2}}},
		"a pair":               {prefill: []refengine.Config{{Adapters: []string{adapter}}}, decode: []refengine.Config{slow, {Slots: 2}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.configure = func(cfg *config.Config) {
				for _, list := range [][]config.Engine{cfg.Engines.Aggregated, cfg.Engines.Decode} {
					for i := range list {
						list[i].Barrier, list[i].Group = "dp", "main"
					}
				}
			}
			c := start(t, o)
			var full sync.WaitGroup
			ask := func(more, prompt string) {
				full.Go(func() {
					if r := c.asks(adapter, more, prompt); r.err != nil || r.status != http.StatusOK {
						c.Errorf("%s: %d %s", prompt, r.status, r.body)
					}
				})
			}
			leave := make([]func(), 2) // the clients that have both slots of its rank
			for i := range leave {
				leave[i], _ = c.send(strings.Replace(chat(fmt.Sprint("long ", i), `"stream":true,"ignore_eos":true,`), model, adapter, 1))
			}
			running := func() int64 { return c.decode[0].Stats().Running }
			c.eventually("the rank is full", func() bool { return running() == 2 })
			for i := range 40 {
				ask("", fmt.Sprint("waits ", i))
			}
			c.eventually("others wait", func() bool { return c.gw.Status(t.Context()).Open >= 42 })
			for i := range 20 {
				require.Equal(t, "right", c.judge(fmt.Sprint("base ", i), streamed))
			}
			require.EqualValues(t, 2, running(), "the long ones run still, so that none of those that wait was served before")
			for _, ends := range leave {
				ends()
			}
			full.Wait()
		})
	}
}

// Whatever way a request goes, it goes to engines that list its name: at every endpoint, in several legs, to a rank that computes its
// prompt alone, after its answer broke off, and to one engine alone.
func TestEveryWayHeedsTheName(t *testing.T) {
	t.Parallel()
	has, lacks := refengine.Config{Adapters: []string{adapter}}, refengine.Config{}
	named := func(body string) string { return strings.ReplaceAll(body, "MODEL", adapter) }

	t.Run("at every endpoint, and in several legs", func(t *testing.T) {
		t.Parallel()
		for name, o := range map[string]options{
			"a pair":          {prefill: []refengine.Config{lacks, has}, decode: []refengine.Config{lacks, has, lacks}, profile: mooncake.Profile{Connector: mooncake.NIXLPull}},
			"ranks for both":  {mixed: []refengine.Config{lacks, has, lacks}},
			"both, one lacks": {prefill: []refengine.Config{has}, decode: []refengine.Config{lacks}, mixed: []refengine.Config{lacks, has}},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				for _, list := range [][]refengine.Config{o.prefill, o.decode} {
					for i := range list {
						list[i].Connector = refengine.Connector(o.profile.Connector)
					}
				}
				c := start(t, o)
				for range 4 {
					for path, body := range map[string]string{
						chatPath:       `{"model":"MODEL","max_tokens":4,"n":3,"messages":[{"role":"user","content":"hi"}]}`,
						completionPath: `{"model":"MODEL","max_tokens":4,"stream":true,"prompt":["one","two","three"]}`,
						"/v1/messages": `{"model":"MODEL","max_tokens":4,"messages":[{"role":"user","content":"hi"}]}`,
						"/tokenize":    `{"model":"MODEL","prompt":"hi"}`,
						"/detokenize":  fmt.Sprintf(`{"model":"MODEL","tokens":[%d]}`, reftext.FirstAnswerID),
					} {
						r := c.post(path, named(body))
						require.Equal(t, http.StatusOK, r.status, "%s: %s", path, r.body)
					}
				}
			})
		}
	})
	t.Run("to a rank that computes its prompt alone", func(t *testing.T) {
		t.Parallel()
		o := conditional(nil)
		o.prefill, o.decode = []refengine.Config{has}, []refengine.Config{lacks, has, lacks}
		c := start(t, o)
		for i := range 10 {
			r := c.asks(adapter, "", fmt.Sprint("short ", i))
			require.Equal(t, http.StatusOK, r.status, r.body)
			require.Equal(t, "local-prefill", r.header.Get("X-Evenkeel-Route"))
		}
	})
	t.Run("after its answer broke off", func(t *testing.T) {
		t.Parallel()
		o := options{mixed: []refengine.Config{has, lacks, has, lacks}, configure: func(cfg *config.Config) {
			for i := range cfg.Engines.Aggregated {
				cfg.Engines.Aggregated[i].Barrier = config.BarrierNone
			}
			cfg.Profiles[config.DefaultAggregated] = mooncake.Profile{Connector: mooncake.None, ChatResume: mooncake.ChatResumeContinue}
		}}
		c := start(t, o)
		var answers []*http.Response
		for i := range 8 {
			body := named(fmt.Sprintf(`{"model":"MODEL","stream":true,"ignore_eos":true,"max_tokens":1500,"messages":[{"role":"user","content":"long %d"}]}`, i))
			resp, err := c.http.Post(c.url+chatPath, "application/json", strings.NewReader(body)) //nolint:bodyclose // it is, below
			require.NoError(t, err)
			require.Equal(t, http.StatusOK, resp.StatusCode)
			answers = append(answers, resp) // the first event is there
		}
		require.Positive(t, c.decode[0].Stats().Running)
		c.decode[0].Kill()
		for _, resp := range answers {
			rest, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.True(t, strings.HasSuffix(string(rest), "data: [DONE]\n\n"), string(rest[max(0, len(rest)-300):]))
			require.NotContains(t, string(rest), `"error"`)
		}
		require.Positive(t, c.sum("evenkeel_decode_losses_total"))
	})
	t.Run("to one engine alone", func(t *testing.T) {
		t.Parallel()
		one, other := pooling(), pooling()
		one.Adapters = []string{adapter}
		c := start(t, options{prefill: []refengine.Config{}, decode: []refengine.Config{one, other}, configure: func(cfg *config.Config) { cfg.Health.Interval = 50 * time.Millisecond }})
		ask := func() reply { return c.post("/v1/embeddings", named(`{"model":"MODEL","input":"one two"}`)) }
		for range 10 {
			require.Equal(t, http.StatusOK, ask().status)
		}
		c.decode[1].Load(0, adapter)
		c.listed(2)
		c.decode[0].Unload(0, adapter)
		for range 20 {
			r := ask()
			require.Equal(t, http.StatusOK, r.status, r.body)
		}
		c.decode[1].Unload(0, adapter)
		c.eventually("nobody lists it", func() bool { return strings.Contains(ask().body, "model_not_found") })
	})
	t.Run("to the rank that a trusted caller names", func(t *testing.T) {
		t.Parallel()
		file := filepath.Join(t.TempDir(), "keys.yaml")
		keyFile(t, file, "ops ek-ops , trusted: true")
		c := start(t, options{mixed: []refengine.Config{lacks, has}, configure: func(cfg *config.Config) { cfg.KeysFile = file }})
		for i, want := range []int{http.StatusBadRequest, http.StatusOK} {
			r := c.post(chatPath, named(`{"model":"MODEL","messages":[{"role":"user","content":"hi"}]}`), "Authorization", "Bearer ek-ops", "X-Evenkeel-Target-Decode", addressOf(c.decode[i]))
			require.Equal(t, want, r.status, r.body)
		}
	})
}
