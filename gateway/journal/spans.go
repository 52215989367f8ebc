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

// spanView is the view that shows a request as the spans of a trace. It has no fields, because the record of a request holds its spans. All
// functions of this file but spanFailed are only called for requests whose spans are recorded. Names that begin with gen_ai, http, url or
// error are OpenTelemetry's semantic conventions (GenAI as of 1.41). The other names are evenkeel's own.
type spanView struct{}

// openSpans begins the spans of a request whose sender has been identified.
func openSpans(r *Record) view {
	spanArrived(r)
	return spanView{}
}

// The kinds of spans, for the argument isCall of Span.Child.
const (
	internalStep = false // the proxy itself does the step
	callToServer = true  // the step is a call to an engine or another region
)

// show adds an event as a span, or as a part of a span: the span of the request has a child for the parsing and one per attempt, an attempt
// has its phases and its call to a decode engine or another region, and that call has the phases that belong to it. Methods of a nil span
// do nothing.
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
		addAdmitEvent(cmp.Or(current.phaseSpan, current.span), e.Slot) // phaseSpan is nil if the request was bound at once
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

// operation returns the value of gen_ai.operation.name for the endpoint with that path.
func operation(path string) string {
	switch path {
	case "/v1/chat/completions", "/v1/responses", "/v1/messages":
		return "chat"
	case "/v1/completions":
		return "text_completion"
	}
	// For embeddings, the last part of the path is the conventions' name. They have no names for other endpoints.
	return path[strings.LastIndexByte(path, '/')+1:]
}

// spanArrived sets the span attributes that are known when a request arrives.
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

// spanParsed sets the span attributes that come from the body, and names the span by the operation and the model.
func spanParsed(r *Record, req *openai.Request) {
	s, operation, model := r.span, operation(r.path), words.Clip(req.Model)
	s.Rename(operation + " " + model)
	s.Set(attribute.String("gen_ai.request.model", model), attribute.Bool("gen_ai.request.stream", req.Stream))
	if req.MaxTokens > 0 {
		s.Set(attribute.Int("gen_ai.request.max_tokens", req.MaxTokens))
	}
}

// spanAttempt sets the number of an attempt, and the leg to which the attempt belongs; empty: the whole request.
func spanAttempt(s *tracing.Span, number int, leg string) {
	s.Set(attribute.Int("evenkeel.attempt", number))
	if leg != "" {
		s.Set(attribute.String("evenkeel.leg", leg))
	}
}

// beginPhaseSpan begins the span of a phase, within the call that the phase belongs to. A prefill outside of a call to a decode engine is
// itself a call to a prefill engine.
func beginPhaseSpan(current *attempt, p Phase) *tracing.Span {
	name, isCall := stepNames[p], internalStep
	if p == Prefill && current.call == nil { // the prefill is a call of its own
		name, isCall = "probe", callToServer
	}
	return cmp.Or(current.call, current.span).Child(name, isCall)
}

// endPhaseSpan ends the span of the attempt's present phase, and marks it as failed if the event says so.
func endPhaseSpan(current *attempt, e *Event) {
	spanFailed(current.phaseSpan, e.Answer, e.Cause)
	current.phaseSpan.End()
	current.phaseSpan = nil
}

// stepNames are the names of phases in spans. A Prefill outside a decode call is named probe instead.
var stepNames = map[Phase]string{Queued: "queue", Prefill: "local_prefill", Pooled: "pool_wait", Transfer: "transfer", Streaming: "relay"}

// spanChose adds an event to a span that says which prefill engine was chosen, and why. A probe is a call that lets an engine prefill a
// prompt; Others counts this proxy's probes at the engine that were not answered when this one was added.
func spanChose(s *tracing.Span, l *prefill.Lease) {
	list := []attribute.KeyValue{
		attribute.String("evenkeel.prefill.engine", l.Candidate.ID),
		attribute.String("evenkeel.prefill.policy", l.Policy),
		attribute.Int("evenkeel.prefill.hit_tokens", l.HitTokens),
		attribute.Int("evenkeel.prefill.probes_ahead", l.Others),
	}
	if trace := l.Trace; trace != nil && trace.Reason != "" { // nil or empty: the decision was not traced
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

// nameAndScore returns a choice as name=score; score NaN: scores were not compared.
func nameAndScore(name string, score float64) string {
	if math.IsNaN(score) {
		return name + "=?"
	}
	return name + "=" + strconv.FormatFloat(score, 'g', 6, 64)
}

// spanPrefilled sets the number of a prompt's tokens, as the engine counted them; cached below 0: the engine did not say how many were
// cached.
func spanPrefilled(s *tracing.Span, prompt, cached int) {
	s.Set(attribute.Int("gen_ai.usage.input_tokens", prompt))
	if cached >= 0 {
		s.Set(attribute.Int("gen_ai.usage.cache_read.input_tokens", cached))
	}
}

// addAdmitEvent adds an event to a span that says to which decode rank the request was admitted, and why. The trace of the decision has the
// state at that moment: how many requests waited, how many ranks could have taken this one (Able), the KV tokens of the chosen rank, and
// the best ranks. Without a trace, the event lacks these.
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

// boardStages has the names of the stages of a decision by Slot.Stage, which says which stage chose the decode rank.
var boardStages = [...]string{"guard", "single", "subset"}

// stageOf returns the name of the stage that chose the decode rank of a slot; empty: no stage did.
func stageOf(s *dispatcher.Slot) string {
	if int(s.Stage) < len(boardStages) {
		return boardStages[s.Stage]
	}
	return ""
}

// spanFailed sets the error attributes of a span; answer nil: nothing failed. A mistake of the client, which is a 4xx but not a 429, does
// not mark the span as failed. A 429 does, because a limit of the proxy was reached.
func spanFailed(s *tracing.Span, answer *openai.Error, cause string) {
	if answer == nil || !s.Recording() { // a span that is not recorded needs no attributes
		return
	}
	kind := Outcome(answer)
	if clientMistake := answer.Status/100 == 4 && answer.Status != http.StatusTooManyRequests; clientMistake {
		s.Set(attribute.String("error.type", kind), attribute.String("evenkeel.cause", words.Clip(cause)))
		return
	}
	s.Fail(kind, words.Clip(cause))
}

// spanEnded sets the attributes that say how the request ended. In spans, the conventions name the time to the first event
// gen_ai.response.time_to_first_chunk, in metrics gen_ai.server.time_to_first_token.
func spanEnded(r *Record, fail *openai.Error) {
	status := http.StatusOK
	if fail != nil && r.TTFTMs == 0 { // otherwise the answer had begun with status 200
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
