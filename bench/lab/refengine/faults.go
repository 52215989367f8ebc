package refengine

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"
)

// Fault is a thing an engine can do wrong on demand.
type Fault string

// The faults. A phase is where Hang and Reset strike.
const (
	Hang          Fault = "hang"           // silence until the client leaves
	Reset         Fault = "reset"          // the connection is reset
	Reject        Fault = "reject"         // 400 after validation passed elsewhere; Cleanup frees the prefill's KV
	Busy          Fault = "busy"           // 503
	Throttle      Fault = "throttle"       // 429 with Retry-After
	Internal      Fault = "internal"       // 500
	Status        Fault = "status"         // Value is the status
	ErrorEvent    Fault = "error-event"    // error event and [DONE] after AfterTokens
	Error200      Fault = "error-200"      // JSON error under status 200
	SilentEnd     Fault = "silent-end"     // the stream just ends after AfterTokens, no finish, no [DONE]
	MissingFinish Fault = "missing-finish" // [DONE] but no finish_reason: after AfterTokens, the role chunk (Role) or the whole text
	MissingDone   Fault = "missing-done"   // everything but [DONE]
	FinishError   Fault = "finish-error"   // finish_reason "error" after AfterTokens
	Recomputed    Fault = "recomputed"     // stop_reason "recomputed" after AfterTokens, Text: with a last token's text
	Garbage       Fault = "garbage"        // 200 with a body that is no JSON and no event
	WrongType     Fault = "wrong-type"     // the right body under content type text/plain
	FrozenGauges  Fault = "frozen-gauges"  // /metrics stands still; Value > 0: KV usage stands there
	SlowPages     Fault = "slow-pages"     // /metrics and /health take Delay while the engine has requests, as a busy API server's do
	// the engine's core stands still for Delay from when the rule is set: no step, no pull, no
	// heartbeat, while its API server answers
	Standstill   Fault = "standstill"
	Slow         Fault = "slow"          // Delay before the headers and before every event; with Tokens before the first so many only
	Swallow      Fault = "swallow"       // a parser keeps Tokens tokens (default 4) back from AfterTokens on: no chunk, then one
	Comments     Fault = "comments"      // ": keep-alive" before every event
	CRLF         Fault = "crlf"          // events end in \r\n\r\n
	SplitBytes   Fault = "split-bytes"   // one byte a chunk and a write
	UsageAlways  Fault = "usage-always"  // usage on every chunk, asked for or not
	EOSFirst     Fault = "eos-first"     // the first token is EOS: a probe without min_tokens or ignore_eos hands nothing off
	NullHandoff  Fault = "null-handoff"  // a probe's kv_transfer_params are null
	EmptyBlocks  Fault = "empty-blocks"  // a probe's block ids are empty, as after a preemption
	StringBlocks Fault = "string-blocks" // a probe's block ids are strings
	NoRequestID  Fault = "no-request-id" // a probe's hand-off does not name its request, as those of old versions
	WrongHost    Fault = "wrong-host"    // a probe points at 203.0.113.7
	WrongKey     Fault = "wrong-key"     // the KV pulled is another prompt's
	LostKV       Fault = "lost-kv"       // a pull finds nothing, and the decode engine computes the prompt without an error

	// Of a request that is bound to its decode engine before the prefill.
	NoCallback      Fault = "no-callback"       // a layerwise decode engine never calls back
	CallbackTwice   Fault = "callback-twice"    // it calls back twice
	CallbackLate    Fault = "callback-late"     // it calls back Delay after it has the blocks
	CallbackBadHost Fault = "callback-bad-host" // its callback names 203.0.113.7
	CallbackShortID Fault = "callback-short-id" // its callback's request id lacks its last nine characters
	CallbackNewKey  Fault = "callback-new-key"  // its callback has a key that only later versions send
	CallbackEmpty   Fault = "callback-empty"    // it needs nothing, as if it had the whole prompt: no block ids, and no wait
	// a prefill of SGLang is aborted in its transfer and answers 200, length, after delay_ms; the KV
	// is incomplete
	PrefillAbort200 Fault = "prefill-abort-200"
	DoneLost        Fault = "done-lost"      // the prefill engine's last word that the KV is written gets lost
	FailedSent      Fault = "failed-sent"    // the prefill engine tells the decode engine that it failed
	TransferFails   Fault = "transfer-fails" // the KV does not come across: the decode engine says so, and SGLang's prefill engine, too
	MaskedRank      Fault = "masked-rank"    // elastic EP has taken the rank out of SGLang's service: a request that names it ends the server
	BootstrapSlow   Fault = "bootstrap-slow" // a prefill engine of SGLang looks for its decode engine after Delay only

	// Of the engine, for as long as the rule is in force. They are what vLLM does with
	// --enable-elastic-ep and --enable-fault-tolerance.
	Scaling Fault = "scaling" // the number of its ranks changes: 503 at every path, from 0.33 on but for /health
	Retired Fault = "retired" // the same of a rank that the others go on without
	// only Value ranks are left behind its port: the requests of the others are aborted, and who names
	// one gets 400
	FewerRanks Fault = "fewer-ranks"
	// its core has met a fault: its requests are aborted, and new ones wait until the rule is gone, as
	// after a recovery
	CoreFault Fault = "core-fault"
)

