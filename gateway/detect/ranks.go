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
	fullShare       = 0.95 // of its KV capacity, from which a rank counts as full
	rankEmptyShare  = 0.8  // of empty answers, from which a rank is reported
	modelEmptyShare = 0.2  // if the other ranks have more, the model itself gives empty answers
)

// share is that of empty answers; known is false for too few answers to judge.
func (l AnswerCounts) share() (share float64, known bool) {
	return float64(l.Empty) / float64(max(1, l.Answers)), l.Answers >= fewAnswers
}

type emptyAnswers struct {
	ranks        []string     // that give nearly only empty answers
	ofEmptyRanks AnswerCounts // of these
	ofOtherRanks AnswerCounts // of the model's other ranks, or of all models
}

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

// findRankEmpty: no request fails because of it. An empty answer ends at once, so such a rank is
// soon free again and attracts ever more requests.
func findRankEmpty(v *view, report reportFunc) {
	models := make([]emptyAnswers, len(v.Models))
	ofAllModels := AnswerCounts{} // without the ranks that give empty ones
	for i := range v.Models {
		models[i] = v.Models[i].countEmptyAnswers()
		ofAllModels.Answers += models[i].ofOtherRanks.Answers
		ofAllModels.Empty += models[i].ofOtherRanks.Empty
	}
	for i, e := range models {
		if _, enough := e.ofOtherRanks.share(); !enough { // compare with all models
			e.ofOtherRanks = ofAllModels
		}
		otherShare, enough := e.ofOtherRanks.share()
		modelIsEmpty := otherShare > modelEmptyShare // the model itself, not single ranks
		if len(e.ranks) > 0 && enough && !modelIsEmpty {
			e.report(v.Models[i].Name, otherShare, report)
		}
	}
}

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

// findRankSlow needs no look at the barrier: behind one all ranks are as slow as the slowest, so
// the comparison finds none.
func findRankSlow(v *view, report reportFunc) {
	v.eachGroup(ranksPanel, func(m *Model, g *Group, where place) {
		slow, worst := []string{}, &Rank{}
		running := 0 // on the slow ranks
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
		case 0:
		case 1:
			report(where, noReason, "Rank %s gives a token in %.0f ms, and the middle one of %s in %.0f ms", slow[0], worst.SlowMs, where,
				worst.OthersMs).setSlowdown(running, times).Ranks = slow
		default:
			report(where, noReason, "%d %s ranks of %s give a token in up to %.0f ms, and the middle one in %.0f ms: %s",
				len(slow), m.role(), where, worst.SlowMs, worst.OthersMs, words.FirstOf(slow)).setSlowdown(running, times).Ranks = slow
		}
	})
}

func (m *Model) role() string {
	if m.Aggregated {
		return aggregatedRole
	}
	return decodeRole
}

// reportRanks makes one finding per group. one and many are the ends of the sentence. model is an
// index in Models.
func (v *view) reportRanks(report reportFunc, one, many string, isOne func(model int, r *Rank) bool) {
	model := 0
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
		case 0:
		case 1:
			report(where, noReason, "%s %s of %s %s", words.Capital(rank), names[0], where, one).Ranks = names
		default:
			report(where, noReason, "%d %ss of %s %s: %s", len(names), rank, where, many, words.FirstOf(names)).Ranks = names
		}
	})
}

// isFull is false if the capacity is not known.
func (r *Rank) isFull() bool {
	return r.State == RankUp && r.Capacity > 0 && float64(r.KVTokens) >= fullShare*float64(r.Capacity)
}

func findRanksFull(v *view, report reportFunc) {
	v.reportRanks(report, "has a full KV cache", "have full KV caches", func(model int, r *Rank) bool {
		return r.isFull() && v.loads[model].kind != KVFull // a KVFull finding includes its ranks
	})
}

// findRanksTight leaves out ranks that other findings report: full or draining ones.
func findRanksTight(v *view, report reportFunc) {
	v.reportRanks(report, "ran out of KV memory and is kept emptier", "ran out of KV memory and are kept emptier", func(_ int, r *Rank) bool {
		return r.Tight && !r.isFull() && r.State != RankDraining
	})
}

// findRanksDrain leaves out engines that drain as a whole.
func findRanksDrain(v *view, report reportFunc) {
	v.reportRanks(report, "drains: it takes no new requests", "drain and take no new requests", func(_ int, r *Rank) bool {
		engine, _, _ := strings.Cut(r.Name, "/")
		return r.State == RankDraining && !v.drained[engine]
	})
}
