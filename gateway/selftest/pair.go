package selftest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

const answerTokens = 4 // number of answer tokens that a test asks for

// A query is the request that a test sends through a pair of engines.
type query struct {
	body     mooncake.Body
	endpoint mooncake.Endpoint
	changes  *mooncake.Patch // how the request continues an answer; nil: it begins an answer
}

// shortPrompt is how many texts fill several KV blocks, and tokensOfText the most tokens of one.
const (
	shortPrompt  = 16
	tokensOfText = 8
)

// newQuery makes the request of a test: a prompt of so many texts, none of which is of any client.
func newQuery(e mooncake.Endpoint, model, id string, texts int) *query {
	prompt := id + strings.Repeat(" evenkeel self test", texts)
	members := map[string]any{"model": model, "prompt": prompt, "max_tokens": answerTokens, "temperature": 0}
	if e == mooncake.Chat {
		delete(members, "prompt")
		members["messages"] = []map[string]string{{"role": "user", "content": prompt}}
	}
	text, _ := json.Marshal(members)
	body, _ := mooncake.ScanBody(text, 0) // cannot fail, because the text is a JSON object
	return &query{body: body, endpoint: e}
}

// otherConnectorError says that a hand-off is not one of the profile's connector.
type otherConnectorError struct{ profile, configured, actual string }

func (e *otherConnectorError) Error() string {
	return fmt.Sprintf("its profile %s has connector %s, but its hand-off is that of %s; set connector: %[3]s in the profile of both sides' "+
		"engines", e.profile, e.configured, e.actual)
}

// prefill has a prefill engine compute a prompt, and reads the hand-off from its answer. If the
// hand-off is that of another connector than the profile's, the answer has it although there is an
// error.
func (t *tester) prefill(ctx context.Context, p testedRank, q *query, id string) (answer mooncake.ProbeAnswer, err error) {
	var info *mooncake.BootstrapInfo // nil: the engine needs no names for the transfer
	if p.profile.Connector == mooncake.VLLMMooncake {
		limited, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		named, err := engine.Bootstrap(limited, t.client, p.target, p.profile.BootstrapPort)
		if err != nil {
			return answer, err
		}
		info, named.TransferID = &named, id
	}
	text, err := t.send(ctx, p, q, lifecycle.Prefill, id+"-p", p.profile.ProbeBody(&q.body, q.endpoint, q.changes, info, nil))
	if err != nil {
		return answer, err
	}
	connector := mooncake.ConnectorOf(text) // empty: the hand-off does not show it
	fitsProfile := connector == p.profile.Connector || p.profile.Connector == mooncake.Opaque
	knownHost := func(host string) bool { return t.hosts[host] }
	if connector != "" && !fitsProfile {
		actual := *p.profile
		actual.Connector = connector
		answer, _ = actual.ReadProbe(text, nil, knownHost) // for discard; after an error, it has no hand-off
		return answer, &otherConnectorError{profile: p.profile.Name, configured: p.profile.Connector, actual: connector}
	}
	answer, err = p.profile.ReadProbe(text, info, knownHost)
	if errors.Is(err, mooncake.ErrNoHandoff) {
		err = fmt.Errorf("%w; or is %s the wrong connector? Engines of %s and %s hand nothing off", err, p.profile.Connector,
			mooncake.VLLMMooncake, mooncake.AscendLayerwise)
	}
	if errors.Is(err, mooncake.ErrUnknownHost) {
		err = fmt.Errorf("%w; add it to the profile's kv_hosts if it is right", err)
	}
	return answer, err
}

// send sends a request to an engine and reads the answer to its end. The error says, in words for
// the operator, why it failed.
func (t *tester) send(ctx context.Context, s testedRank, q *query, kind lifecycle.CallKind, id string, body [][]byte) ([]byte, error) {
	call := &upstream.Call{
		Call: upstream.NewCall(t.client, s.profile, s.target).Fresh(), Kind: kind, Scope: s.slot.Scope, Path: q.endpoint.Path(),
		Log:    zap.NewNop(),
		Limits: engine.Deadlines{Connect: t.cfg.Limits.ConnectTimeout, FirstByte: requestTimeout, Idle: requestTimeout},
	}
	defer context.AfterFunc(ctx, call.Abort)()
	text, fault := call.SendAndRead(engine.JSONHeaders(id), body, answerBytes, time.Now().Add(2*requestTimeout))
	switch {
	case fault == nil:
		return text, nil
	case ctx.Err() != nil: // the test has ended the call
		return nil, context.Cause(ctx)
	case fault.Status == 0: // the engine gave no answer
		return nil, fault.Err
	}
	refusal := string(call.RefusalBody)
	if len(refusal) > 200 { // its beginning is enough to see what is wrong
		refusal = refusal[:200] + "..."
	}
	what := [...]string{lifecycle.Prefill: "a probe", lifecycle.Decode: "the decode request", lifecycle.Sole: "a request"}[kind]
	return nil, fmt.Errorf("%s was answered with %d: %s", what, fault.Status, refusal)
}