// The phases of Hang and Reset.
const (
	PhaseAccept        = "accept"         // Reset only: before a request was read
	PhaseBeforeHeaders = "before-headers" // the default
	PhaseAfterHeaders  = "after-headers"
	PhaseMidStream     = "mid-stream"   // after AfterTokens
	PhaseInsideChunk   = "inside-chunk" // Reset only: a chunk was announced and half of it sent
)

var faultNames = []string{string(Hang), string(Reset), string(Reject), string(Busy), string(Throttle), string(Internal), string(Status),
	string(ErrorEvent), string(Error200), string(SilentEnd), string(MissingFinish), string(MissingDone), string(FinishError),
	string(Recomputed), string(Garbage), string(WrongType), string(FrozenGauges), string(SlowPages), string(Standstill), string(Slow),
	string(Swallow), string(Comments),
	string(CRLF), string(SplitBytes), string(UsageAlways), string(EOSFirst), string(NullHandoff), string(EmptyBlocks),
	string(StringBlocks), string(NoRequestID), string(WrongHost), string(WrongKey), string(LostKV)}

var boundFaultNames = []string{string(NoCallback), string(CallbackTwice), string(CallbackLate), string(CallbackBadHost),
	string(CallbackShortID), string(CallbackNewKey),
	string(CallbackEmpty), string(PrefillAbort200), string(DoneLost), string(FailedSent), string(TransferFails), string(MaskedRank),
	string(BootstrapSlow)}

var groupFaultNames = []string{string(Scaling), string(Retired), string(FewerRanks), string(CoreFault)}

// BoundFaultNames lists the faults that only requests meet which are bound to their decode engine
// before the prefill.
func BoundFaultNames() []string { return slices.Clone(boundFaultNames) }

// GroupFaultNames lists the faults of a whole engine that loses ranks or re-forms.
func GroupFaultNames() []string { return slices.Clone(groupFaultNames) }

// FaultNames lists every fault that any request may meet.
func FaultNames() []string { return slices.Clone(faultNames) }

// The kinds of request a rule can be narrowed to.
const (
	LegProbe  = "probe"  // do_remote_decode
	LegDecode = "decode" // do_remote_prefill
	LegPlain  = "plain"  // neither
)

// Rule makes an engine do one fault, on the requests it names, Count times.
type Rule struct {
	Fault       Fault      `json:"fault"`
	Phase       string     `json:"phase,omitempty"`
	Leg         string     `json:"leg,omitempty"`         // empty: any
	Rank        *int       `json:"rank,omitempty"`        // nil: any
	From        string     `json:"from,omitempty"`        // host:port of the prefill engine whose hand-off it is; empty: any
	Skip        int        `json:"skip,omitempty"`        // matching requests it lets pass first
	Count       int        `json:"count,omitempty"`       // requests it strikes, 0: no limit
	Probability float64    `json:"probability,omitempty"` // 0: always
	AfterTokens int        `json:"after_tokens,omitempty"`
	Tokens      int        `json:"tokens,omitempty"`
	Text        bool       `json:"text,omitempty"`
	Role        bool       `json:"role,omitempty"` // with AfterTokens 0: the role chunk still goes out
	Cleanup     bool       `json:"cleanup,omitempty"`
	Value       float64    `json:"value,omitempty"`
	RetryAfter  int        `json:"retry_after,omitempty"` // seconds
	DelayMS     int        `json:"delay_ms,omitempty"`
	Shape       ErrorShape `json:"shape,omitempty"` // of the error, default the engine's
}

