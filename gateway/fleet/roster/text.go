package roster

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Text describes the published lists in lines: one per prefill candidate, decode rank, local rank and model. Tests and recordings use it.
func (p *Snapshot) Text() (lines []string) {
	for i := range p.Candidates {
		c := &p.Candidates[i]
		lines = append(lines,
			words("prefill", c.ID, c.Board, list(c.Models), is("live", c.Live), is("late", c.AnswersLate), is("second", c.Fallback), is("idle", c.NoDecodeRank),
				is("behind="+list(c.FallbackFor), len(c.FallbackFor) > 0), is(fmt.Sprint("limit=", c.ProbeLimit), c.ProbeLimit > 0)))
	}
	for i := range p.Workers {
		w := &p.Workers[i]
		lines = append(lines,
			words("decode", w.Name, fmt.Sprint("#", w.ID), w.Model, p.ranks[w.ID].State.String(), is(fmt.Sprint("limit=", w.Limit), w.Limit > 0),
				is("down", w.Down), is(fmt.Sprint("others=", w.Others), w.Others > 0)))
	}
	for _, l := range p.Locals {
		lines = append(lines, words("local", l.Name, is("up", l.Up), is("computes", l.Computes)))
	}
	for _, name := range slices.Sorted(maps.Keys(p.routes)) {
		r := p.routes[name]
		lines = append(lines,
			words("model", name, r.Board, is("prefill", r.Prefill), is("decode", r.Decode), is("half", r.Half), is("alone", r.AllAggregated)))
	}
	return lines
}

// words joins the words that are not empty.
func words(all ...string) string {
	return strings.Join(slices.DeleteFunc(all, func(w string) bool { return w == "" }), " ")
}

// is returns word if the condition is true, and otherwise an empty string.
func is(word string, condition bool) string {
	if !condition {
		return ""
	}
	return word
}

func list(names []string) string { return strings.Join(names, ",") }
