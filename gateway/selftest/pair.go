package selftest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

const tokens = 4 // asked for

// A query is a request of a test.
type query struct {
	body     mooncake.Body
	endpoint mooncake.Endpoint
	leg      *mooncake.Leg // how it goes on with an answer; nil: it begins one
}

// ask is the request that is sent through each pair: some blocks of KV, and nobody's words.
func ask(e mooncake.Endpoint, model, id string) (*query, error) {
	form := `{"model":%q,"prompt":%q,"max_tokens":%d,"temperature":0}`
	if e == mooncake.Chat {
		form = `{"model":%q,"messages":[{"role":"user","content":%q}],"max_tokens":%d,"temperature":0}`
	}
	body, err := mooncake.ScanBody(fmt.Appendf(nil, form, model, id+strings.Repeat(" evenkeel self test", 16), tokens), 0)
	return &query{body: body, endpoint: e}, err
}

func (t *tester) prefill(ctx context.Context, p subject, q *query, id string) (answer mooncake.ProbeAnswer, err error) {
	var x *mooncake.Exchange
	if p.profile.Connector == mooncake.VLLMMooncake {
		limited, cancel := context.WithTimeout(ctx, stepTimeout)
		defer cancel()
		named, err := engine.Bootstrap(limited, t.client, p.target, p.profile.BootstrapPort)
		if err != nil {
			return answer, err
		}
		x, named.TransferID = &named, id
	}
	text, err := t.probe(ctx, p, q, id+"-p", p.profile.ProbeBody(&q.body, q.endpoint, q.leg, x, nil))
	if err != nil {
		return answer, err
	}
	if is := mooncake.ConnectorOf(text); is != "" && is != p.profile.Connector && p.profile.Connector != mooncake.Opaque {
		return answer, fmt.Errorf("its profile %s has connector %s, but its hand-off is that of %s; set connector: %[3]s in the profile of both sides' engines", p.profile.Name, p.profile.Connector, is)
	}
	answer, err = p.profile.ReadProbe(text, x, func(host string) bool { return t.hosts[host] })
	if errors.Is(err, mooncake.ErrNoHandoff) {
		err = fmt.Errorf("%w; or is %s the wrong connector? Engines of %s and %s hand nothing off", err, p.profile.Connector, mooncake.VLLMMooncake, mooncake.AscendLayerwise)
	}
	if errors.Is(err, mooncake.ErrUnknownHost) {
		err = fmt.Errorf("%w; add it to the profile's kv_hosts if it is right", err)
	}
	return answer, err
}

// probe sends a prefill request and reads the answer to its end.
func (t *tester) probe(ctx context.Context, p subject, q *query, id string, body [][]byte) ([]byte, error) {
	call, end := t.call(ctx, p, q, lifecycle.Prefill)
	defer end()
	text, f := call.Whole(engine.JSONHeaders(id), body, nil, answerBytes, time.Now().Add(2*stepTimeout))
	if f != nil {
		return nil, why(ctx, call, f)
	}
	return text, nil
}

// call prepares a request to an engine, which ends with ctx.
func (t *tester) call(ctx context.Context, s subject, q *query, half lifecycle.Leg) (call *upstream.Call, end func() bool) {
	call = &upstream.Call{
		Call: upstream.New(t.client, s.profile, s.target).Fresh(), Leg: half, Scope: s.seat.Scope, Path: q.endpoint.Path(), Log: zap.NewNop(),
		Limits: engine.Deadlines{Connect: t.cfg.Limits.ConnectTimeout, FirstByte: stepTimeout, Idle: stepTimeout},
	}
	return call, context.AfterFunc(ctx, call.Abort)
}

// why says in words for the operator why a request failed.
func why(ctx context.Context, call *upstream.Call, f *failure.Fault) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case f.Status == 0:
		return f.Err
	}
	said := string(call.Refusal)
	if len(said) > 200 {
		said = said[:200] + "..."
	}
	is := [...]string{lifecycle.Prefill: "a probe", lifecycle.Decode: "the decode request", lifecycle.Sole: "a request"}[call.Leg]
	return fmt.Errorf("%s was answered with %d: %s", is, f.Status, said)
}

func (t *tester) decode(ctx context.Context, d subject, q *query, a mooncake.ProbeAnswer, id string) (prompt int, err error) {
	leg := "-d"
	if a.ByProbeID { // only the probe's id tells the prefill engine which blocks were pulled
		leg = "-p"
	}
	return t.answer(ctx, d, q, id+leg, d.profile.DecodeBody(&q.body, q.endpoint, q.leg, a.KV, "", true, nil))
}