// Validate says what is wrong with a rule.
func (r Rule) Validate() error {
	if all := slices.Concat(faultNames, boundFaultNames, groupFaultNames); !slices.Contains(all, string(r.Fault)) {
		return fmt.Errorf("no fault %q; the faults are %s", r.Fault, strings.Join(all, " "))
	}
	phases := []string{""}
	switch r.Fault {
	case Hang:
		phases = append(phases, PhaseBeforeHeaders, PhaseAfterHeaders, PhaseMidStream)
	case Reset:
		phases = append(phases, PhaseAccept, PhaseBeforeHeaders, PhaseAfterHeaders, PhaseMidStream, PhaseInsideChunk)
	}
	if !slices.Contains(phases, r.Phase) {
		return fmt.Errorf("fault %s has no phase %q; use one of %q", r.Fault, r.Phase, phases)
	}
	if !slices.Contains([]string{"", LegProbe, LegDecode, LegPlain}, r.Leg) {
		return fmt.Errorf("no leg %q; use probe, decode, plain or none", r.Leg)
	}
	if !slices.Contains([]ErrorShape{"", ShapeNew, ShapeOld, ShapeRust, ShapeFastAPI, ShapeText, ShapeHTML}, r.Shape) {
		return fmt.Errorf("no error shape %q", r.Shape)
	}
	if r.Probability < 0 || r.Probability > 1 {
		return fmt.Errorf("probability %v is outside [0, 1]", r.Probability)
	}
	if r.Fault == Status && (r.Value < 400 || r.Value > 599) {
		return fmt.Errorf("fault status needs a value in 400..599, got %v", r.Value)
	}
	return nil
}

// aside says that a rule strikes questions about the engine, or all of its work, and not single
// requests.
func (r Rule) aside() bool {
	return r.Fault == FrozenGauges || r.Fault == SlowPages || r.Fault == Standstill || slices.Contains(groupFaultNames, string(r.Fault))
}

// isAt says that a rule strikes at this rank.
func (r Rule) isAt(rank int) bool { return r.Rank == nil || *r.Rank == rank }

func (r Rule) phase() string {
	if r.Phase == "" && (r.Fault == Hang || r.Fault == Reset) {
		return PhaseBeforeHeaders
	}
	return r.Phase
}

// faults holds the rules in force. Requests ask it once, when they arrive.
type faults struct {
	mu    sync.Mutex
	rules []activeRule
	rng   *rand.Rand
}

type activeRule struct {
	Rule
	passed, struck int
}

// set puts rules in force, and returns for how long the core stands still by them.
func (f *faults) set(seed uint64, rules []Rule) (stands time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rng = rand.New(rand.NewPCG(seed, 0))
	f.rules = f.rules[:0]
	for _, r := range rules {
		f.rules = append(f.rules, activeRule{Rule: r})
		switch r.Fault {
		case Standstill:
			stands = max(stands, r.delay())
		case CoreFault:
			stands = recovers
		}
	}
	return stands
}

// recovers is longer than anybody waits for the recovery of a core.
const recovers = time.Hour

// now returns a rule that is in force for a rank, and counts nothing.
func (f *faults) now(fault Fault, rank int) (Rule, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.rules {
		if r.Fault == fault && r.isAt(rank) {
			return r.Rule, true
		}
	}
	return Rule{}, false
}

func (f *faults) list() []Rule {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make([]Rule, 0, len(f.rules))
	for _, r := range f.rules {
		out = append(out, r.Rule)
	}
	return out
}

// strike returns the rules that apply now and counts them.
func (f *faults) strike(applies func(Rule) bool) troubles {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out troubles
	for i := range f.rules {
		r := &f.rules[i]
		if !applies(r.Rule) || r.Count > 0 && r.struck >= r.Count {
			continue
		}
		if r.passed < r.Skip {
			r.passed++
			continue
		}
		if r.Probability > 0 && f.rng.Float64() >= r.Probability {
			continue
		}
		r.struck++
		out = append(out, r.Rule)
	}
	return out
}

// breakAt is the rule that ends an answer before its time: the one with the fewest tokens.
func (t troubles) breakAt() (rule Rule, ok bool) {
	for _, r := range t {
		switch r.Fault {
		case ErrorEvent, SilentEnd, FinishError, Recomputed:
		case MissingFinish:
			if r.AfterTokens == 0 && !r.Role {
				continue
			}
		case Hang, Reset:
			if r.phase() != PhaseMidStream && r.phase() != PhaseInsideChunk {
				continue
			}
		default:
			continue
		}
		if !ok || r.AfterTokens < rule.AfterTokens {
			rule, ok = r, true
		}
	}
	return rule, ok
}

// troubles are the rules that struck one request.
type troubles []Rule

func (t troubles) find(fault Fault, phase string) (Rule, bool) {
	for _, r := range t {
		if r.Fault == fault && (phase == "" || r.phase() == phase) {
			return r, true
		}
	}
	return Rule{}, false
}

func (t troubles) has(fault Fault) bool { _, ok := t.find(fault, ""); return ok }