// decodeIDSuffix is the suffix of a decode request's id. It is that of the prefill request if the
// prefill engine recognises only by the id of that request which blocks were fetched.
func decodeIDSuffix(a mooncake.ProbeAnswer) string {
	if a.ReusesRequestID {
		return "-p"
	}
	return "-d"
}

// decode makes a decode engine decode a hand-off. It returns the number of prompt tokens that the
// decode engine counted.
func (t *tester) decode(ctx context.Context, d testedRank, q *query, a mooncake.ProbeAnswer, id string) (prompt int, err error) {
	return t.answer(ctx, d, q, id+decodeIDSuffix(a), d.profile.DecodeBody(&q.body, q.endpoint, q.changes, a.KV, "", true, nil))
}

// discard makes a decode engine fetch the KV of a hand-off that is not one of the profile's
// connector (why), because otherwise the KV stays in the prefill engine until its hold timeout. The
// decode engine's profile must have the connector of the hand-off or the same wrong one, as then
// both engines are probably of one kind. An engine of a third connector might not be able to read
// the hand-off, so it gets nothing.
func (t *tester) discard(ctx context.Context, d testedRank, q *query, a mooncake.ProbeAnswer, id string, why *otherConnectorError) {
	if has := d.profile.Connector; a.KV == nil || has != why.actual && has != why.configured {
		return
	}
	body := d.profile.DiscardBody(&q.body, q.endpoint, q.changes, a.KV, id, nil)
	_, _ = t.send(ctx, d, q, lifecycle.Decode, id+decodeIDSuffix(a), body) // that the profile is wrong is reported already
}

// answer sends a decode request, reads the answer, and checks what the answer says about itself. It
// returns the number of prompt tokens that the decode engine counted.
func (t *tester) answer(ctx context.Context, d testedRank, q *query, id string, body [][]byte) (prompt int, err error) {
	kind, cached := lifecycle.Decode, -1 // -1: the prefill engine knows how many tokens were cached
	if d.profile.Aggregated {            // the engine itself reports its cached tokens
		kind, cached = lifecycle.Sole, sse.OwnCached
	}
	text, err := t.send(ctx, d, q, kind, id, body)
	if err != nil {
		return 0, err
	}
	s := stream{filter: sse.NewFilter(sse.Options{Usage: true, ContinuousUsage: true, TokenIDs: true, Choice: -1, Cached: cached})}
	if err = s.read(text); err == nil && q.endpoint == mooncake.Completions { // a chat would show nothing that a completion does not show
		err = t.checkAnswer(d, &s)
	}
	return s.filter.Prompt(), err
}

// stream collects what the events of an answer show.
type stream struct {
	filter                     *sse.Filter
	events, withUsage, withIDs int
	keepsKV                    bool // the engine keeps the KV of the answer for a later request
}

// read reads the events of an answer. The error says that the events are malformed, or that the
// engine reported a failure.
func (s *stream) read(text []byte) error {
	for e := range sse.Events(text) {
		switch _, end := s.filter.Event(e, nil); end {
		case sse.Refused:
			return fmt.Errorf("the stream failed: %.200q", s.filter.Failure().Message)
		case sse.Complete, sse.Short:
			return nil
		}
		if e.Kind != sse.KindData {
			continue
		}
		s.events++ // the members below are looked for in the form in which engines write them, without spaces
		s.keepsKV = s.keepsKV || bytes.Contains(e.Data, []byte(`"do_remote_decode":true`))
		if bytes.Contains(e.Data, []byte(`"completion_tokens":`)) {
			s.withUsage++
		}
		if bytes.Contains(e.Data, []byte(`"token_ids":[`)) {
			s.withIDs++
		}
	}
	return errors.New("the stream ended without [DONE]")
}

