package live

import (
	"cmp"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/receipt"
	"evenkeel/internal/stats"
	"evenkeel/internal/words"
	"fmt"
	"strings"
	"time"
)

// MostDecisions is how many decisions a Document has at most.
const MostDecisions = 24

// Decisions summarises the receipts of the last requests. For a request that still runs, WaitMs
// counts up to now, and fields that are not known yet are empty.
func Decisions(last []*receipt.Receipt, now time.Time) []Decision {
	all := make([]Decision, 0, len(last))
	for _, r := range last {
		d := Decision{
			ID: r.ID, AtMs: r.Arrival.UnixMilli(), Model: r.Model, Prompt: r.PromptTokens, WaitMs: r.Waits.Pool, Outcome: r.Outcome, Why: why(r),
		}
		for i := range r.Attempts { // a later attempt overwrites what an earlier one set
			a := &r.Attempts[i]
			if a.Prefill != nil {
				d.Prefill = a.Prefill.Candidate
				d.Prompt = cmp.Or(d.Prompt, a.Prefill.Prompt)
				if _, isAggregated := roster.DisplayName(d.Prefill); isAggregated { // the rank also prefills, so Rank says enough
					d.Prefill = ""
				}
			}
			if a.Decode != nil {
				d.Rank = a.Decode.Rank
			}
			if r.State != receipt.Ended { // while the request runs, r.Waits lacks the waits of its attempts
				d.WaitMs += a.Waits.Pool
				if a.State == receipt.Pooled { // the request still waits; a.Since is in ms from its arrival
					d.WaitMs += max(0, now.Sub(r.Arrival).Seconds()*1000-a.Since)
				}
			}
		}
		all = append(all, d)
	}
	return all
}

// why returns short sentences: how the engines of the request's last attempt were chosen, and why
// that attempt failed if it did. A request with several prompts or several answers is served in
// parts (legs), each of which has attempts of its own.
func why(r *receipt.Receipt) string {
	var sentences []string
	say := func(format string, args ...any) { sentences = append(sentences, fmt.Sprintf(format, args...)+".") }
	if listed := len(r.Attempts); listed > 0 {
		a := &r.Attempts[listed-1]
		if attempts := listed + r.LeftOut; attempts > 1 { // LeftOut counts attempts that the receipt does not list
			say("It had %d attempts or legs", attempts)
		}
		if a.Peer != "" {
			say("It was sent to %s", a.Peer)
		}
		if p := a.Prefill; p != nil {
			sayPrefill(say, p)
		}
		if d := a.Decode; d != nil {
			sentences = append(sentences, whyRank(d)...)
		}
		if a.Cause != "" {
			say("It failed%s: %s", onEngine(a.FailedOn), a.Cause) // onEngine is empty if the engine is not known
		}
	}
	if len(sentences) == 0 && r.State != receipt.Ended {
		return "It is in this phase: " + r.State + "."
	}
	return strings.Join(sentences, " ")
}

// sayPrefill says why a request got its prefill engine or group.
func sayPrefill(say func(format string, args ...any), p *receipt.Prefill) {
	what, unit := "prefill engine", "engine"
	if _, isAggregated := roster.DisplayName(p.Candidate); isAggregated {
		what, unit = "group of ranks that prefill and decode", "group"
	}
	switch p.Reason {
	case "": // the decision was not traced, so it is not known among how many the policy chose
		say("Prefill policy %s chose the %s", p.Policy, what)
	case "policy":
		say("Prefill policy %s chose among %s", p.Policy, words.Count(p.Eligible, unit))
	case "only":
		say("The %s was the only one left", what)
	default: // the reason is the name of another rule than the policy
		say("The %s was chosen by %s among %d", what, p.Reason, p.Eligible)
	}
	if p.Hit > 0 {
		say("%s tokens were thought to be cached there", stats.Grouped(p.Hit))
	}
}

// onEngine returns words for the engine on which an attempt failed; empty: the engine is not known.
func onEngine(engine string) string {
	if engine == "" {
		return ""
	}
	return " on " + engine
}

// whyRank returns sentences that say why a request got its decode rank: without a trace of the
// decision, only the policy and the stage.
func whyRank(d *receipt.Decode) []string {
	if d.Able == 0 { // there is no trace, because dispatcher.Config.Explain is not set
		stage := cmp.Or(d.Stage, "bound") // without a stage it is only known that the request was bound to the rank
		return []string{fmt.Sprintf("Decode policy %s chose the rank in its stage %s.", d.Policy, stage)}
	}
	held, fullest := max(0, d.KVTokens), max(0, d.Fullest) // no load below 0 is shown
	s := []string{fmt.Sprintf("Decode policy %s chose among %s with room. This one held %s KV tokens, the fullest %s.", d.Policy,
		words.Count(d.Able, "rank"), stats.Grouped(held), stats.Grouped(fullest))}
	if d.Stage == "guard" { // the starvation guard chose the request because of its age
		s = append([]string{"It had waited longest."}, s...)
	}
	return s
}
