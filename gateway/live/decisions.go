package live

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"evenkeel/gateway/fleet"
	"evenkeel/gateway/receipt"
	"evenkeel/internal/stats"
	"evenkeel/internal/words"
)

// MostDecisions is how many decisions a document has at most.
const MostDecisions = 24

// Decisions returns the last requests' receipts in short, as of now. Those that still run lack values that are not known yet.
func Decisions(last []*receipt.Receipt, now time.Time) []Decision {
	all := make([]Decision, 0, len(last))
	for _, r := range last {
		d := Decision{
			ID: r.ID, AtMs: r.Arrival.UnixMilli(), Model: r.Model, Prompt: r.PromptTokens, WaitMs: r.Waits.Pool, Outcome: r.Outcome, Why: why(r),
		}
		for i := range r.Attempts { // later attempts overwrite the values of earlier ones
			a := &r.Attempts[i]
			if a.Prefill != nil {
				d.Prefill, d.Prompt = a.Prefill.Candidate, cmp.Or(d.Prompt, a.Prefill.Prompt)
				if _, together := fleet.Called(d.Prefill); together { // the rank says where the prompt was computed
					d.Prefill = ""
				}
			}
			if a.Decode != nil {
				d.Rank = a.Decode.Rank
			}
			if r.State != receipt.Ended {
				d.WaitMs += a.Waits.Pool
				if a.State == receipt.Pooled {
					d.WaitMs += max(0, now.Sub(r.Arrival).Seconds()*1000-a.Since)
				}
			}
		}
		all = append(all, d)
	}
	return all
}

// why says in short sentences how the last attempt of a request was decided, and why it failed if it did.
func why(r *receipt.Receipt) string {
	var all []string
	say := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)+".") }
	if n := len(r.Attempts); n > 0 {
		a := &r.Attempts[n-1]
		if n += r.LeftOut; n > 1 {
			say("It had %d attempts or legs", n)
		}
		if a.Peer != "" {
			say("It was sent to %s", a.Peer)
		}
		if p := a.Prefill; p != nil {
			what, one := "prefill engine", "engine"
			if _, together := fleet.Called(p.Candidate); together {
				what, one = "group of ranks that prefill and decode", "group"
			}
			switch p.Reason {
			case "", "policy":
				say("Prefill policy %s chose among %s", p.Policy, words.Count(p.Eligible, one))
			case "only":
				say("The %s was the only one left", what)
			default:
				say("The %s was chosen by %s among %d", what, p.Reason, p.Eligible)
			}
			if p.Hit > 0 {
				say("%s tokens were thought to be cached there", stats.Grouped(p.Hit))
			}
		}
		if d := a.Decode; d != nil {
			all = append(all, whyRank(d)...)
		}
		if a.Cause != "" {
			say("It failed%s: %s", on(a.FailedOn), a.Cause)
		}
	}
	if len(all) == 0 && r.State != receipt.Ended {
		return "It is in this phase: " + r.State + "."
	}
	return strings.Join(all, " ")
}

// on says on which engine something failed; empty: the engine is not known.
func on(engine string) string {
	if engine == "" {
		return ""
	}
	return " on " + engine
}

// whyRank says in sentences why a request got its decode rank.
func whyRank(d *receipt.Decode) []string {
	if d.Able == 0 { // the decision was not traced, because dispatcher.Config.Explain is not set
		return []string{fmt.Sprintf("Decode policy %s chose the rank in its stage %s.", d.Policy, cmp.Or(d.Stage, "bound"))}
	}
	s := []string{fmt.Sprintf("Decode policy %s chose among %s with room. This one held %s KV tokens, the fullest %s.", d.Policy,
		words.Count(d.Able, "rank"), stats.Grouped(max(0, d.KVTokens)), stats.Grouped(max(0, d.Fullest)))}
	if d.Stage == "guard" { // the starvation guard chose the request by its age
		s = append([]string{"It had waited longest."}, s...)
	}
	return s
}
