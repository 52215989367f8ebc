package fleet_test

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

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/refengine/plain"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// pooling is an engine of an embedding model, which has no prefill engine.
func pooling() refengine.Config {
	return refengine.Config{Model: refengine.Model{Name: "emb", Task: plain.Pooling}}
}

// adapter is a LoRA adapter that some engines of a test have.
const adapter = "x"

// asks posts a chat of one message for a model.
func (b *bed) asks(name, more, prompt string) reply {
	b.Helper()
	return b.Post(refclient.ChatPath, strings.Replace(talk(more, prompt), fmt.Sprintf("%q", model), fmt.Sprintf("%q", name), 1))
}

// answered says of a chat for the adapter that its answer is whole and the adapter's.
func (b *bed) answered(r reply, prompt string) {
	b.Helper()
	require.NoError(b, r.Err)
	require.Equal(b, http.StatusOK, r.Status, r.Body)
	require.Contains(b, r.Body, fmt.Sprintf(`"model":%q`, adapter))
	p, err := reftext.Render(true, []byte(talk("", prompt)))
	require.NoError(b, err)
	text := ""
	if strings.HasPrefix(r.Body, "data:") {
		text = read(b.T, r.Body).Text[0]
	} else {
		text = whole(b.T, r.Body)[0]
	}
	refclient.WholeText(b.T, p.Answer, text)
}

// asksMany asks for the adapter, some at a time, and each time gets the answer.
func (b *bed) asksMany(n int) {
	b.Helper()
	var all sync.WaitGroup
	for i := range 3 {
		all.Go(func() {
			for k := range n {
				prompt := fmt.Sprintf("adapter %d %d", i, k)
				more := [...]string{"", `"stream":true,`}[k%2]
				r := b.asks(adapter, more, prompt)
				if r.Err != nil || r.Status != http.StatusOK {
					b.Errorf("request %d of client %d: %d %s", k, i, r.Status, r.Body)
					return
				}
				b.answered(r, prompt)
			}
		})
	}
	all.Wait()
	if b.Failed() {
		b.FailNow()
	}
}

// listed waits until the proxy lists the adapter for so many engines, and serves it where more than
// the prefill engines have it.
func (b *bed) listed(engines int) {
	b.Helper()
	b.Eventually(fmt.Sprintf("%d engines list the adapter", engines), func() bool {
		n := 0
		for _, e := range b.now().Engines {
			for _, m := range e.Models {
				if m == adapter {
					n++
				}
			}
		}
		return n == engines && slices.Contains(b.models(), adapter) == (engines > len(b.Prefill))
	})
}

// differing are two engines that decode, in each arrangement in which only one of them may have an
// adapter.
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
		e.Slots, e.KV.RejectReleases = 64, true // as vLLM from 0.25 on
		return options{prefill: []refengine.Config{e}, decode: []refengine.Config{e, e}, profile: p}
	}
	parentless := both()
	for i := range parentless.mixed {
		parentless.mixed[i].Model.Parentless = true
	}
	return map[string]options{
		"two engines that do both, without barrier": of(both(), grouped("none", "main")),
		"two engines that do both, in one group":    of(both(), grouped("dp", "main")),
		"two engines that do both, in two groups":   of(both(), grouped("dp", "one", "other")),
		"names without parent":                      of(parentless, grouped("none", "main")),
		"a pair, in one group":                      of(pair(refengine.Config{}, mooncake.Profile{}), grouped("dp", "main")),
		"a pair, in two groups":                     of(pair(refengine.Config{}, mooncake.Profile{}), grouped("dp", "one", "other")),
		"a pair whose KV is pushed":                 of(pair(refengine.Config{Connector: refengine.NIXLPush}, mooncake.Profile{Connector: mooncake.NIXLPush}), grouped("dp", "main")),
		layerwise:                                   of(pair(refengine.Config{}, mooncake.Profile{}), grouped("none", "main")),
	}
}

// layerwise is an arrangement in which the decode rank is chosen before the prefill.
const layerwise = "a pair whose rank is chosen first, and calls back"

