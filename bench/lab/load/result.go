package load

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"text/tabwriter"
	"time"
)

// Result is what a run showed. Its JSON names are stable.
type Result struct {
	Loop        string `json:"loop"` // closed or open
	Concurrency int    `json:"concurrency,omitempty"`

	Sent      int          `json:"sent"`
	OK        int          `json:"ok"`
	Failed    int          `json:"failed"` // Wrong included
	Wrong     int          `json:"wrong"`  // answered, but not as a correct server does
	Cancelled int          `json:"cancelled"`
	Stopped   int          `json:"stopped"`
	Kinds     map[Kind]int `json:"kinds"`

	Cancels  map[Phase]Left `json:"cancels,omitempty"` // by the phase they aimed at
	Failures []Failure      `json:"failures,omitempty"`

	Start     time.Time `json:"start"`
	FirstSend time.Time `json:"first_send,omitzero"`
	Warm      time.Time `json:"warm,omitzero"` // when Config.Warm said yes
	LastSend  time.Time `json:"last_send,omitzero"`
	End       time.Time `json:"end"`

	All    Section  `json:"all"`
	Window *Section `json:"window,omitempty"` // from Warm to LastSend; nil when the run was too short
	Lag    Millis   `json:"lag_ms,omitzero"`  // open loop: how late requests were sent

	Events int64 `json:"events"` // SSE events
	// Of the requests whose answer had usage: prompt tokens as made, and as the
	// server counted them. Another tokenizer or chat template tells them apart.
	PromptTokens         int64 `json:"prompt_tokens"`
	ReportedPromptTokens int64 `json:"reported_prompt_tokens"`
}

// Section measures a span of time. OutputTokens were received in it; requests
// and latencies are those of requests sent in it that ended well. TTFT, TPOT
// and ITL are of streams only; ITL is between two events that brought tokens,
// so an event of several tokens counts once.
type Section struct {
	From         time.Time `json:"from"`
	To           time.Time `json:"to"`
	Seconds      float64   `json:"seconds"`
	Requests     int       `json:"requests"`
	RequestsPerS float64   `json:"requests_per_s"`
	OutputTokens int64     `json:"output_tokens"`
	TokensPerS   float64   `json:"tokens_per_s"`
	TTFT         Millis    `json:"ttft_ms"`
	TPOT         Millis    `json:"tpot_ms"`
	ITL          Millis    `json:"itl_ms"`
	E2E          Millis    `json:"e2e_ms"`
}

// Left says how far requests were that their client meant to leave.
type Left struct {
	Unanswered int `json:"unanswered"` // before the response head
	Headers    int `json:"headers"`    // after it, before the first token
	Streaming  int `json:"streaming"`  // after a token
	TooLate    int `json:"too_late"`   // the answer was complete, or failed, first
}

func (l *Left) count(kind Kind, x *exchange) {
	switch {
	case kind != Cancelled:
		l.TooLate++
	case !x.answered:
		l.Unanswered++
	case x.tokens == 0:
		l.Headers++
	default:
		l.Streaming++
	}
}

// Failure is one request that did not end well.
type Failure struct {
	Kind      Kind      `json:"kind"`
	Detail    string    `json:"detail"`
	Request   string    `json:"request"` // the X-Request-Id sent
	ID        string    `json:"id"`      // of the answer
	Chat      bool      `json:"chat"`    // else a completion
	Stream    bool      `json:"stream"`
	Prompt    int       `json:"prompt"`     // tokens
	Output    int       `json:"output"`     // tokens asked for
	Tokens    int       `json:"tokens"`     // received and right
	Answer    uint64    `json:"answer"`     // reftext's key of what should have come; 0 under CheckShape
	ElapsedMS float64   `json:"elapsed_ms"` // from sending to the failure
	SentAt    time.Time `json:"sent_at"`
}

func (f Failure) String() string {
	if f.Output == 0 { // of Config.Own
		return fmt.Sprintf("%s %s: %s", f.Request, f.Kind, f.Detail)
	}
	return fmt.Sprintf("%s %s: %s (%d of %d tokens, chat %v, stream %v, after %.0f ms)", f.Request, f.Kind, f.Detail, f.Tokens, f.Output,
		f.Chat, f.Stream, f.ElapsedMS)
}

func failureOf(a *ask, x *exchange, f *fault, requestID string) Failure {
	return Failure{Kind: f.kind, Detail: f.detail, Request: requestID, ID: string(x.follower.id), Chat: a.chat, Stream: a.stream,
		Prompt: a.req.Prompt, Output: a.req.Output, Tokens: x.tokens, Answer: x.follower.want.answer,
		ElapsedMS: float64(x.end.Sub(x.sent).Microseconds()) / 1e3, SentAt: x.sent}
}

// WriteTable prints the result for people.
func (r *Result) WriteTable(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', tabwriter.AlignRight)
	row := func(name string, m Millis) {
		fmt.Fprintf(w, "%s\t%d\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t\n", name, m.N, m.Mean, m.P50, m.P90, m.P95, m.P99, m.Max)
	}
	section := func(title string, s Section) {
		fmt.Fprintf(w, "%s: %.2f s, %d requests (%.1f/s), %d output tokens (%.0f/s)\n", title, s.Seconds, s.Requests, s.RequestsPerS,
			s.OutputTokens, s.TokensPerS)
		fmt.Fprint(w, "ms\tn\tmean\tp50\tp90\tp95\tp99\tmax\t\n")
		row("TTFT", s.TTFT)
		row("TPOT", s.TPOT)
		row("ITL", s.ITL)
		row("E2E", s.E2E)
		if s.To.Equal(r.End) && r.Loop == "open" {
			row("sent late", r.Lag)
		}
	}
	fmt.Fprintf(w, "%d sent: %d ok, %d failed (%d of them wrong), %d cancelled by plan, %d stopped\n", r.Sent, r.OK, r.Failed, r.Wrong,
		r.Cancelled, r.Stopped)
	section("whole run", r.All)
	if r.Window != nil {
		section("from the end of the warm-up to the last send", *r.Window)
	}
	for _, phase := range Phases() {
		if c, ok := r.Cancels[phase]; ok {
			fmt.Fprintf(w, "cancels aimed at %s: %d unanswered, %d after the head, %d streaming, %d too late\n", phase, c.Unanswered, c.Headers,
				c.Streaming, c.TooLate)
		}
	}
	if r.PromptTokens != r.ReportedPromptTokens {
		fmt.Fprintf(w, "the server counts %.3f prompt tokens for each of ours\n", float64(r.ReportedPromptTokens)/float64(r.PromptTokens))
	}
	for _, kind := range slices.Sorted(maps.Keys(r.Kinds)) {
		if kind.Failed() {
			fmt.Fprintf(w, "failed: %d %s\n", r.Kinds[kind], kind)
		}
	}
	for _, f := range r.Failures {
		fmt.Fprintf(w, "  %s %s: %s (%d of %d tokens)\n", f.Request, f.Kind, f.Detail, f.Tokens, f.Output)
	}
	return w.Flush()
}