// answer sends a decode request, reads the answer and compares what it says of itself. It returns how many tokens the prompt
// had there.
func (t *tester) answer(ctx context.Context, d subject, q *query, id string, body [][]byte) (prompt int, err error) {
	half, cached := lifecycle.Decode, -1
	if d.profile.Aggregated() {
		half, cached = lifecycle.Sole, sse.OwnCached
	}
	call, end := t.call(ctx, d, q, half)
	defer end()
	resp, f := call.Open(engine.JSONHeaders(id), body)
	if resp != nil {
		defer resp.Close()
	}
	if f != nil {
		return 0, why(ctx, call, f)
	}
	s := stream{mirror: sse.NewMirror(sse.Ask{Usage: true, ContinuousUsage: true, TokenIDs: true, Choice: -1, Cached: cached})}
	if err = s.read(resp); err == nil && q.endpoint == mooncake.Completions { // a chat differs in nothing that is judged here
		err = t.judge(d, &s)
	}
	if err != nil && ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	return s.mirror.Prompt(), err
}

type stream struct {
	mirror                     *sse.Mirror
	events, withUsage, withIDs int
	handsBack                  bool // the engine keeps the KV of the answer for somebody who fetches it
}

func (s *stream) read(r io.Reader) error {
	framer, buf := sse.NewFramer(0), make([]byte, 4<<10)
	for {
		n, err := r.Read(buf)
		framer.Feed(buf[:n])
		for e, ok := framer.Next(); ok; e, ok = framer.Next() {
			switch _, v := s.mirror.Event(e, nil); v {
			case sse.Failed:
				return fmt.Errorf("the stream failed: %s", s.mirror.Failure().Message)
			case sse.Ended:
				return nil
			}
			if e.Kind != sse.KindData {
				continue
			}
			s.events++
			s.handsBack = s.handsBack || strings.Contains(string(e.Data), `"do_remote_decode":true`)
			if strings.Contains(string(e.Data), `"completion_tokens":`) {
				s.withUsage++
			}
			if strings.Contains(string(e.Data), `"token_ids":[`) {
				s.withIDs++
			}
		}
		if errors.Is(err, io.EOF) {
			return errors.New("the stream ended without [DONE]")
		}
		if err != nil {
			return err
		}
	}
}

func (t *tester) judge(d subject, s *stream) error {
	usage, ok := s.mirror.Usage()
	switch {
	case !s.mirror.Finished():
		return errors.New("the stream ended without a finish_reason")
	case !ok:
		return errors.New("the stream has no usage although the request asked for it, so tokens cannot be counted exactly")
	case usage.Completion != tokens && s.mirror.FinishReason() == "length":
		return fmt.Errorf("usage says %d tokens of the %d asked for", usage.Completion, tokens)
	}
	if d.profile.Aggregated() {
		t.report(d.name, OK, "computed a prompt of %d tokens and answered with %d", usage.Prompt, usage.Completion)
		t.counts(d, usage.Cached)
	} else {
		t.report(d.name, OK, "decoded %d tokens of a hand-off", usage.Completion)
	}
	if s.handsBack { // vLLM says it in streams from 0.33 on
		t.report(d.name, Warn, handsBack)
	}
	if on(d.profile.ContinuousUsage) && s.withUsage < s.events-1 {
		t.report(d.name, Warn, "only %d of %d events carry usage; set continuous_usage: false in its profile, tokens are counted by their ids then", s.withUsage, s.events)
	}
	if on(d.profile.ReturnTokenIDs) && s.withIDs == 0 {
		t.report(d.name, Warn, "no token_ids though asked for; set return_token_ids: false in its profile (vLLM has them since 0.10.2)")
	}
	if drift, ok := s.mirror.Drift(); ok && drift != 0 {
		t.report(d.name, Warn, "counted %+d tokens against the engine's own final count", drift)
	}
	return nil
}

// counts warns of an engine that does not tell what its prefix cache had of a prompt: cached is -1.
func (t *tester) counts(p subject, cached int) {
	flag := "--enable-prompt-tokens-details"
	if p.profile.Connector == mooncake.SGLang {
		flag = "--enable-cache-report"
	}
	if cached < 0 {
		t.report(p.name, Warn, "cached_tokens are not reported; start it with %s", flag)
	}
}

func on(b *bool) bool { return b != nil && *b }
