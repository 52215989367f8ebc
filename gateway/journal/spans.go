package journal

import (
	"cmp"
	"math"
	"net/http"
	"strconv"
	"strings"

	"go.opentelemetry.io/otel/attribute"

	"evenkeel/dispatcher"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/tracing"
	"evenkeel/internal/words"
	"evenkeel/prefill"
)

// spanView shows a request as the spans of a trace, which its record holds. Names that begin with
// gen_ai, http, url or error are OpenTelemetry's semantic conventions (GenAI as of 1.41); the
// others are evenkeel's own. It is opened only for requests whose spans are recorded.
type spanView struct{}

// openSpans is for a request whose sender was identified.
func openSpans(r *Record) view {
	spanArrived(r)
	return spanView{}
}

// For isCall of Span.Child.
const (
	internalStep = false
	callToServer = true // to an engine or another region
)

// show: the request's span has a child for the parsing and one per attempt; an attempt has its
// phases and its call, which has the phases that belong to it. Methods of a nil span do nothing.
func (spanView) show(r *Record, e Event) {
	current := &r.attempt
	switch e.Kind {
	case Parsing:
		current.phaseSpan = r.span.Child("parse", internalStep)
	case Parsed:
		current.phaseSpan.End()
		current.phaseSpan = nil
		if e.Req != nil {
			spanParsed(r, e.Req)
		}
	case Attempted:
		current.span = r.span.Child("attempt", internalStep)
		spanAttempt(current.span, current.number, r.leg)
	case Entered:
		endPhaseSpan(current, &e)
		if e.Call != "" {
			current.call = current.span.Child(e.Call, callToServer)
		}
		current.phaseSpan = beginPhaseSpan(current, e.Phase)
	case Chose:
		spanChose(current.phaseSpan, e.Lease)
	case Prefilled:
		spanPrefilled(current.phaseSpan, e.Tokens, e.Cached)
	case Placed, PlacedLocally:
		// phaseSpan is nil if the request was bound at once.
		addAdmitEvent(cmp.Or(current.phaseSpan, current.span), e.Slot)
	case First:
		current.call.Event("first token")
	case AttemptEnded:
		endPhaseSpan(current, &e)
		spanFailed(current.call, e.Answer, e.Cause)
		current.call.End()
		spanFailed(current.span, e.Answer, e.Cause)
		current.span.End()
		current.call, current.span = nil, nil
	case ended:
		spanEnded(r, e.Answer)
	}
}

// operation is gen_ai.operation.name for an endpoint.
func operation(path string) string {
	switch path {
	case "/v1/chat/completions", "/v1/responses", "/v1/messages":
		return "chat"
	case "/v1/completions":
		return "text_completion"
	}
	// For embeddings this is the conventions' name; they have none for other endpoints.
	return path[strings.LastIndexByte(path, '/')+1:]
}

func spanArrived(r *Record) {
	r.span.Set(
		attribute.String("gen_ai.operation.name", operation(r.path)),
		attribute.String("gen_ai.provider.name", "evenkeel"),
		attribute.String("http.request.method", "POST"),
		attribute.String("http.route", r.path),
		attribute.String("url.path", r.path),
		attribute.String("evenkeel.request.id", r.ID),
	)
	for name, value := range map[string]string{"evenkeel.client.request.id": r.ClientID, "evenkeel.key": r.Key,
		"evenkeel.geo.origin": r.Origin} {
		if value != "" {
			r.span.Set(attribute.String(name, value))
		}
	}
}

func spanParsed(r *Record, req *openai.Request) {
	s, operation, model := r.span, operation(r.path), words.Clip(req.Model)
	s.Rename(operation + " " + model)
	s.Set(attribute.String("gen_ai.request.model", model), attribute.Bool("gen_ai.request.stream", req.Stream))
	if req.MaxTokens > 0 {
		s.Set(attribute.Int("gen_ai.request.max_tokens", req.MaxTokens))
	}
}

// spanAttempt: leg is empty for the whole request.
func spanAttempt(s *tracing.Span, number int, leg string) {
	s.Set(attribute.Int("evenkeel.attempt", number))
	if leg != "" {
		s.Set(attribute.String("evenkeel.leg", leg))
	}
}

// beginPhaseSpan: a prefill outside of a decode call is itself a call, to a prefill engine.
func beginPhaseSpan(current *attempt, p Phase) *tracing.Span {
	name, isCall := stepNames[p], internalStep
	if p == Prefill && current.call == nil {
		name, isCall = "probe", callToServer
	}
	return cmp.Or(current.call, current.span).Child(name, isCall)
}

func endPhaseSpan(current *attempt, e *Event) {
	spanFailed(current.phaseSpan, e.Answer, e.Cause)
	current.phaseSpan.End()
	current.phaseSpan = nil
}

// stepNames: a Prefill outside a decode call is named probe instead.
var stepNames = map[Phase]string{Queued: "queue", Prefill: "local_prefill", Pooled: "pool_wait", Transfer: "transfer", Streaming: "relay"}

