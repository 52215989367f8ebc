package detect

import (
	"fmt"
	"slices"

	"evenkeel/dispatcher/board"
	"evenkeel/internal/words"
)

// Kinds of findings about groups of ranks, and about the pool in front of them.
const (
	PoolLate   Kind = "pool_late"
	RoundStuck Kind = "round_stuck"
	PolicySlow Kind = "policy_slow"
	Imbalance  Kind = "imbalance"
	StepsSlow  Kind = "steps_slow"
	TokensFew  Kind = "tokens_few"
)

var groupDetectors = []Detector{
	{
		Kind: PoolLate, find: findPoolLate,
		harm: waiting, effect: true, manyWait: true, headline: "Long waits",
		pluralText: "have requests in the pool that wait too long for a rank",
		runbook:    "pool_late", command: showWorkers,
		clients: "Clients wait for their first token. Those that wait too long get an error.",
		next:    "Look which decode ranks are down, drain or are full, and add decode ranks.",
	},
	{
		Kind: RoundStuck, find: findRoundStuck, byOwnClock: proxyIsLate,
		harm: waiting, headline: "Stuck round", pluralText: "hold requests for a round for longer than they may", runbook: "round_stuck",
		command: showHeldRequests,
		clients: "Clients wait for their first token, although ranks have free slots.",
		next:    "Write patience=0 into the policy, so that nothing is held, and report the bug.",
	},
	{
		Kind: PolicySlow, find: findPolicySlow, byOwnClock: proxyIsLate,
		harm: slower, sharesNoCause: true, headline: "Slow policy", runbook: "policy_slow", command: showLogs,
		clients: "Clients get their tokens a little later, because a simpler policy decides.",
		next:    "Look what else uses the cores of this machine, or choose a simpler policy.",
	},
	{
		Kind: Imbalance, find: findImbalance,
		harm: slower, sharesNoCause: true, headline: "Imbalance", runbook: "imbalance",
		clients: "Clients of this group get every token later.",
		next:    "Look which rank is the fullest.", command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once" | jq '.models[].groups[].ranks | max_by(.kv_tokens)'`,
	},
	{
		Kind: StepsSlow, find: findStepsSlow, slowsTokens: true, byOwnClock: proxyIsLate,
		harm: slower, sharesNoCause: true, headline: "Slow steps", runbook: "steps_slow",
		clients: "Clients of this group get every token later.",
		next: "One rank is enough to make all of them slow. If a rank is named, look for who else uses its engine. " +
			"If no rank is named, compare the GPUs' clocks and the network between the ranks, host by host.",
		command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once" | ` +
			`jq '.models[].groups[] | {name,step_ms,usual_ms,slow_s,most_tokens,differ}'`,
	},
	{
		Kind: TokensFew, find: findTokensFew, slowsTokens: true,
		harm: slower, sharesNoCause: true, headline: "Fewer tokens in each step", runbook: "tokens_few",
		clients: "Clients of this group get every token later. All clients may wait longer for their first token, because slots are taken for " +
			"longer.",
		next: "Look whether speculative decoding is on in all engines of the group, and what share of its draft tokens is accepted. " +
			"The steps themselves are as fast as before, so no GPU is slow, and more prefill engines do not help.",
		command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once" | ` +
			`jq '.models[].groups[] | {name,step_ms,token_ms,step_tokens,usual_step_tokens,few_s}'`,
	},
}

const (
	lateShare = 0.5  // of the time that a pool entry may wait: a longer wait is late
	lostShare = 0.15 // of a step, by imbalance
	heldSlack = 5.0  // in s: a round may be late because the process gets no CPU time
)

func findPoolLate(v *view, report reportFunc) {
	for i := range v.Models {
		m := &v.Models[i]
		late := lateSeconds
		if m.Pool.TTLS > 0 {
			late = lateShare * m.Pool.TTLS
		}
		if m.Pool.OldestS > late {
			what := "finished prefill"
			if m.Aggregated {
				what = "request"
			}
			_, rank := m.nouns()
			report(place{"model", m.Name, "pool"}, noReason, "A %s of model %s has waited %.1f s for a %s, and %s in the pool", what, m.Name,
				m.Pool.OldestS, rank, waits(m.Pool.Entries))
		}
	}
}

// eachGroup: the default group of every model has the same name, so with several groups each name
// includes the model.
func (v *view) eachGroup(panel string, report func(m *Model, g *Group, where place)) {
	for i := range v.Models {
		m := &v.Models[i]
		for j := range m.Groups {
			g := &m.Groups[j]
			where := place{"group", g.Name, panel}
			switch {
			case g.Name == "": // the ranks without a barrier
				where.kind, where.name = "model", m.Name
			case v.manyGroups:
				where.name = m.Name + " · " + g.Name
			}
			report(m, g, where)
		}
	}
}

