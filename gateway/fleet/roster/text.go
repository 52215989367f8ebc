package roster

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Text describes the published lists in lines: one per prefill candidate, decode rank, local rank
// and model. Tests and recordings use it. A word stands in a line if it is true.
//
// Of a candidate: live: it takes prompts. late: prompts wait for it (AnswersLate). second: other
// candidates come first (Fallback). idle: no decode rank would fetch its KV now (NoDecodeRank).
// behind: it is the second choice for these models (FallbackFor).
//
// Of a decode rank: others: so many KV tokens on it belong to requests of other proxies.
//
// Of a model: prefill, decode: an engine of this side is in service or awaited. half: only engines
// of one side list it, so no request can be completed (OneSided). alone: each of its engines
// prefills and decodes (AllAggregated).
func (p *Snapshot) Text() (lines []string) {
	for i := range p.Candidates {
		c := &p.Candidates[i]
		lines = append(lines,
			spaced("prefill", c.ID, c.Board, joined(c.Models), wordIf("live", c.Live), wordIf("late", c.AnswersLate),
				wordIf("second", c.Fallback), wordIf("idle", c.NoDecodeRank),
				wordIf("behind="+joined(c.FallbackFor), len(c.FallbackFor) > 0), wordIf(fmt.Sprint("limit=", c.ProbeLimit), c.ProbeLimit > 0)))
	}
	for i := range p.Workers {
		w := &p.Workers[i]
		lines = append(lines,
			spaced("decode", w.Name, fmt.Sprint("#", w.ID), w.Model, p.ranks[w.ID].State.String(),
				wordIf(fmt.Sprint("limit=", w.Limit), w.Limit > 0), wordIf("down", w.Down), wordIf(fmt.Sprint("others=", w.Others), w.Others > 0)))
	}
	for _, l := range p.Locals {
		lines = append(lines, spaced("local", l.Name, wordIf("up", l.Up)))
	}
	for _, name := range slices.Sorted(maps.Keys(p.routes)) {
		r := p.routes[name]
		lines = append(lines,
			spaced("model", name, r.Board, wordIf("prefill", r.Prefill), wordIf("decode", r.Decode), wordIf("half", r.OneSided),
				wordIf("alone", r.AllAggregated)))
	}
	return lines
}

// spaced joins the words that are not empty.
func spaced(all ...string) string {
	return strings.Join(slices.DeleteFunc(all, func(w string) bool { return w == "" }), " ")
}

// wordIf returns word if the condition is true, and otherwise an empty string.
func wordIf(word string, condition bool) string {
	if !condition {
		return ""
	}
	return word
}

func joined(names []string) string { return strings.Join(names, ",") }