// checkAnswer checks what an answer says about itself: its end, its usage, its token ids. An error
// means that the answer is useless. Smaller findings are only reported.
func (t *tester) checkAnswer(d testedRank, s *stream) error {
	usage, hasUsage := s.filter.Usage()
	switch {
	case !s.filter.Finished():
		return errors.New("the stream ended without a finish_reason")
	case !hasUsage:
		return errors.New("the stream has no usage although the request asked for it, so tokens cannot be counted exactly")
	case usage.Completion != answerTokens && s.filter.FinishReason() == "length":
		return fmt.Errorf("usage says %d tokens of the %d asked for", usage.Completion, answerTokens)
	}
	if d.profile.Aggregated {
		t.report(d.name, OK, "computed a prompt of %d tokens and answered with %d", usage.Prompt, usage.Completion)
		t.checkCached(d, usage.Cached)
	} else {
		t.report(d.name, OK, "decoded %d tokens of a hand-off", usage.Completion)
	}
	if s.keepsKV { // streams of vLLM 0.33 and later show this
		t.reportKVKept(d, true)
	}
	if isOn(d.profile.ContinuousUsage) && s.withUsage < s.events-1 { // one event may have no tokens, and so no usage
		t.report(d.name, Warn,
			"only %d of %d events carry usage; set continuous_usage: false in its profile, tokens are counted by their ids then", s.withUsage,
			s.events)
	}
	if isOn(d.profile.ReturnTokenIDs) && s.withIDs == 0 {
		t.report(d.name, Warn, "no token_ids though asked for; set return_token_ids: false in its profile (vLLM has them since 0.10.2)")
	}
	if drift, known := s.filter.Drift(); known && drift != 0 { // the tokens were counted wrongly while the answer came
		t.report(d.name, Warn, "counted %+d tokens against the engine's own final count", drift)
	}
	return nil
}

// checkCached warns if an engine does not report how many tokens of a prompt its prefix cache had:
// cached is -1 then.
func (t *tester) checkCached(p testedRank, cached int) {
	flag := "--enable-prompt-tokens-details"
	if p.profile.Connector == mooncake.SGLang {
		flag = "--enable-cache-report"
	}
	if cached < 0 {
		t.report(p.name, Warn, "cached_tokens are not reported; start it with %s", flag)
	}
}

// isOn says whether a setting is set to true; nil: it is not set.
func isOn(b *bool) bool { return b != nil && *b }

var (
	errCallback    = errors.New("its callback")
	errOtherEngine = errors.New("the other engine failed")
)

