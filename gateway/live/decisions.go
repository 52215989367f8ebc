package live

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"evenkeel/gateway/receipt"
)

// mostDecisions are in a document.
const mostDecisions = 24

// Decisions are the receipts of the last requests in short, as of now. A request
// that still runs lacks the fields that are not known yet.
func Decisions(last []*receipt.Receipt, now time.Time) []Decision {
	all := make([]Decision, 0, len(last))
	for _, r := range last {
		d := Decision{
			ID: r.ID, AtMs: r.Arrival.UnixMilli(), Model: r.Model, Prompt: r.PromptTokens, WaitMs: r.Waits.Pool, Outcome: r.Outcome, Why: why(r),
		}
		for i := range r.Attempts { // the last one that got there
			a := &r.Attempts[i]
			if a.Prefill != nil {
				d.Prefill, d.Prompt = a.Prefill.Candidate, cmp.Or(d.Prompt, a.Prefill.Prompt)
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

// why is what the last attempt was decided on, in a line.
func why(r *receipt.Receipt) string {
	var words []string
	say := func(format string, args ...any) { words = append(words, fmt.Sprintf(format, args...)) }
	if n := len(r.Attempts); n > 0 {
		a := &r.Attempts[n-1]
		if n += r.LeftOut; n > 1 {
			say("%d attempts or legs", n)
		}
		if a.Peer != "" {
			say("sent to %s", a.Peer)
		}
		if p := a.Prefill; p != nil {
			switch p.Reason {
			case "", "policy":
				say("prefill %s, best of %d", p.Policy, p.Eligible)
			case "only":
				say("prefill the only one left")
			default:
				say("prefill by %s, of %d", p.Reason, p.Eligible)
			}
			if p.Hit > 0 {
				say("%d tokens cached", p.Hit)
			}
		}
		if d := a.Decode; d != nil {
			say("decode %s, %s", d.Policy, decoded(d))
		}
		if a.Cause != "" {
			say("failed: %s", a.Cause)
		}
	}
	if len(words) == 0 && r.State != receipt.Ended {
		return r.State
	}
	return strings.Join(words, "; ")
}

func decoded(d *receipt.Decode) string {
	if d.Able == 0 { // nobody noted the grounds
		return cmp.Or(d.Stage, "bound")
	}
	s := fmt.Sprintf("one of %d with room, held %d KV tokens, the fullest %d", d.Able, d.KVTokens, d.Fullest)
	if d.Stage == "guard" {
		s = "waited longest; " + s
	}
	return s
}
