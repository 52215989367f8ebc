package roster

import (
	"cmp"
	"slices"

	"evenkeel/dispatcher/board"
	"evenkeel/prefill"
)

// An engine lists the names of its base model and of the LoRA adapters that it has loaded. Adapters are loaded engine by engine, so engines
// of one model may list different names. A request goes only to engines that list the name in the request. This file finds these engines:
// for boards, for the prefill tier, and for requests that one engine serves alone.

// reach holds the models listed by the decode ranks that can take a candidate's requests.
type reach struct {
	all, open []*board.Names // lists of all ranks; lists of the ranks that take requests, or for which requests wait
	unknown   bool           // an engine has not named its models yet
}

// reachIn returns the reach with that key, and creates it if there is none.
func reachIn(all map[string]*reach, key string) *reach {
	if all[key] == nil {
		all[key] = &reach{}
	}
	return all[key]
}

// add adds the models that a rank lists. open: the rank takes requests, or requests wait for it.
func (r *reach) add(n *board.Names, open bool) {
	if !slices.Contains(r.all, n) {
		r.all = append(r.all, n)
	}
	if open && !slices.Contains(r.open, n) {
		r.open = append(r.open, n)
	}
}

// listed says whether one of the lists has the name of a model.
func listed(by []*board.Names, name string) bool {
	return slices.ContainsFunc(by, func(n *board.Names) bool { return n.Has(name) })
}

// onlyWhereListed removes the models from a candidate that no reachable decode rank lists. Reachable are the ranks in the candidate's
// region, or the ranks of the group if the candidate is a group. If no reachable rank lists any of its models, the candidate keeps them,
// because it may serve them alone. For models that only ranks list which take no requests now, the candidate comes second (FallbackFor).
func onlyWhereListed(candidates []prefill.Candidate, regions, groups map[string]*reach) {
	for i := range candidates {
		c := &candidates[i]
		r := regions[c.Region]
		if c.Aggregated {
			r = groups[c.ID]
		}
		if r == nil || len(r.all) == 0 {
			continue
		}
		reachable := func(m string) bool { return listed(r.all, m) }
		if !r.unknown && slices.ContainsFunc(c.Models, reachable) { // unknown: another engine may still list the models
			c.Models = slices.DeleteFunc(c.Models, func(m string) bool { return !reachable(m) })
		}
		if len(r.open) == 0 {
			continue // no rank takes requests, so no model is better off than the others
		}
		for _, m := range c.Models {
			if !listed(r.open, m) {
				c.FallbackFor = append(c.FallbackFor, m)
			}
		}
	}
}

// The two sides: indexes of arrays with one value per side.
const (
	prefillSide = iota
	decodeSide
)

// halves marks the routes (Half) of models that only engines of one side, prefill or decode, list: no request for such a model can be
// completed. It needs engines of the same base model on the other side, all of which have named their models. A model whose base model the
// other side does not have, e.g. one for embeddings, is not marked, because one engine alone may serve it.
func halves(routes map[string]Route, engines []*Engine) {
	hasBase := map[string][2]bool{} // by base model: for each side, whether an engine has it
	var unknown [2]bool             // for each side, whether an engine has not named its models yet
	for _, e := range engines {
		for side, isOfSide := range [2]bool{prefillSide: e.Role != Decode, decodeSide: e.Decodes()} {
			if !isOfSide {
				continue
			}
			if len(e.Status.Models) == 0 {
				unknown[side] = true
				continue
			}
			sides := hasBase[e.base()]
			sides[side] = true
			hasBase[e.base()] = sides
		}
	}
	for name, r := range routes {
		for side, lists := range r.listed {
			r.Half = r.Half || !lists && hasBase[r.Board][side] && !unknown[side]
		}
		routes[name] = r
	}
}

// BoardFor returns the board whose ranks decode a request for a model after the prefill engine c: the board of c's base model if ranks of
// that board list the model, or another board of the region whose ranks list the model.
func (p *Snapshot) BoardFor(c prefill.Candidate, model, region string) string {
	if c.Aggregated { // the candidate is a group of ranks that also decode
		return c.Board
	}
	found := ""
	for _, e := range p.order {
		if e.Role != Decode || !e.lists.Has(model) || e.otherRegion != region || len(e.Status.Models) == 0 {
			continue
		}
		if e.board == c.Board {
			return e.board
		}
		found = cmp.Or(found, e.board)
	}
	return cmp.Or(found, c.Board)
}
