package roster

import (
	"cmp"
	"slices"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/internal/words"
	"evenkeel/prefill"
)

// An engine lists the names of its base model and of the LoRA adapters that it has loaded. Adapters are loaded engine by engine, so engines
// of one model may list different names. A request goes only to engines that list the name in the request. This file finds these engines:
// for boards, for the prefill tier, and for requests that one engine serves alone.

// addFullNames adds the names by which SGLang's own clients ask for LoRA adapters: the base model's name, a colon,
// and the adapter's (0.5.23, _parse_model_parameter in entrypoints/openai/serving_base.py).
func addFullNames(models []engine.Model) []engine.Model {
	listed := make(map[string]bool, len(models))
	for _, m := range models {
		listed[m.ID] = true
	}
	all := slices.Clone(models)
	for _, m := range models {
		full := m.Parent + ":" + m.ID
		// It is no adapter, another adapter has this name, or the name is too long.
		if m.Parent == "" || listed[full] || !words.IsName(full) {
			continue
		}
		all = append(all, engine.Model{ID: full, Parent: m.Parent, Adapter: m.ID, MaxModelLen: m.MaxModelLen})
	}
	return all
}

// listings has the model lists of the decode ranks that can take a candidate's requests.
type listings struct {
	all, accepting []*board.Names // lists of all ranks; lists of the ranks that take requests, or for which requests wait
	anyUnnamed     bool           // an engine has not named its models yet
}

// listingsOf returns the listings of a region or of a group of aggregated ranks, whose ID is the key. It creates them if there are none.
func listingsOf(all map[string]*listings, key string) *listings {
	if all[key] == nil {
		all[key] = &listings{}
	}
	return all[key]
}

// add adds the models that a rank lists. accepts says that the rank takes requests, or that requests wait for it.
func (l *listings) add(models *board.Names, accepts bool) {
	if !slices.Contains(l.all, models) {
		l.all = append(l.all, models)
	}
	if accepts && !slices.Contains(l.accepting, models) {
		l.accepting = append(l.accepting, models)
	}
}

// anyLists says whether one of the lists has the model.
func anyLists(lists []*board.Names, model string) bool {
	return slices.ContainsFunc(lists, func(n *board.Names) bool { return n.Has(model) })
}

// dropUnlistedModels removes the models from a candidate that no reachable decode rank lists (keepListedModels). For the models that only
// ranks list which take no requests now, it makes the candidate the second choice (markFallbackModels). Reachable are the ranks in the
// candidate's region, or the ranks of the group if the candidate is a group. Nothing changes if no reachable rank has named its models.
func dropUnlistedModels(candidates []prefill.Candidate, regions, groups map[string]*listings) {
	for i := range candidates {
		c := &candidates[i]
		reachable := regions[c.Region]
		if c.Aggregated {
			reachable = groups[c.ID]
		}
		if reachable == nil || len(reachable.all) == 0 {
			continue
		}
		keepListedModels(c, reachable)
		markFallbackModels(c, reachable)
	}
}

// keepListedModels removes the models from a candidate that no reachable rank lists. It removes none while an engine has not named its
// models, because that engine may list them. It also removes none if no reachable rank lists any of the candidate's models, because the
// candidate may serve them alone.
func keepListedModels(c *prefill.Candidate, reachable *listings) {
	isListed := func(model string) bool { return anyLists(reachable.all, model) }
	if !reachable.anyUnnamed && slices.ContainsFunc(c.Models, isListed) {
		c.Models = slices.DeleteFunc(c.Models, func(model string) bool { return !isListed(model) })
	}
}

// markFallbackModels makes a candidate the second choice (FallbackFor) for those of its models that are listed only by ranks which take no
// requests now. If no rank takes requests, no model is better off than the others, and none is marked.
func markFallbackModels(c *prefill.Candidate, reachable *listings) {
	if len(reachable.accepting) == 0 {
		return
	}
	for _, m := range c.Models {
		if !anyLists(reachable.accepting, m) {
			c.FallbackFor = append(c.FallbackFor, m)
		}
	}
}

// The two sides: indexes of arrays with one value per side.
const (
	prefillSide = iota
	decodeSide
)

// markOneSided marks the routes of models that only engines of one side, prefill or decode, list (OneSided): no request for such a model
// can be completed. A model is marked only if the other side has engines of the base model, and if all engines of the other side have named
// their models. If the other side does not have the base model at all, e.g. of a model for embeddings, one engine alone may serve the
// model.
func markOneSided(routes map[string]Route, engines []*Engine) {
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
			sides := hasBase[e.baseModel()]
			sides[side] = true
			hasBase[e.baseModel()] = sides
		}
	}
	for name, r := range routes {
		baseModel := r.Board // the board of a route has the name of its base model
		for side, isListed := range r.listed {
			if isListed || r.OneSided {
				continue
			}
			r.OneSided = hasBase[baseModel][side] && !unknown[side] // the side has the base model, and all its lists are known
		}
		routes[name] = r
	}
}

// BoardFor returns the board whose ranks decode a request for a model after the prefill engine c: the board of c's base model if ranks of
// that board list the model, or another board of the region whose ranks list the model. If no rank lists it, it is the board of c. The
// request is decoded in region; empty: the proxy's own region.
func (p *Snapshot) BoardFor(c prefill.Candidate, model, region string) string {
	if c.Aggregated { // the candidate is a group of ranks that also decode
		return c.Board
	}
	otherBoard := "" // the first board of another base model whose ranks list the model
	for _, e := range p.order {
		isOfRegion := e.otherRegion == region // for an engine of the proxy's own region, otherRegion is empty, too
		canDecode := e.Role == Decode && len(e.Status.Models) > 0
		if !isOfRegion || !canDecode || !e.lists.Has(model) {
			continue
		}
		if e.board == c.Board {
			return e.board
		}
		otherBoard = cmp.Or(otherBoard, e.board)
	}
	return cmp.Or(otherBoard, c.Board)
}