// A request goes to the engines that list the name that it asks for, and to no other. An adapter is
// loaded on one engine, on both, and unloaded again while requests for it come. All the while,
// other clients ask for the base model, so that the engine without the adapter is sometimes the
// emptier one, and sometimes the fuller one.
func TestARequestGoesWhereItsNameIsListed(t *testing.T) {
	t.Parallel()
	for name, o := range differing() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			begin := start
			if name == layerwise {
				begin = func(t *testing.T, o options) *bed { return early(t, refengine.AscendLayerwise, o) }
			}
			b := begin(t, o)
			require.Equal(t, http.StatusNotFound, b.asks(adapter, "", "hi").Status)
			for _, p := range b.Prefill {
				p.Load(0, adapter)
			}
			for _, busy := range []int{0, 8} {
				stop := b.KeepAsking(busy)
				b.Decode[0].Load(0, adapter)
				b.listed(1 + len(b.Prefill))
				b.asksMany(10) // on one
				b.Decode[1].Load(0, adapter)
				b.listed(2 + len(b.Prefill))
				b.asksMany(5) // on both
				b.Decode[0].Unload(0, adapter)
				b.asksMany(10) // on the other one, before the list is read again and after
				b.Decode[1].Unload(0, adapter)
				b.listed(len(b.Prefill))
				r := b.asks(adapter, "", "hi")
				require.Equal(t, http.StatusNotFound, r.Status, r.Body)
				require.Contains(t, r.Body, "model_not_found", "no engine was asked")
				stop()
			}
			for _, e := range b.now().Engines {
				require.Equal(t, "up", e.State, "no engine is blamed: %s", e.Error)
			}
		})
	}
}

// Requests for an adapter of which all ranks are full wait, and hold up nobody whose ranks are
// free: neither in the pool nor before it.
func TestANameWhoseRanksAreFullHoldsNobodyElseUp(t *testing.T) {
	t.Parallel()
	slow := refengine.Config{Slots: 2, Model: refengine.Model{Adapters: []string{adapter}}, Steps: refengine.Steps{C0: 3 * time.Millisecond}}
	for name, o := range map[string]options{
		"engines that do both": {mixed: []refengine.Config{slow, {Slots: 2}}},
		"a pair": {prefill: []refengine.Config{{Model: refengine.Model{Adapters: []string{adapter}}}},
			decode: []refengine.Config{slow, {Slots: 2}}},
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
			b := start(t, o)
			var full sync.WaitGroup
			ask := func(more, prompt string) {
				full.Go(func() {
					if r := b.asks(adapter, more, prompt); r.Err != nil || r.Status != http.StatusOK {
						b.Errorf("%s: %d %s", prompt, r.Status, r.Body)
					}
				})
			}
			leave := make([]func(), 2) // the clients that have both slots of its rank
			for i := range leave {
				leave[i], _ = b.Send(strings.Replace(chat(fmt.Sprint("long ", i), `"stream":true,"ignore_eos":true,`), model, adapter, 1))
			}
			running := func() int64 { return b.Decode[0].Stats().Running }
			b.Eventually("the rank is full", func() bool { return running() == 2 })
			for i := range 40 {
				ask("", fmt.Sprint("waits ", i))
			}
			b.Eventually("others wait", func() bool { return b.now().Open >= 42 })
			for i := range 20 {
				require.Equal(t, "right", b.Judge(fmt.Sprint("base ", i), streamed))
			}
			require.EqualValues(t, 2, running(), "the long ones run still, so that none of those that wait was served before")
			for _, ends := range leave {
				ends()
			}
			full.Wait()
		})
	}
}

