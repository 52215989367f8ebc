// Package api asks a whole proxy as its callers do: with the official OpenAI client, and as
// docs/openapi.yaml describes it.
package api

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway"
	"evenkeel/gateway/admin"
	"evenkeel/gateway/config"
	"evenkeel/internal/race"
	"evenkeel/mooncake"
)

func TestMain(m *testing.M) {
	parallel := "24" // these tests wait more than they compute
	if race.Enabled {
		parallel = "6"
	}
	if err := flag.Set("test.parallel", parallel); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"),    // one for the process
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2")) // ends up to 10 s after its server
}

const model = "ref"

// options describe a proxy and its engines. The zero value is one prefill engine and one decode
// engine of two ranks, all fast.
type options struct {
	connector       refengine.Connector // empty: the default of both
	prefill, decode []refengine.Config
	configure       func(*config.Config)
}

// proxy is one in front of reference engines, over real sockets.
type proxy struct {
	*testing.T
	gw              *gateway.Gateway
	prefill, decode []*refengine.Engine
	url, admin      string
	http            *http.Client
	requestLog      string
}

// start starts engines and a proxy, and waits until the engines are up. At the end of the test it
// holds that nothing was leaked, replayed or left charged.
func start(t *testing.T, o options) *proxy {
	t.Helper()
	if o.prefill == nil {
		o.prefill = []refengine.Config{{KV: refengine.KV{PrefixCache: 4096}, Answers: refengine.Answers{PromptTokensDetails: true}}}
	}
	if o.decode == nil {
		o.decode = []refengine.Config{{DPSize: 2, Answers: refengine.Answers{PromptTokensDetails: true}}}
	}
	p := &proxy{T: t, requestLog: filepath.Join(t.TempDir(), "requests.jsonl")}
	transport := &http.Transport{DisableCompression: true}
	p.http = &http.Client{Transport: transport}
	cfg := config.Default()
	cfg.Listen, cfg.Admin.Listen, cfg.Log.Requests = "127.0.0.1:0", "127.0.0.1:0", p.requestLog
	cfg.Health.Canary = 0
	profile := mooncake.Profile{Connector: string(o.connector), ChatResume: mooncake.ChatResumeNone}
	for _, e := range o.prefill {
		e.Role = refengine.Prefill
		p.prefill = append(p.prefill, p.engine(o.connector, e))
		at := p.prefill[len(p.prefill)-1].URLs()[0]
		cfg.Engines.Prefill = append(cfg.Engines.Prefill, config.Engine{URL: at})
		if o.connector == refengine.SGLang { // a reference engine's rooms are at its own port
			u, err := url.Parse(at)
			require.NoError(t, err)
			profile.BootstrapPort, err = strconv.Atoi(u.Port())
			require.NoError(t, err)
		}
	}
	for _, e := range o.decode {
		e.Role = refengine.Decode
		engine := p.engine(o.connector, e)
		p.decode = append(p.decode, engine)
		urls, ranks := engine.URLs(), 0
		if e.DPMode == "internal" {
			urls, ranks = urls[:1], e.DPSize
		}
		for _, at := range urls {
			cfg.Engines.Decode = append(cfg.Engines.Decode, config.Engine{URL: at, Ranks: ranks, Slots: engine.Config().Slots})
		}
	}
	cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: profile}
	engines := len(cfg.Engines.Prefill) + len(cfg.Engines.Decode)
	if o.configure != nil {
		o.configure(cfg)
	}
	require.NoError(t, cfg.Validate())
	var err error
	p.gw, err = gateway.New(cfg, zap.NewNop())
	require.NoError(t, err)
	handler, err := admin.New(p.gw, admin.Options{Log: zap.NewNop(), Version: "v0"})
	require.NoError(t, err)
	require.NoError(t, p.gw.Start(handler))
	p.url, p.admin = "http://"+p.gw.Addr(), "http://"+p.gw.AdminAddr()
	t.Cleanup(func() {
		if !t.Failed() {
			p.settled()
		}
		transport.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, p.gw.Shutdown(ctx))
		for _, e := range append(p.prefill, p.decode...) {
			e.Close()
		}
	})
	p.eventually("the proxy is ready, and all engines are up", func() bool {
		up := 0
		s := p.gw.Status(t.Context())
		for _, e := range s.Engines {
			if e.State == "up" {
				up += max(1, e.Ranks)
			}
		}
		return s.Ready && up >= engines
	})
	return p
}