// spanChose says which prefill engine was chosen, and why. Others are this proxy's probes that were
// not answered there.
func spanChose(s *tracing.Span, l *prefill.Lease) {
	list := []attribute.KeyValue{
		attribute.String("evenkeel.prefill.engine", l.Candidate.ID),
		attribute.String("evenkeel.prefill.policy", l.Policy),
		attribute.Int("evenkeel.prefill.hit_tokens", l.HitTokens),
		attribute.Int("evenkeel.prefill.probes_ahead", l.Others),
	}
	if trace := l.Trace; trace != nil && trace.Reason != "" { // nil or empty: not traced
		var best []string
		for _, c := range trace.Best {
			score := math.NaN()
			if c.Score != nil {
				score = *c.Score
			}
			best = append(best, nameAndScore(c.Candidate, score))
		}
		list = append(list, attribute.String("evenkeel.prefill.reason", trace.Reason),
			attribute.Int("evenkeel.prefill.eligible", trace.Eligible), attribute.StringSlice("evenkeel.prefill.best", best))
	}
	s.Event("choose", list...)
}

// nameAndScore: NaN means that scores were not compared.
func nameAndScore(name string, score float64) string {
	if math.IsNaN(score) {
		return name + "=?"
	}
	return name + "=" + strconv.FormatFloat(score, 'g', 6, 64)
}

// spanPrefilled: cached below 0 is not known.
func spanPrefilled(s *tracing.Span, prompt, cached int) {
	s.Set(attribute.Int("gen_ai.usage.input_tokens", prompt))
	if cached >= 0 {
		s.Set(attribute.Int("gen_ai.usage.cache_read.input_tokens", cached))
	}
}

// addAdmitEvent says to which decode rank the request was admitted, and why. The state at that
// moment is in the trace, if there is one.
func addAdmitEvent(s *tracing.Span, slot *dispatcher.Slot) {
	list := []attribute.KeyValue{
		attribute.String("evenkeel.decode.rank", slot.WorkerName),
		attribute.String("evenkeel.decode.group", slot.Group),
		attribute.String("evenkeel.decode.policy", slot.Policy),
		attribute.String("evenkeel.decode.stage", stageOf(slot)),
		attribute.Float64("evenkeel.decode.score", slot.Score),
		attribute.Float64("evenkeel.decode.decide_ms", ms(slot.Decide)),
	}
	if slot.NewTokens > 0 { // the rank computes a part of the prompt itself
		list = append(list, attribute.Int("evenkeel.decode.local_prefill_tokens", int(slot.NewTokens)))
	}
	if trace := slot.Trace; trace != nil {
		var best []string
		for _, w := range trace.Best() {
			best = append(best, nameAndScore(w.Name, w.Score))
		}
		list = append(list, attribute.Int("evenkeel.decode.waiting", trace.Waiting), attribute.Int("evenkeel.decode.able", trace.Able),
			attribute.Int64("evenkeel.decode.kv_tokens", trace.KVTokens), attribute.StringSlice("evenkeel.decode.best", best))
	}
	s.Event("admit", list...)
}

// boardStages are the names of Slot.Stage.
var boardStages = [...]string{"guard", "single", "subset"}

func stageOf(s *dispatcher.Slot) string {
	if int(s.Stage) < len(boardStages) {
		return boardStages[s.Stage]
	}
	return ""
}

// spanFailed sets error attributes; answer nil: nothing failed. A client's mistake (4xx) does not
// mark the span as failed. A 429 does, because a limit of the proxy was reached.
func spanFailed(s *tracing.Span, answer *openai.Error, cause string) {
	if answer == nil || !s.Recording() {
		return
	}
	kind := Outcome(answer)
	if clientMistake := answer.Status/100 == 4 && answer.Status != http.StatusTooManyRequests; clientMistake {
		s.Set(attribute.String("error.type", kind), attribute.String("evenkeel.cause", words.Clip(cause)))
		return
	}
	s.Fail(kind, words.Clip(cause))
}

// spanEnded: in spans, the conventions name the time to the first event
// gen_ai.response.time_to_first_chunk, in metrics gen_ai.server.time_to_first_token.
func spanEnded(r *Record, fail *openai.Error) {
	status := http.StatusOK
	if fail != nil && r.TTFTMs == 0 { // otherwise the answer had begun with 200
		status = fail.Status
	}
	r.span.Set(
		attribute.String("evenkeel.outcome", r.Outcome),
		attribute.Int("evenkeel.attempts", r.Attempts),
		attribute.Int("http.response.status_code", status),
		attribute.Int("gen_ai.usage.input_tokens", r.PromptTokens),
		attribute.Int("gen_ai.usage.output_tokens", r.OutputTokens),
		attribute.Int("gen_ai.usage.cache_read.input_tokens", r.CachedTokens),
	)
	for name, value := range map[string]string{
		"gen_ai.response.model": words.Clip(r.Model), "evenkeel.prefill.engine": r.Prefill, "evenkeel.decode.rank": r.Rank, "evenkeel.decode.policy": r.Policy,
		"evenkeel.engine": r.Engine, "evenkeel.route": r.Route, "evenkeel.geo.peer": r.Peer,
	} {
		if value != "" {
			r.span.Set(attribute.String(name, value))
		}
	}
	if r.TTFTMs > 0 {
		r.span.Set(attribute.Float64("gen_ai.response.time_to_first_chunk", r.TTFTMs/1000))
	}
	spanFailed(r.span, fail, r.Outcome)
}
