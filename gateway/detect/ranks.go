package detect

import (
	"strings"

	"evenkeel/internal/stats"
	"evenkeel/internal/words"
)

// Kinds of findings about ranks.
const (
	RankEmpty  Kind = "rank_empty"
	RankSlow   Kind = "rank_slow"
	RanksFull  Kind = "ranks_full"
	RanksTight Kind = "ranks_tight"
	RanksDrain Kind = "ranks_drain"
)

var rankDetectors = []Detector{
	{
		Kind: RankEmpty, find: findRankEmpty,
		harm: failing, sharesNoCause: true, headline: "Empty answers", runbook: "rank_empty",
		clients: "Clients whose requests go there get an empty answer with status 200. No error is counted, and nothing is tried again.",
		next: "Drain the rank now: it is free so soon that it gets more requests than any other. " +
			"Then look at its weights, its GPU's memory errors and its last restart. Tell those who use the answers.",
		command: `curl -s -H "Authorization: Bearer $TOKEN" -X POST -H "Content-Type: application/json" -d '{"deadline": "10s"}' "$ADMIN/workers/{rank}/drain"`,
	},
	{
		Kind: RankSlow, find: findRankSlow, slowsTokens: true,
		harm: slower, sharesNoCause: true, headline: "Slow rank", runbook: "rank_slow",
		clients: "Clients whose answers are there get every token later.",
		next:    "Look at the rank's GPU and its host (clock, temperature, other processes), and drain the rank meanwhile.",
		command: `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once" | ` +
			`jq -r '.models[].groups[].ranks[] | "\(.token_ms // "-") ms \(.running) running \(.name)"' | sort -rn | head`,
	},
	{
		Kind: RanksFull, find: findRanksFull,
		harm: slower, sharesNoCause: true, headline: "Full decode ranks", runbook: "ranks_full", command: showWorkers,
		clients: "Clients may wait for a decode rank.",
		next:    "Add decode ranks, or lower the slots of a rank.",
	},
	{
		Kind: RanksTight, find: findRanksTight,
		harm: slower, sharesNoCause: true, headline: "Too little KV memory", runbook: "ranks_tight", command: showTightRanks,
		clients: "Clients wait longer, because answers there were stopped and go on elsewhere. Answers that cannot go on end with an error.",
		next:    "Compare the capacity with what the engine logs, and set kv_tokens. If it is right, lower slots or add decode ranks.",
	},
	{
		Kind: RanksDrain, find: findRanksDrain,
		harm: nothing, family: "drains", headline: "Drain", pluralText: "have ranks that drain", runbook: "drains", command: showDrains,
		clients: "New requests of clients go to the other ranks, and what runs there goes on.",
		next:    "Wait until the ranks are empty. They still take part in the steps of their group.",
	},
}

const (
	fullShare       = 0.95 // from this share of its KV capacity on, a rank counts as full
	rankEmptyShare  = 0.8  // a rank is reported from this share of empty answers on
	modelEmptyShare = 0.2  // if the other ranks have a larger share, the model itself gives empty answers
)

// share is the share of empty answers, from 0 to 1. known is false if there are too few answers to judge.
func (l AnswerCounts) share() (share float64, known bool) {
	return float64(l.Empty) / float64(max(1, l.Answers)), l.Answers >= fewAnswers
}

// emptyAnswers says how a model's ranks answered: those that give nearly only empty answers, and the others.
type emptyAnswers struct {
	ranks        []string     // names of the ranks that give empty answers
	ofEmptyRanks AnswerCounts // answers of these ranks
	ofOtherRanks AnswerCounts // answers with which these are compared: of the model's other ranks, or of all models
}

// countEmptyAnswers sorts the model's ranks by whether they give nearly only empty answers, and adds up the recent answers of both.
func (m *Model) countEmptyAnswers() emptyAnswers {
	var e emptyAnswers
	for i := range m.Groups {
		for k := range m.Groups[i].Ranks {
			r := &m.Groups[i].Ranks[k]
			counts := &e.ofOtherRanks
			if share, known := r.RecentAnswers.share(); known && share >= rankEmptyShare {
				e.ranks = append(e.ranks, r.Name)
				counts = &e.ofEmptyRanks
			}
			counts.Answers += r.RecentAnswers.Answers
			counts.Empty += r.RecentAnswers.Empty
		}
	}
	return e
}

// findRankEmpty finds ranks that give nearly only empty answers while the model's other ranks give few. No request fails because of it. An
// empty answer ends at once, so such a rank is soon free again and attracts ever more requests.
func findRankEmpty(v *view, report reportFunc) {
	models := make([]emptyAnswers, len(v.Models))
	ofAllModels := AnswerCounts{} // answers of the ranks of all models, without those that give empty answers
	for i := range v.Models {
		models[i] = v.Models[i].countEmptyAnswers()
		ofAllModels.Answers += models[i].ofOtherRanks.Answers
		ofAllModels.Empty += models[i].ofOtherRanks.Empty
	}
	for i, e := range models {
		if _, enough := e.ofOtherRanks.share(); !enough { // too few answers, so those of all models are compared
			e.ofOtherRanks = ofAllModels
		}
		otherShare, enough := e.ofOtherRanks.share()
		modelIsEmpty := otherShare > modelEmptyShare // the model itself gives empty answers, and not single ranks
		if len(e.ranks) > 0 && enough && !modelIsEmpty {
			e.report(v.Models[i].Name, otherShare, report)
		}
	}
}