// sendConcurrently sends one prompt through two engines that work on it at the same time. It
// returns only the error of the engine that failed first, because that failure also ends the call
// to the other engine. With SGLang, both engines are then told to abort.
func (t *tester) sendConcurrently(ctx context.Context, p, d testedRank, q *query, id string) (got pairAnswer, prefillErr, decodeErr error) {
	rendezvous := upstream.NewRendezvous(id, q.endpoint, p.profile, p.target, p.ranks, d.profile, d.target)
	var callback <-chan metaserver.Callback // nil: the connector has no callbacks
	if p.profile.Connector != mooncake.SGLang {
		hosts := maps.Clone(t.hosts) // Read may still run when this function has returned, and learnHosts may change t.hosts then
		pending := t.callbacks.Expect(metaserver.Wanted{Rank: d.target.ID, Read: func(body []byte) (mooncake.Callback, error) {
			return d.profile.ReadCallback(body, rendezvous.RequestID, 0, 0, func(host string) bool { return hosts[host] })
		}})
		defer pending.StopWaiting(0)
		rendezvous.Metaserver, callback = pending.URL, pending.Received()
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	prefillEnded := make(chan struct{})
	go func() {
		defer close(prefillEnded)
		if got.ProbeAnswer, prefillErr = t.prefillConcurrently(ctx, p, d, q, rendezvous, callback); prefillErr != nil {
			cancel(errOtherEngine)
		}
	}()
	got.decodeCount, decodeErr = t.answer(ctx, d, q, id, d.profile.EarlyDecode(&q.body, q.changes, rendezvous, "", true, nil))
	if decodeErr != nil {
		cancel(errOtherEngine)
	}
	<-prefillEnded
	switch {
	case errors.Is(prefillErr, errCallback): // the decode engine makes the callback, so the error is the decode engine's
		prefillErr, decodeErr = nil, prefillErr
	case errors.Is(decodeErr, errOtherEngine): // only a consequence of the prefill engine's error
		decodeErr = nil
	case errors.Is(prefillErr, errOtherEngine): // only a consequence of the decode engine's error
		prefillErr = nil
	}
	failed := prefillErr != nil || decodeErr != nil
	if failed && p.profile.Connector == mooncake.SGLang { // SGLang engines may not notice closed connections
		_ = upstream.Abort(t.client, p.target, id, zap.NewNop())
		_ = upstream.Abort(t.client, d.target, id, zap.NewNop())
	}
	return got, prefillErr, decodeErr
}

// prefillConcurrently sends the prefill request of sendConcurrently and reads its answer to the
// end. If the connector has callbacks, it waits for the callback of the decode engine first.
// callback is nil if the connector has none.
func (t *tester) prefillConcurrently(ctx context.Context, p, d testedRank, q *query, r *mooncake.Rendezvous,
	callback <-chan metaserver.Callback) (answer mooncake.ProbeAnswer, err error) {
	if callback != nil {
		select {
		case came := <-callback:
			if came.Err != nil {
				return answer, fmt.Errorf("%w is of no use: %w", errCallback, came.Err)
			}
			for _, key := range came.Unknown {
				t.report(d.name, Warn, "its callback has the key %q, which this evenkeel does not know; it holds no address, and the prefill engine "+
					"gets it as it is", key)
			}
			r.Callback = came.KV
		case <-time.After(t.cfg.Bind.CallbackTimeout):
			return answer, fmt.Errorf("%w did not come within %v; it must reach %s, see bind.advertise", errCallback,
				t.cfg.Bind.CallbackTimeout, t.callbacks.URL())
		case <-ctx.Done():
			return answer, context.Cause(ctx)
		}
	}
	text, err := t.send(ctx, p, q, lifecycle.Prefill, r.RID, p.profile.EarlyProbe(&q.body, q.changes, r, true, nil))
	if err != nil {
		return answer, err
	}
	return p.profile.ReadEarlyProbe(text)
}

// listen starts a listener for the callbacks of decode engines, if the config has an address for it
// and the caller has passed no listener of its own.
func (t *tester) listen(ctx context.Context) (stop func()) {
	callsBack := func(name string) bool { // says whether decode engines with this profile call back
		p := t.cfg.Profiles[name]
		return p.Connector == mooncake.AscendLayerwise
	}
	mayListen := t.callbacks == nil && t.cfg.Bind.Listen != ""
	if !mayListen || !slices.ContainsFunc(t.cfg.ProfilesInUse("decode"), callsBack) {
		return func() {}
	}
	callers := map[netip.Addr]bool{} // addresses of decode engines, which may call back if bind.allow is empty
	for _, host := range t.cfg.CallbackHosts() {
		addrs, _ := net.DefaultResolver.LookupNetIP(ctx, "ip", host) // a host that does not resolve cannot make callbacks
		for _, a := range addrs {
			callers[a.Unmap()] = true
		}
	}
	s := metaserver.New(metaserver.Config{
		Listen: t.cfg.Bind.Listen, Advertise: func() string { return t.cfg.Bind.Advertise }, Connections: t.cfg.Limits.Connections,
		Allowed:    func(a netip.Addr) bool { return t.cfg.Bind.Allows(a) || len(t.cfg.Bind.Allow) == 0 && callers[a] },
		Registerer: prometheus.NewRegistry(), Log: zap.NewNop(),
	})
	if err := s.Start(); err != nil {
		t.listenErr = err
		return func() {}
	}
	t.callbacks = s
	return s.Close
}

// skipUntestable says whether an engine cannot be tested with a prompt, because nothing would
// receive the callback. It reports such an engine.
func (t *tester) skipUntestable(s testedRank) bool {
	if s.profile.Connector != mooncake.AscendLayerwise || t.callbacks != nil {
		return false
	}
	why := "nothing listens at bind.listen for a test"
	if t.listenErr != nil {
		why = fmt.Sprintf("callbacks cannot be heard (%v); a proxy that runs there tests its engines itself when it starts", t.listenErr)
	}
	t.report(s.name, OK, "answers; no prompt was sent, because its decode rank would call back, and %s", why)
	return true
}
