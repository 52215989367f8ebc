package live

import (
	"fmt"
	"net"
	"strings"

	"evenkeel/gateway/incident"
	"evenkeel/internal/stats"
)

// At which a number of a group becomes a finding.
const (
	fullShare = 0.95 // of a rank's KV tokens
	lateShare = 0.5  // of the time an entry may wait, of the oldest
	lostShare = 0.15 // of a step, to imbalance
	heldSlack = 5.0  // s that a round may be late, in a process that gets no CPU time
)

// modelFindings names groups with their model where there are several. Ranks of engines that
// drain are told of with those. told says that the model is said to have no KV memory left.
func modelFindings(m *Model, several, told bool, drained map[string]bool, say find) {
	late := lateSeconds
	if m.Pool.TTLS > 0 {
		late = lateShare * m.Pool.TTLS
	}
	if m.Pool.OldestS > late {
		what, rank := "finished prefill", "decode rank"
		if m.Aggregated {
			what, rank = "request", "rank"
		}
		say(incident.PoolLate, Bad, at{"model", m.Name, "pool"}, "", "A %s of model %s has waited %.1f s for a %s, and %s in the pool", what, m.Name, m.Pool.OldestS, rank, waits(m.Pool.Entries))
	}
	emptyRanks(m, say)
	for i := range m.Groups {
		g := &m.Groups[i]
		of, name := "group", g.Name
		switch {
		case g.Name == "":
			of, name = "model", m.Name
		case several:
			name = m.Name + " · " + g.Name
		}
		on := func(panel string) at { return at{of, name, panel} }
		if r := g.Rounds; r != nil && r.HeldS > r.MaxHoldS+heldSlack {
			say(incident.RoundStuck, Bad, on("ranks"), "", "%s of %s %s %s held for a round for %.0f s, although none may be held for longer than %.3g s", capital(requests(g.Held)), of, name, are(g.Held), r.HeldS, r.MaxHoldS)
		}
		if g.FallbackRounds > 0 {
			say(incident.PolicySlow, Warn, on("balance"), "", "The decode policy of %s %s is too slow at times, and %s decides instead", of, name, g.Policy)
		}
		if g.LostShare > lostShare {
			say(incident.Imbalance, Warn, on("balance"), "", "Imbalance costs %s %s %.0f %% of every step", of, name, 100*g.LostShare)
		}
		slowRanks(g, m.role(), of, name, on("ranks"), say)
		if g.SlowS > 0 {
			say(incident.StepsSlow, Warn, on("balance"), "",
				"Steps of %s %s%s take %.0f ms, and took %.0f ms at such a load before%s", of, name, g.allOn(), g.StepMs, g.UsualMs, whatDiffers(g)).For = seconds(g.SlowS)
		}
		if g.FewS > 0 {
			say(incident.TokensFew, Warn, on("balance"), "",
				"A step of %s %s%s gives %.1f tokens to an answer, and gave %.1f before, so that a token takes %.0f ms",
				of, name, g.allOn(), g.StepTokens, g.UsualTokens, g.TokenMs).For = seconds(g.FewS)
		}
		full, tight, draining := []string{}, []string{}, []string{}
		for j := range g.Ranks {
			r := &g.Ranks[j]
			switch {
			case r.State == RankDraining:
				if engine, _, _ := strings.Cut(r.Name, "/"); !drained[engine] {
					draining = append(draining, r.Name)
				}
			case r.State == RankUp && r.Capacity > 0 && float64(r.KVTokens) >= fullShare*float64(r.Capacity):
				full = append(full, r.Name)
			case r.Tight:
				tight = append(tight, r.Name)
			}
		}
		some := func(kind incident.Kind, names []string, one, many string) {
			rank := "decode rank"
			if m.Aggregated {
				rank = "rank"
			}
			if n := len(names); n == 1 {
				say(kind, Warn, on("ranks"), "", "%s %s of %s %s %s", capital(rank), names[0], of, name, one)
			} else if n > 1 {
				say(kind, Warn, on("ranks"), "", "%d %ss of %s %s %s: %s", n, rank, of, name, many, listed(names))
			}
		}
		if told {
			full = nil
		}
		some(incident.RanksFull, full, "has a full KV cache", "have full KV caches")
		some(incident.RanksTight, tight, "ran out of KV memory and is kept emptier", "ran out of KV memory and are kept emptier")
		some(incident.RanksDrain, draining, "drains: it takes no new requests", "drain and take no new requests")
	}
}

