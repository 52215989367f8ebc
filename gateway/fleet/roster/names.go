package roster

import (
	"cmp"
	"slices"

	"evenkeel/dispatcher/board"
	"evenkeel/prefill"
)

// Names of models. An engine lists its base model, perhaps by several names, and the LoRA adapters that it has
// loaded. Adapters are loaded engine by engine, so lists that differ are a normal state. A request goes only to
// engines that list the name that it asks for. This file decides which engines these are: for boards, for the prefill
// tier, and for requests that one engine serves alone.

// reach is what the ranks list to which requests can go from a candidate.
type reach struct {
	all, open []*board.Names // open: the lists of ranks that take requests, or that requests wait for
	unknown   bool           // an engine has not named its models yet
}

// reachIn returns the reach of a key, and makes it if there is none.
func reachIn(all map[string]*reach, key string) *reach {
	if all[key] == nil {
		all[key] = &reach{}
	}
	return all[key]
}

// add adds the models that a rank lists. open says that the rank takes requests, or that requests wait for it.
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

// onlyWhereListed leaves a candidate only the models that reachable ranks list, too: ranks in the candidate's region,
// or in the group that the candidate is. The candidate comes second for models that are listed only by ranks that
// take no requests now.
func onlyWhereListed(candidates []prefill.Candidate, regions, groups map[string]*reach) {
	for i := range candidates {
		c := &candidates[i]
		r := regions[c.Region]
		if c.Mixed {
			r = groups[c.ID]
		}
		if r == nil || len(r.all) == 0 {
			continue
		}
		if reachable := func(m string) bool { return listed(r.all, m) }; !r.unknown && slices.ContainsFunc(c.Models, reachable) {
			c.Models = slices.DeleteFunc(c.Models, func(m string) bool { return !reachable(m) })
		}
		if len(r.open) == 0 {
			continue // all ranks are down, so no model is behind the others
		}
		for _, m := range c.Models {
			if !listed(r.open, m) {
				c.Behind = append(c.Behind, m)
			}
		}
	}
}

// halves marks the routes of models that only engines of one side (prefill or decode) list, if the other side has engines of their base
// model and all of its engines have named their models: no request for such a model can be completed. A model whose base model the other
// side does not have, such as one for embeddings, is not marked: one engine alone may serve it.
func halves(routes map[string]Route, engines []*Engine) {
	hasBase := map[string][2]bool{} // by base model: whether engines that prefill have it, and whether engines that decode do
	var unknown [2]bool
	for _, e := range engines {
		for side, isOfSide := range [2]bool{e.Role != Decode, e.Decodes()} {
			if !isOfSide {
				continue
			}
			if unknown[side] = unknown[side] || len(e.Status.Models) == 0; len(e.Status.Models) > 0 {
				sides := hasBase[e.base()]
				sides[side] = true
				hasBase[e.base()] = sides
			}
		}
	}
	for name, r := range routes {
		for side, lists := range r.listed {
			r.Half = r.Half || !lists && hasBase[r.Board][side] && !unknown[side]
		}
		routes[name] = r
	}
}

// BoardFor is the board whose ranks decode, for a model, what a prefill engine of a region computed: the board of the
// engine's own base model, if ranks of that board list the model.
func (p *Published) BoardFor(c prefill.Candidate, model, region string) string {
	if c.Mixed { // the candidate is the ranks themselves
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
