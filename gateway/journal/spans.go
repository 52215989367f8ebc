package journal

import (
	"cmp"
	"net/http"
	"strconv"
	"strings"

	"go.opentelemetry.io/otel/attribute"

	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/tracing"
	"evenkeel/internal/words"
)

// This file sets the attributes and events of spans. All functions but spanFailed are only called for spans that are recorded. Names that
// begin with gen_ai, http, url or error are OpenTelemetry's semantic conventions (GenAI as of 1.41). The other names are evenkeel's own.

// operation returns the value of gen_ai.operation.name for the endpoint with that path.
func operation(path string) string {
	switch path {
	case "/v1/chat/completions", "/v1/responses", "/v1/messages":
		return "chat"
	case "/v1/completions":
		return "text_completion"
	}
	return path[strings.LastIndexByte(path, '/')+1:] // the conventions also have embeddings, and no names for other endpoints
}

// spanArrived notes what is known of a request when it arrives.
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

// spanParsed notes what the body of a request says, and names its span by the operation and the model.
func spanParsed(r *Record, req *openai.Request) {
	s, operation, model := r.span, operation(r.path), words.Clip(req.Model)
	s.Name(operation + " " + model)
	s.Set(attribute.String("gen_ai.request.model", model), attribute.Bool("gen_ai.request.stream", req.Stream))
	if req.MaxTokens > 0 {
		s.Set(attribute.Int("gen_ai.request.max_tokens", req.MaxTokens))
	}
}

func spanAttempt(s *tracing.Span, number int, leg string) {
	s.Set(attribute.Int("evenkeel.attempt", number))
	if leg != "" {
		s.Set(attribute.String("evenkeel.leg", leg))
	}
}

// spanStep begins the span of a phase, within the call that the phase belongs to.
func spanStep(n *attempt, p Phase) *tracing.Span {
	name, calls := stepNames[p], false
	if p == Prefill && n.call == nil {
		name, calls = "probe", true
	}
	return cmp.Or(n.call, n.span).Child(name, calls)
}

// stepNames are the names of phases in spans. A Prefill outside a decode call is named probe instead.
var stepNames = map[Phase]string{Queued: "queue", Prefill: "local_prefill", Pooled: "pool_wait", Transfer: "transfer", Streaming: "relay"}

// spanChose notes which prefill engine was chosen, and why.
func spanChose(s *tracing.Span, p *receipt.Prefill) {
	list := []attribute.KeyValue{
		attribute.String("evenkeel.prefill.engine", p.Candidate),
		attribute.String("evenkeel.prefill.policy", p.Policy),
		attribute.Int("evenkeel.prefill.hit_tokens", p.Hit),
		attribute.Int("evenkeel.prefill.probes_ahead", p.Ahead),
	}
	if p.Reason != "" {
		list = append(list, attribute.String("evenkeel.prefill.reason", p.Reason), attribute.Int("evenkeel.prefill.eligible", p.Eligible),
			attribute.StringSlice("evenkeel.prefill.best", scores(p.Best)))
	}
	s.Event("choose", list...)
}

// scores returns choices as name=score.
func scores(best []receipt.Choice) (list []string) {
	for _, c := range best {
		score := "?"
		if c.Score != nil {
			score = strconv.FormatFloat(*c.Score, 'g', 6, 64)
		}
		list = append(list, c.Name+"="+score)
	}
	return list
}

func spanPrefilled(s *tracing.Span, prompt, cached int) {
	s.Set(attribute.Int("gen_ai.usage.input_tokens", prompt))
	if cached >= 0 {
		s.Set(attribute.Int("gen_ai.usage.cache_read.input_tokens", cached))
	}
}

// spanBound notes which decode rank was chosen, and why.
func spanBound(s *tracing.Span, d *receipt.Decode) {
	list := []attribute.KeyValue{
		attribute.String("evenkeel.decode.rank", d.Rank),
		attribute.String("evenkeel.decode.group", d.Group),
		attribute.String("evenkeel.decode.policy", d.Policy),
		attribute.String("evenkeel.decode.stage", d.Stage),
		attribute.Float64("evenkeel.decode.score", d.Score),
		attribute.Float64("evenkeel.decode.decide_ms", d.Decide),
	}
	if d.Local > 0 {
		list = append(list, attribute.Int("evenkeel.decode.local_prefill_tokens", d.Local))
	}
	if d.Best != nil {
		list = append(list, attribute.Int("evenkeel.decode.waiting", d.Waiting), attribute.Int("evenkeel.decode.able", d.Able),
			attribute.Int64("evenkeel.decode.kv_tokens", d.KVTokens), attribute.StringSlice("evenkeel.decode.best", scores(d.Best)))
	}
	s.Event("admit", list...)
}

// spanFailed notes a failure; answer nil: nothing failed. A mistake of the client does not mark the span as failed.
func spanFailed(s *tracing.Span, answer *openai.Error, cause string) {
	if answer == nil || !s.Recording() {
		return
	}
	kind := Outcome(answer)
	if answer.Status/100 == 4 && answer.Status != http.StatusTooManyRequests {
		s.Set(attribute.String("error.type", kind), attribute.String("evenkeel.cause", words.Clip(cause)))
		return
	}
	s.Fail(kind, words.Clip(cause))
}

// spanEnded notes how the request ended. The conventions name the time to the first event gen_ai.server.time_to_first_token in metrics, but
// differently in spans.
func spanEnded(r *Record, fail *openai.Error, status int) {
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
