package journal

import "time"

// A LogEntry is one line of the request log: what is known about a request, without the text or the
// tokens of its prompt. `evenkeel fit` reads the request log.
type LogEntry struct {
	ID           string    `json:"id"`
	ClientID     string    `json:"client_id,omitempty"` // the client's own X-Request-Id
	TraceID      string    `json:"trace_id,omitempty"`
	Model        string    `json:"model"`
	Key          string    `json:"key"`
	PromptKey    string    `json:"prompt_key,omitempty"` // keyed hash, 16 hex digits; only if the predictor distinguishes prompts
	Arrival      time.Time `json:"arrival"`
	Prefill      string    `json:"prefill"`
	Rank         string    `json:"rank"`
	Policy       string    `json:"policy"`
	PromptTokens int       `json:"prompt_tokens"`
	CachedTokens int       `json:"cached_tokens"`
	Route        string    `json:"route,omitempty"`                // Disaggregated, Aggregated, Local or Passed; empty: it reached no engine
	Engine       string    `json:"engine,omitempty"`               // the engine of a Passed request
	LocalTokens  int       `json:"local_prefill_tokens,omitempty"` // prompt tokens that the decode rank had to compute, as predicted
	OutputTokens int       `json:"output_tokens"`
	ProbeBS      int       `json:"probe_bs"` // other prefill requests on the engine when this one was sent
	QueueMs      float64   `json:"queue_ms"`
	ProbeMs      float64   `json:"probe_ms"`
	WaitMs       float64   `json:"wait_ms"`
	TransferMs   float64   `json:"transfer_ms"`
	TTFTMs       float64   `json:"ttft_ms"`
	Bind         string    `json:"bind,omitempty"`        // Late or AtArrival; empty: the request was bound to no rank
	BindMs       float64   `json:"bind_ms,omitempty"`     // time from arrival until the request was bound, if Bind is AtArrival
	CallbackMs   float64   `json:"callback_ms,omitempty"` // how long the decode engine took to say where the KV goes; 0: it did not
	TotalMs      float64   `json:"total_ms"`
	Attempts     int       `json:"attempts"`
	Inexact      bool      `json:"inexact,omitempty"` // a broken-off answer was continued from its text, which the next engine tokenised again
	Outcome      string    `json:"outcome"`
	Peer         string    `json:"peer,omitempty"`   // another proxy (a peer) to which the request was forwarded
	Origin       string    `json:"origin,omitempty"` // the proxy that forwarded the request; empty: a client sent it

	PrefillPolicy string `json:"-"` // the policy that chose the prefill engine
	HitTokens     int    `json:"-"` // prompt tokens that the policy expected in the engine's prefix cache
}

// Values of LogEntry.Route.
const (
	Disaggregated = "disaggregated"
	Aggregated    = "aggregated" // one rank prefills and decodes
	Local         = "local-prefill"
	Passed        = "passed-through" // one engine gets the whole request as it came
)

// Values of LogEntry.Bind: when the request was bound to its decode rank.
const (
	Late      = "late"    // after the prefill
	AtArrival = "arrival" // before the prefill
)

// AddLeg adds the facts of one leg. Tokens and attempts are summed; of times and ProbeBS the
// largest counts, of TTFT the shortest, because the client sees the first event of any leg.
// Engines, policies, Bind and route are those of the last leg; a leg without a route keeps the
// earlier one.
func (f *LogEntry) AddLeg(leg *LogEntry) {
	f.PromptTokens += leg.PromptTokens
	f.CachedTokens += leg.CachedTokens
	f.OutputTokens += leg.OutputTokens
	f.ProbeBS = max(f.ProbeBS, leg.ProbeBS)
	f.QueueMs = max(f.QueueMs, leg.QueueMs)
	f.ProbeMs = max(f.ProbeMs, leg.ProbeMs)
	f.WaitMs = max(f.WaitMs, leg.WaitMs)
	f.TransferMs = max(f.TransferMs, leg.TransferMs)
	if leg.TTFTMs > 0 && (f.TTFTMs == 0 || leg.TTFTMs < f.TTFTMs) { // 0: no event came
		f.TTFTMs = leg.TTFTMs
	}
	f.Attempts += leg.Attempts
	f.Inexact = f.Inexact || leg.Inexact
	f.LocalTokens += leg.LocalTokens
	if leg.Route != "" {
		f.Route = leg.Route
	}
	f.Bind = leg.Bind
	f.BindMs = max(f.BindMs, leg.BindMs)
	f.CallbackMs = max(f.CallbackMs, leg.CallbackMs)
	f.Prefill, f.Rank, f.Policy = leg.Prefill, leg.Rank, leg.Policy
	f.PrefillPolicy, f.HitTokens = leg.PrefillPolicy, leg.HitTokens
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