// report reports the ranks of a model that give empty answers. otherShare is the share of empty answers of the other ranks.
func (e *emptyAnswers) report(model string, otherShare float64, report reportFunc) {
	where := place{"model", model, ranksPanel}
	answers := stats.Grouped(e.ofEmptyRanks.Answers)
	if len(e.ranks) == 1 {
		all := e.ofEmptyRanks.Answers + e.ofOtherRanks.Answers
		report(where, noReason, "Rank %s gives empty answers: %s of its last %s answers ended without any text, "+
			"and %.0f %% of those of the other ranks; of the last %s answers, %.0f %% were its",
			e.ranks[0], stats.Grouped(e.ofEmptyRanks.Empty), answers, 100*otherShare, stats.Grouped(all),
			100*float64(e.ofEmptyRanks.Answers)/float64(all)).Ranks = e.ranks
		return
	}
	report(where, noReason, "%d ranks of model %s give empty answers: %s of their last %s answers ended without any text, "+
		"and %.0f %% of those of the other ranks: %s",
		len(e.ranks), model, stats.Grouped(e.ofEmptyRanks.Empty), answers, 100*otherShare, words.FirstOf(e.ranks)).Ranks = e.ranks
}

// findRankSlow finds ranks that give tokens much more slowly than the median rank of their group. It does not ask whether the group has a
// barrier: behind a real barrier all ranks are as slow as the slowest one, so the comparison finds none.
func findRankSlow(v *view, report reportFunc) {
	v.eachGroup(ranksPanel, func(m *Model, g *Group, where place) {
		slow, worst := []string{}, &Rank{} // the names of the slow ranks, and the slowest of them
		running := 0                       // requests on the slow ranks
		for i := range g.Ranks {
			if r := &g.Ranks[i]; r.SlowMs > 0 {
				slow = append(slow, r.Name)
				running += r.Running
				if r.SlowMs > worst.SlowMs {
					worst = r
				}
			}
		}
		times := worst.SlowMs / worst.OthersMs // not used if no rank is slow
		switch len(slow) {
		case 0: // nothing to report
		case 1:
			report(where, noReason, "Rank %s gives a token in %.0f ms, and the middle one of %s in %.0f ms", slow[0], worst.SlowMs, where,
				worst.OthersMs).setSlowdown(running, times).Ranks = slow
		default:
			report(where, noReason, "%d %s ranks of %s give a token in up to %.0f ms, and the middle one in %.0f ms: %s",
				len(slow), m.role(), where, worst.SlowMs, worst.OthersMs, words.FirstOf(slow)).setSlowdown(running, times).Ranks = slow
		}
	})
}

// role is the role of the model's engines: aggregated or decode.
func (m *Model) role() string {
	if m.Aggregated {
		return aggregatedRole
	}
	return decodeRole
}

// reportRanks reports the ranks for which isOne returns true, in one finding per group. one and many are the ends of the sentence for
// one rank and for several. The model passed to isOne is an index in Models.
func (v *view) reportRanks(report reportFunc, one, many string, isOne func(model int, r *Rank) bool) {
	model := 0 // index in v.Models of m, the model of the present group
	v.eachGroup(ranksPanel, func(m *Model, g *Group, where place) {
		for &v.Models[model] != m { // eachGroup goes through Models in order
			model++
		}
		names := []string{}
		for i := range g.Ranks {
			if r := &g.Ranks[i]; isOne(model, r) {
				names = append(names, r.Name)
			}
		}
		switch _, rank := m.nouns(); len(names) {
		case 0: // nothing to report
		case 1:
			report(where, noReason, "%s %s of %s %s", words.Capital(rank), names[0], where, one).Ranks = names
		default:
			report(where, noReason, "%d %ss of %s %s: %s", len(names), rank, where, many, words.FirstOf(names)).Ranks = names
		}
	})
}

// isFull says whether the rank takes requests and its KV cache is nearly full. It is false if the capacity is not known.
func (r *Rank) isFull() bool {
	return r.State == RankUp && r.Capacity > 0 && float64(r.KVTokens) >= fullShare*float64(r.Capacity)
}

// findRanksFull reports ranks with a nearly full KV cache. It leaves out ranks of models for which a KVFull finding reports this already.
func findRanksFull(v *view, report reportFunc) {
	v.reportRanks(report, "has a full KV cache", "have full KV caches", func(model int, r *Rank) bool {
		return r.isFull() && v.loads[model].kind != KVFull // a KVFull finding about the model includes its ranks
	})
}

// findRanksTight reports ranks that are kept emptier because they ran out of KV memory. It leaves out ranks that are full or drain, because
// other findings report them.
func findRanksTight(v *view, report reportFunc) {
	v.reportRanks(report, "ran out of KV memory and is kept emptier", "ran out of KV memory and are kept emptier", func(_ int, r *Rank) bool {
		return r.Tight && !r.isFull() && r.State != RankDraining
	})
}

// findRanksDrain reports ranks that drain. It leaves out ranks of engines that drain as a whole, because findings about these engines
// report them.
func findRanksDrain(v *view, report reportFunc) {
	v.reportRanks(report, "drains: it takes no new requests", "drain and take no new requests", func(_ int, r *Rank) bool {
		engine, _, _ := strings.Cut(r.Name, "/")
		return r.State == RankDraining && !v.drained[engine]
	})
}
