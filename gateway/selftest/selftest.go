// Package selftest runs one tiny request through every pair of engines that a
// config names and tells what the profiles promise but the engines do not do
// (contract 12). It uses the bodies and readers that serve uses.
package selftest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// Level of a finding.
type Level string

// The levels: Bad means that requests will fail.
const (
	OK   Level = "ok"
	Warn Level = "warn"
	Bad  Level = "bad"
)

// Finding is one thing learned about one engine.
type Finding struct {
	Engine string `json:"engine"` // role and host:port
	Level  Level  `json:"level"`
	Msg    string `json:"message"`
}

// limits of the test's own requests.
const (
	stepTimeout = 30 * time.Second
	answerBytes = 1 << 20
	tokens      = 4
)

// prompt is long enough for a block of KV and says nothing.
var prompt = strings.TrimSpace(strings.Repeat("evenkeel self test ", 16))

type tester struct {
	cfg      *config.Config
	client   *engine.Client
	findings []Finding
}

type subject struct {
	name    string
	target  *engine.Target
	profile *mooncake.Profile
	models  []string
}

// Run tests every prefill engine against every decode engine in turn, until ctx
// ends. The config must be valid.
func Run(ctx context.Context, cfg *config.Config) []Finding {
	t := &tester{cfg: cfg, client: engine.NewClient(engine.Options{})}
	defer t.client.Close()
	prefills := t.subjects(ctx, "prefill", cfg.Engines.Prefill)
	decodes := t.subjects(ctx, "decode", cfg.Engines.Decode)
	t.compareModels(prefills, decodes)
	for i := range max(len(prefills), len(decodes)) {
		if len(prefills) == 0 || len(decodes) == 0 || ctx.Err() != nil {
			break
		}
		t.pair(ctx, prefills[i%len(prefills)], decodes[i%len(decodes)], i)
	}
	return t.findings
}

func (t *tester) say(s string, l Level, format string, args ...any) {
	t.findings = append(t.findings, Finding{s, l, fmt.Sprintf(format, args...)})
}

// subjects are the engines that answer, with the models they serve.
func (t *tester) subjects(ctx context.Context, role string, engines []config.Engine) (ok []subject) {
	for _, e := range engines {
		id, err := config.InstanceID(e.URL)
		if err != nil {
			continue // a valid config has none
		}
		p := t.cfg.Profiles[e.Profile]
		s := subject{name: role + " " + id, profile: &p}
		if s.target, err = config.Target(e, &p); err != nil {
			t.say(s.name, Bad, "%v", err)
			continue
		}
		if e.Ranks > 0 || p.Connector == mooncake.VLLMMooncake {
			s.target.Rank = 0
		}
		if err := t.facts(ctx, role, &s); err != nil {
			t.say(s.name, Bad, "%v", err)
			continue
		}
		ok = append(ok, s)
	}
	return ok
}

// facts reads what an engine says of itself.
func (t *tester) facts(ctx context.Context, role string, s *subject) error {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	models, err := engine.Models(ctx, t.client, s.target)
	if err != nil {
		return err
	}
	for _, m := range models {
		s.models = append(s.models, m.ID)
	}
	sample, err := engine.MetricNames(s.profile.Metrics).Scrape(ctx, t.client, s.target)
	if err != nil {
		t.say(s.name, Warn, "no metrics: %v; the KV gate then knows only our own requests", err)
		return nil
	}
	if _, known := sample.KVUsage(s.target.Rank); !known && role == "prefill" {
		t.say(s.name, Warn, "no KV usage under a known metric name; set the profile's metrics.kv_usage")
	}
	if _, known := sample.CacheTokens(s.target.Rank); !known && s.profile.KVTokensPerRank == 0 {
		t.say(s.name, Warn, "it does not report its KV capacity; set the profile's kv_tokens_per_rank")
	}
	return nil
}

func (t *tester) compareModels(prefills, decodes []subject) {
	for _, p := range prefills {
		for _, d := range decodes {
			for _, m := range p.models {
				if !slices.Contains(d.models, m) {
					t.say(d.name, Warn, "does not serve %q, which %s does", m, p.name)
				}
			}
		}
	}
}

// pair sends one prompt through both engines.
func (t *tester) pair(ctx context.Context, p, d subject, n int) {
	model, ok := common(p.models, d.models)
	if !ok {
		t.say(d.name, Bad, "serves no model that %s serves", p.name)
		return
	}
	body, err := mooncake.ScanBody(fmt.Appendf(nil, `{"model":%q,"prompt":%q,"max_tokens":%d,"temperature":0}`, model, prompt, tokens), 0)
	if err != nil {
		t.say(p.name, Bad, "%v", err)
		return
	}
	x, err := t.exchange(ctx, p, n)
	if err != nil {
		t.say(p.name, Bad, "%v", err)
		return
	}
	answer, err := t.probe(ctx, p, &body, x, n)
	if err != nil {
		t.say(p.name, Bad, "%v", err)
		return
	}
	t.say(p.name, OK, "a probe of %d tokens returned a usable hand-off", answer.PromptTokens)
	if answer.CachedTokens < 0 {
		t.say(p.name, Warn, "cached_tokens are not reported; start it with --enable-prompt-tokens-details")
	}
	if err := t.decode(ctx, d, &body, answer, n); err != nil {
		t.say(d.name, Bad, "with the hand-off of %s: %v", p.name, err)
	}
}

