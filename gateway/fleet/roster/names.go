package roster

import (
	"cmp"
	"slices"

	"evenkeel/dispatcher/board"
	"evenkeel/prefill"
)

// Names. An engine lists its base model, perhaps by several names, and the LoRA adapters that it has loaded. Adapters come and go engine
// by engine, so lists that differ are a normal state. A request goes only to engines that list the name that it asks for. Here it
// is decided which these are: for boards, for the prefill tier, and for requests that one engine serves alone.

// reach is what the ranks list that requests can go to from a candidate.
type reach struct {
	all, open []*board.Names // open: of those that take requests, or are waited for
	unknown   bool           // an engine has not told what it lists
}

// reachIn is the reach of a key.
func reachIn(all map[string]*reach, key string) *reach {
	if all[key] == nil {
		all[key] = &reach{}
	}
	return all[key]
}

func (r *reach) add(n *board.Names, open bool) {
	if !slices.Contains(r.all, n) {
		r.all = append(r.all, n)
	}
	if open && !slices.Contains(r.open, n) {
		r.open = append(r.open, n)
	}
}

func listed(by []*board.Names, name string) bool {
	return slices.ContainsFunc(by, func(n *board.Names) bool { return n.Has(name) })
}

// onlyWhereListed leaves candidates the models that ranks list, too, which are reached from there: in the candidate's region, or in the
// group that it is. It comes second for those that no rank lists which takes requests now.
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
		if reached := func(m string) bool { return listed(r.all, m) }; !r.unknown && slices.ContainsFunc(c.Models, reached) {
			c.Models = slices.DeleteFunc(c.Models, func(m string) bool { return !reached(m) })
		}
		if len(r.open) == 0 {
			continue // as for every model of ranks that are down
		}
		for _, m := range c.Models {
			if !listed(r.open, m) {
				c.Behind = append(c.Behind, m)
			}
		}
	}
}

// halves marks the routes of models that engines of one side list and none of the other side has, although that side has engines of
// their base model, and all of its engines have told what they list. A model whose base no engine of the other side has, such as
// one for embeddings, is no half: one engine alone may serve it.
func halves(routes map[string]Route, engines []*Engine) {
	there := map[string][2]bool{} // by base model: engines that prefill, engines that decode
	var unknown [2]bool
	for _, e := range engines {
		for side, of := range [2]bool{e.Role != Decode, e.Decodes()} {
			if !of {
				continue
			}
			if unknown[side] = unknown[side] || len(e.Status.Models) == 0; len(e.Status.Models) > 0 {
				sides := there[e.base()]
				sides[side] = true
				there[e.base()] = sides
			}
		}
	}
	for name, r := range routes {
		for side, by := range r.listed {
			r.Half = r.Half || !by && there[r.Board][side] && !unknown[side]
		}
		routes[name] = r
	}
}

// BoardFor is the one whose ranks decode for a model what a prefill engine of a region computed: that of its own base
// model, if ranks of it list the model.
func (p *Published) BoardFor(c prefill.Candidate, model, region string) string {
	if c.Mixed { // the candidate is the ranks themselves
		return c.Board
	}
	found := ""
	for _, e := range p.order {
		if e.Role != Decode || !e.lists.Has(model) || e.abroad != region || len(e.Status.Models) == 0 {
			continue
		}
		if e.board == c.Board {
			return e.board
		}
		found = cmp.Or(found, e.board)
	}
	return cmp.Or(found, c.Board)
}