// engine starts one whose times do not hold a test up.
func (p *proxy) engine(connector refengine.Connector, cfg refengine.Config) *refengine.Engine {
	p.Helper()
	cfg.Connector = connector
	e, err := refengine.Start(cfg.Quick())
	require.NoError(p, err)
	return e
}

// settled waits until nothing is under way, and checks every account.
func (p *proxy) settled() {
	p.Helper()
	p.eventually("nothing is under way", func() bool {
		s := p.gw.Status(context.Background())
		held := s.Open + int64(s.PoolUsed)
		for _, m := range s.Dispatch.Models {
			held += int64(m.Pool)
			for _, w := range m.Workers {
				held += int64(w.Used)
			}
		}
		for _, e := range s.Prefill {
			held += int64(e.Inflight+e.Pooled+e.Dispatched) + e.KVTokens
		}
		for _, e := range append(p.prefill, p.decode...) {
			st := e.Stats()
			held += st.Running + st.Waiting + int64(st.Pins)
		}
		return held == 0
	})
	s := p.gw.Status(context.Background())
	require.Zero(p, s.Dispatch.Drift.Slots)
	require.Zero(p, s.Dispatch.Drift.KVTokens)
	for _, e := range append(p.prefill, p.decode...) {
		type harm struct {
			Replays, ExpiredPulls, WrongBlocks, Crashes, DuplicateIDs, RankMismatch, Leaks, Unknown, KeyMismatches int64
		}
		st := e.Stats()
		require.Zero(p, harm{
			Replays: st.Replays, ExpiredPulls: st.ExpiredPulls, WrongBlocks: st.WrongBlocks, Crashes: st.Crashes,
			DuplicateIDs: st.DuplicateIDs, RankMismatch: st.RankMismatch, Leaks: st.Leaks, Unknown: st.Unknown, KeyMismatches: st.KeyMismatches,
		})
	}
}

// patience is how long a test waits for what should be there in milliseconds.
const patience = time.Minute

func (p *proxy) eventually(what string, ok func() bool) {
	p.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		require.True(p, time.Now().Before(end), "in vain: %s", what)
	}
}

// client is the official one, without retries.
func (p *proxy) client(opts ...option.RequestOption) openai.Client {
	return openai.NewClient(append([]option.RequestOption{
		option.WithBaseURL(p.url + "/v1"), option.WithAPIKey("none"), option.WithMaxRetries(0), option.WithHTTPClient(p.http),
	}, opts...)...)
}

// call sends a request and returns what came.
func (p *proxy) call(method, url, body string, header ...string) (*http.Response, string) {
	p.Helper()
	req, err := http.NewRequestWithContext(p.Context(), method, url, strings.NewReader(body))
	require.NoError(p, err)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := p.http.Do(req)
	require.NoError(p, err)
	defer func() { require.NoError(p, resp.Body.Close()) }()
	data, err := io.ReadAll(resp.Body)
	require.NoError(p, err)
	return resp, string(data)
}

// outcomes are the request log's, oldest first.
func (p *proxy) outcomes() (all []string) {
	p.Helper()
	f, err := os.Open(p.requestLog)
	require.NoError(p, err)
	defer func() { _ = f.Close() }()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var r struct{ Outcome string }
		require.NoError(p, json.Unmarshal(lines.Bytes(), &r))
		all = append(all, r.Outcome)
	}
	return all
}

// wholeText fails unless text is the whole answer to key.
func wholeText(t *testing.T, key uint64, text string) {
	t.Helper()
	tokens, err := reftext.Check(key, 0, text)
	require.NoError(t, err)
	require.Equal(t, reftext.NaturalLength(key), tokens)
}

// wordsOf is the body of a message to a prompt, with more members.
func wordsOf(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"max_tokens":4000,"messages":[{"role":"user","content":%q}]}`, more, model, prompt)
}