func common(a, b []string) (string, bool) {
	for _, m := range a {
		if slices.Contains(b, m) {
			return m, true
		}
	}
	return "", false
}

func (t *tester) exchange(ctx context.Context, p subject, n int) (*mooncake.Exchange, error) {
	if p.profile.Connector != mooncake.VLLMMooncake {
		return nil, nil
	}
	x, err := engine.Bootstrap(ctx, t.client, p.target, p.profile.BootstrapPort)
	if err != nil {
		return nil, err
	}
	x.TransferID = fmt.Sprintf("ek-selftest-%d-%d", os.Getpid(), n)
	return &x, nil
}

func header(leg string, n int) []engine.Header {
	return []engine.Header{
		{Name: "Content-Type", Value: "application/json"},
		{Name: "X-Request-Id", Value: fmt.Sprintf("ek-selftest-%d-%d-%s", os.Getpid(), n, leg)},
	}
}

func (t *tester) probe(ctx context.Context, p subject, body *mooncake.Body, x *mooncake.Exchange, n int) (mooncake.ProbeAnswer, error) {
	call := t.client.NewCall(p.target)
	defer context.AfterFunc(ctx, call.Abort)()
	resp, err := call.Do(http.MethodPost, mooncake.Completions.Path(), header("p", n), p.profile.ProbeBody(body, mooncake.Completions, nil, x, nil), t.deadlines())
	if err != nil {
		return mooncake.ProbeAnswer{}, err
	}
	defer resp.Close()
	text, err := resp.ReadAll(answerBytes)
	if err != nil {
		return mooncake.ProbeAnswer{}, err
	}
	if resp.StatusCode() != http.StatusOK {
		return mooncake.ProbeAnswer{}, fmt.Errorf("a probe was answered with %d: %s", resp.StatusCode(), clip(text))
	}
	return p.profile.ReadProbe(text, x, func(string) bool { return true })
}

func (t *tester) deadlines() engine.Deadlines {
	return engine.Deadlines{Connect: t.cfg.Limits.ConnectTimeout, FirstByte: stepTimeout, Idle: stepTimeout}
}

// decode reads a whole small answer and compares what the stream says of itself.
func (t *tester) decode(ctx context.Context, d subject, body *mooncake.Body, a mooncake.ProbeAnswer, n int) error {
	call := t.client.NewCall(d.target)
	defer context.AfterFunc(ctx, call.Abort)()
	resp, err := call.Do(http.MethodPost, mooncake.Completions.Path(), header("d", n), d.profile.DecodeBody(body, mooncake.Completions, nil, a.KV, true, nil), t.deadlines())
	if err != nil {
		return err
	}
	defer resp.Close()
	if resp.StatusCode() != http.StatusOK {
		text, _ := resp.ReadAll(answerBytes)
		return fmt.Errorf("the decode request was answered with %d: %s", resp.StatusCode(), clip(text))
	}
	f := sse.NewFramer(0)
	m := sse.NewMirror(sse.Ask{Usage: true, ContinuousUsage: true, TokenIDs: true, Choice: -1, Cached: -1})
	withUsage, withIDs, events := 0, 0, 0
	buf := make([]byte, 4<<10)
	for done := false; !done; {
		k, err := resp.Read(buf)
		f.Feed(buf[:k])
		for e, ok := f.Next(); ok; e, ok = f.Next() {
			_, v := m.Event(e, nil)
			if v == sse.Failed {
				return fmt.Errorf("the stream failed: %s", m.Failure().Message)
			}
			if e.Kind == sse.KindData {
				events++
				withUsage += strings.Count(string(e.Data), `"completion_tokens":`)
				withIDs += strings.Count(string(e.Data), `"token_ids":[`)
			}
			done = done || v == sse.Ended
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	return t.judge(d, m, events, withUsage, withIDs)
}

func (t *tester) judge(d subject, m *sse.Mirror, events, withUsage, withIDs int) error {
	usage, ok := m.Usage()
	switch {
	case !m.Finished():
		return errors.New("the stream ended without a finish_reason")
	case !ok:
		return errors.New("the stream has no usage though it was asked for; tokens cannot be counted exactly")
	case usage.Completion != tokens && m.FinishReason() == "length":
		return fmt.Errorf("usage says %d tokens of the %d asked for", usage.Completion, tokens)
	}
	t.say(d.name, OK, "decoded %d tokens of a hand-off", usage.Completion)
	if d.profile.ContinuousUsage != nil && *d.profile.ContinuousUsage && withUsage < events-1 {
		t.say(d.name, Warn, "only %d of %d events carry usage; set continuous_usage: false in its profile, counting is by token ids then", withUsage, events)
	}
	if d.profile.ReturnTokenIDs != nil && *d.profile.ReturnTokenIDs && withIDs == 0 {
		t.say(d.name, Warn, "no token_ids though asked for; set return_token_ids: false in its profile (vLLM has them since 0.10.2)")
	}
	if drift, ok := m.Drift(); ok && drift != 0 {
		t.say(d.name, Warn, "counted %+d tokens against the engine's own final count", drift)
	}
	return nil
}

func clip(b []byte) string {
	if len(b) > 200 {
		b = b[:200]
	}
	return string(b)
}