// emptyRanks says which ranks of a model give nearly nothing but empty answers, where the others give few.
func emptyRanks(m *Model, say find) {
	bad, rest := []string{}, Lately{}
	var sum Lately
	for i := range m.Groups {
		for j := range m.Groups[i].Ranks {
			r := &m.Groups[i].Ranks[j]
			of := &rest
			if share, known := r.Lately.share(); known && share >= emptyShare {
				bad, of = append(bad, r.Name), &sum
			}
			of.Answers, of.Empty = of.Answers+r.Lately.Answers, of.Empty+r.Lately.Empty
		}
	}
	others, known := rest.share()
	if len(bad) == 0 || !known || others > wholeShare {
		return
	}
	all := sum.Answers + rest.Answers
	if len(bad) == 1 {
		say(incident.RankEmpty, Bad, at{"rank", bad[0], "ranks"}, "",
			"Rank %s gives empty answers: %s of its last %s answers ended without any text, and %.0f %% of those of the other ranks; "+
				"of the last %s answers, %.0f %% were its", bad[0], stats.Grouped(sum.Empty), stats.Grouped(sum.Answers), 100*others, stats.Grouped(all),
			100*float64(sum.Answers)/float64(all))
		return
	}
	say(incident.RankEmpty, Bad, at{"rank", bad[0], "ranks"}, "", // the command drains it; the others follow
		"%d ranks of model %s give empty answers: %s of their last %s answers ended without any text, and %.0f %% of those of the other ranks: %s",
		len(bad), m.Name, stats.Grouped(sum.Empty), stats.Grouped(sum.Answers), 100*others, listed(bad))
}

// allOn says behind its name on which host all ranks of the group are; empty: on several.
func (g *Group) allOn() string {
	on := ""
	for i := range g.Ranks {
		at, _, _ := strings.Cut(g.Ranks[i].Name, "/")
		host, _, err := net.SplitHostPort(at)
		if err != nil || on != "" && host != on {
			return ""
		}
		on = host
	}
	if on == "" {
		return ""
	}
	return ", all on host " + on + ","
}

const (
	differRanks = 3 // that tell a gauge, before one of them can differ
	differSaid  = 2 // that the sentence has
)

// whatDiffers says behind a sentence about slow steps what the ranks say of themselves; empty where too few do.
func whatDiffers(g *Group) string {
	tell := 0
	for i := range g.Ranks {
		if r := &g.Ranks[i]; r.gauges != nil && r.Steps {
			tell++
		}
	}
	switch {
	case tell < differRanks:
		return ""
	case len(g.Differ) == 0:
		return fmt.Sprintf(". The metrics of the engines name none of the %d ranks that has much more to do than the others", tell)
	}
	says := "."
	for i, d := range g.Differ[:min(differSaid, len(g.Differ))] {
		if i > 0 {
			says += "; rank"
		} else {
			says += " Rank"
		}
		says += " " + d.Rank + " says that it " + d.Says
	}
	if more := len(g.Differ) - differSaid; more > 0 {
		says += fmt.Sprintf("; and %d more (differ in /live?once)", more)
	}
	return says
}

// A rank without a barrier is slow where it takes so many times as long for a token as the middle one of its group, and so much longer.
const (
	slowRank    = 3
	slowRankMs  = 20
	slowRanksOf = 3 // ranks that have a pace
)

// slowRanks says which ranks are much slower than the others. Behind a barrier all are as slow as the slowest.
func slowRanks(g *Group, role, of, name string, where at, say find) {
	slow, paced, worst := []string{}, 0, 0.0
	for i := range g.Ranks {
		if r := &g.Ranks[i]; r.TokenMs > 0 {
			if paced++; r.TokenMs > slowRank*g.TokenMs && r.TokenMs-g.TokenMs > slowRankMs {
				slow, worst = append(slow, r.Name), max(worst, r.TokenMs)
			}
		}
	}
	switch n := len(slow); {
	case g.Barrier || n == 0 || paced < slowRanksOf:
	case n == 1:
		say(incident.RankSlow, Warn, at{"rank", slow[0], where.panel}, "",
			"Rank %s gives a token in %.0f ms, and the middle one of %s %s in %.0f ms", slow[0], worst, of, name, g.TokenMs)
	default:
		say(incident.RankSlow, Warn, where, "",
			"%d %s ranks of %s %s give a token in up to %.0f ms, and the middle one in %.0f ms: %s", n, role, of, name, worst, g.TokenMs, listed(slow))
	}
}