// findRoundStuck reports groups whose policy holds requests back for longer than its own limit.
// Only ranks that also prefill have rounds for which requests are held.
func findRoundStuck(v *view, report reportFunc) {
	v.eachGroup(ranksPanel, func(_ *Model, g *Group, where place) {
		if r := g.Rounds; r != nil && r.HeldS > r.MaxHoldS+heldSlack {
			report(where, noReason, "%s of %s %s held for a round for %.0f s, although none may be held for longer than %.3g s",
				words.Capital(requests(g.Held)), where, words.Are(g.Held), r.HeldS, r.MaxHoldS)
		}
	})
}

// findPolicySlow: the policy took too long, so that the fallback policy decided some rounds.
func findPolicySlow(v *view, report reportFunc) {
	v.eachGroup(balancePanel, func(_ *Model, g *Group, where place) {
		if g.FallbackRounds > 0 {
			how := "computes for too long"
			if g.FallbackReason == board.FallbackBlocked {
				how = "waits for more than a second"
			}
			report(where, noReason, "The decode policy of %s %s at times, and %s decides instead", where, how, g.Policy)
		}
	})
}

func findImbalance(v *view, report reportFunc) {
	v.eachGroup(balancePanel, func(_ *Model, g *Group, where place) {
		// A rank that drains becomes emptier, so the imbalance is expected.
		anyDrains := slices.ContainsFunc(g.Ranks, func(r Rank) bool { return r.State == RankDraining })
		if g.LostShare > lostShare && !anyDrains {
			report(where, noReason, "Imbalance costs %s %.0f %% of every step", where, 100*g.LostShare)
		}
	})
}

// findStepsSlow names the ranks whose gauges differ most, because one slow rank makes all steps
// slow.
func findStepsSlow(v *view, report reportFunc) {
	v.eachGroup(balancePanel, func(_ *Model, g *Group, where place) {
		if g.SlowStepsS > 0 {
			f := report(where, noReason, "Steps of %s%s take %.0f ms, and took %.0f ms at such a load before%s", where, g.commonHostText(),
				g.StepMs, g.UsualMs, differingText(g))
			f.setSlowdown(g.running(), g.StepMs/g.UsualMs).LastedFor = seconds(g.SlowStepsS)
			for _, d := range g.Differing[:min(differNamed, len(g.Differing))] {
				f.Ranks = append(f.Ranks, d.Rank)
			}
		}
	})
}

// findTokensFew: a step gives an answer far fewer tokens than before, as when speculative decoding
// fails.
func findTokensFew(v *view, report reportFunc) {
	v.eachGroup(balancePanel, func(_ *Model, g *Group, where place) {
		if g.FewTokensS > 0 {
			f := report(where, noReason, "A step of %s%s gives %.1f tokens to an answer, and gave %.1f before, so that a token takes %.0f ms",
				where, g.commonHostText(), g.StepTokens, g.UsualTokens, g.TokenMs)
			f.setSlowdown(g.running(), g.UsualTokens/g.StepTokens).LastedFor = seconds(g.FewTokensS)
		}
	})
}

// commonHostText is empty if the ranks are on several hosts, or on unknown ones.
func (g *Group) commonHostText() string {
	common := ""
	for i := range g.Ranks {
		host := hostOf(g.Ranks[i].Name)
		isOther := common != "" && host != common
		if host == "" || isOther {
			return ""
		}
		common = host
	}
	if common == "" {
		return ""
	}
	return ", all on host " + common + ","
}

const (
	differRanks = 3 // that must report a gauge before one can differ
	differNamed = 2 // at most, in the sentence
)

// differingText is empty if too few ranks report gauges.
func differingText(g *Group) string {
	reporting := 0
	for i := range g.Ranks {
		if g.hasGauges(i) {
			reporting++
		}
	}
	switch {
	case reporting < differRanks:
		return ""
	case len(g.Differing) == 0:
		return fmt.Sprintf(". The metrics of the engines name none of the %d ranks that has much more to do than the others", reporting)
	}
	text := "."
	for i, d := range g.Differing[:min(differNamed, len(g.Differing))] {
		if i > 0 {
			text += "; rank"
		} else {
			text += " Rank"
		}
		text += " " + d.Rank + " says that it " + d.Says
	}
	if more := len(g.Differing) - differNamed; more > 0 {
		text += fmt.Sprintf("; and %d more (differ in /live?once)", more)
	}
	return text
}