// Whatever way a request goes, it goes to engines that list its name: at every endpoint, in several
// legs, to a rank that computes its prompt alone, after its answer broke off, and to one engine
// alone.
func TestEveryWayHeedsTheName(t *testing.T) {
	t.Parallel()
	has, lacks := refengine.Config{Model: refengine.Model{Adapters: []string{adapter}}}, refengine.Config{}
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
				b := start(t, o)
				for range 4 {
					for path, body := range map[string]string{
						refclient.ChatPath:       `{"model":"MODEL","max_tokens":4,"n":3,"messages":[{"role":"user","content":"hi"}]}`,
						refclient.CompletionPath: `{"model":"MODEL","max_tokens":4,"stream":true,"prompt":["one","two","three"]}`,
						"/v1/messages":           `{"model":"MODEL","max_tokens":4,"messages":[{"role":"user","content":"hi"}]}`,
						"/tokenize":              `{"model":"MODEL","prompt":"hi"}`,
						"/detokenize":            fmt.Sprintf(`{"model":"MODEL","tokens":[%d]}`, reftext.FirstAnswerID),
					} {
						r := b.Post(path, named(body))
						require.Equal(t, http.StatusOK, r.Status, "%s: %s", path, r.Body)
					}
				}
			})
		}
	})
	t.Run("to a rank that computes its prompt alone", func(t *testing.T) {
		t.Parallel()
		o := conditional(nil)
		o.prefill, o.decode = []refengine.Config{has}, []refengine.Config{lacks, has, lacks}
		b := start(t, o)
		for i := range 10 {
			r := b.asks(adapter, "", fmt.Sprint("short ", i))
			require.Equal(t, http.StatusOK, r.Status, r.Body)
			require.Equal(t, "local-prefill", r.Header.Get("X-Evenkeel-Route"))
		}
	})
	t.Run("after its answer broke off", func(t *testing.T) {
		t.Parallel()
		slow := has // so that no answer ends before the last one has begun, on a busy machine either
		slow.Steps.C0 = 5 * time.Millisecond
		o := options{mixed: []refengine.Config{slow, lacks, slow, lacks}, configure: func(cfg *config.Config) {
			for i := range cfg.Engines.Aggregated {
				cfg.Engines.Aggregated[i].Barrier = config.BarrierNone
			}
			cfg.Profiles[config.DefaultAggregated] = mooncake.Profile{Connector: mooncake.None, ChatResume: mooncake.ChatResumeContinue}
		}}
		b := start(t, o)
		var answers []*http.Response
		for i := range 8 {
			body := named(fmt.Sprintf(`{"model":"MODEL","stream":true,"ignore_eos":true,"max_tokens":1500,"messages":[{"role":"user","content":"long %d"}]}`, i))
			resp, err := b.HTTP.Post(b.URL+refclient.ChatPath, "application/json", strings.NewReader(body)) //nolint:bodyclose // it is, below
			require.NoError(t, err)
			require.Equal(t, http.StatusOK, resp.StatusCode)
			answers = append(answers, resp) // the first event is there
		}
		require.Positive(t, b.Decode[0].Stats().Running)
		b.Decode[0].Kill()
		for _, resp := range answers {
			rest, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.True(t, strings.HasSuffix(string(rest), "data: [DONE]\n\n"), string(rest[max(0, len(rest)-300):]))
			require.NotContains(t, string(rest), `"error"`)
		}
		require.Positive(t, b.Sum("evenkeel_decode_losses_total"))
	})
	t.Run("to one engine alone", func(t *testing.T) {
		t.Parallel()
		one, other := pooling(), pooling()
		one.Model.Adapters = []string{adapter}
		b := start(t, options{prefill: []refengine.Config{}, decode: []refengine.Config{one, other},
			configure: func(cfg *config.Config) { cfg.Health.Interval = 50 * time.Millisecond }})
		ask := func() reply { return b.Post("/v1/embeddings", named(`{"model":"MODEL","input":"one two"}`)) }
		for range 10 {
			require.Equal(t, http.StatusOK, ask().Status)
		}
		b.Decode[1].Load(0, adapter)
		b.listed(2)
		b.Decode[0].Unload(0, adapter)
		for range 20 {
			r := ask()
			require.Equal(t, http.StatusOK, r.Status, r.Body)
		}
		b.Decode[1].Unload(0, adapter)
		b.Eventually("nobody lists it", func() bool { return strings.Contains(ask().Body, "model_not_found") })
	})
	t.Run("to the rank that a trusted caller names", func(t *testing.T) {
		t.Parallel()
		file := filepath.Join(t.TempDir(), "keys.yaml")
		refclient.KeyFile(t, file, "ops ek-ops , trusted: true")
		b := start(t, options{mixed: []refengine.Config{lacks, has}, configure: func(cfg *config.Config) { cfg.KeysFile = file }})
		for i, want := range []int{http.StatusBadRequest, http.StatusOK} {
			r := b.Post(refclient.ChatPath, named(`{"model":"MODEL","messages":[{"role":"user","content":"hi"}]}`), "Authorization", "Bearer ek-ops", "X-Evenkeel-Target-Decode", refclient.AddressOf(b.Decode[i]))
			require.Equal(t, want, r.Status, r.Body)
		}
	})
}

func TestModelsAreThoseOfHealthyEngines(t *testing.T) {
	t.Parallel()
	b := start(t, options{
		prefill: []refengine.Config{{Model: refengine.Model{Name: "small"}}, {Model: refengine.Model{Name: "large"}}},
		decode:  []refengine.Config{{Model: refengine.Model{Name: "small"}}, {Model: refengine.Model{Name: "large"}}},
	})
	b.Eventually("both models are there", func() bool { return len(b.models()) == 2 })
	require.Equal(t, []string{"large", "small"}, b.models())
	b.Eventually("with their context", func() bool {
		return strings.Count(b.Ask("GET", b.URL+"/v1/models", "").Body, `"max_model_len":131072`) == 2
	})
	b.Prefill[1].Kill()
	require.Equal(t, []string{"large", "small"}, b.models(), "its decode engine is up")
	b.Decode[1].Kill()
	b.Eventually("only the healthy ones' model is left", func() bool { return len(b.models()) == 1 })
	require.Equal(t, []string{"small"}, b.models())
	r := b.Post(refclient.CompletionPath, `{"model":"large","prompt":"a"}`)
	require.Equal(t, http.StatusServiceUnavailable, r.Status, "known, but nobody serves it now")
	require.Equal(t, 200, b.Post(refclient.CompletionPath, `{"model":"small","prompt":"a"}`).Status)
	require.NoError(t, b.Prefill[1].Revive())
	require.NoError(t, b.Decode[1].Revive())
	b.Eventually("and back again", func() bool { return b.Post(refclient.CompletionPath, `{"model":"large","prompt":"a"}`).Status == 200 })
}
