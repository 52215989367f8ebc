package roster

import (
	"cmp"
	"slices"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/internal/words"
	"evenkeel/prefill"
)

// LoRA adapters are loaded engine by engine, so engines of one model may list different names. A
// request goes only to engines that list the name in it.

// addFullNames adds the names by which SGLang's own clients ask for LoRA adapters: the base model's
// name, a colon, and the adapter's (0.5.23, _parse_model_parameter in
// entrypoints/openai/serving_base.py).
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

// listings has the model lists of decode ranks.
type listings struct {
	// of all ranks; of those that take requests or for which requests wait
	all, accepting []*board.Names
	anyUnnamed     bool // an engine has not named its models yet
}

func listingsOf(all map[string]*listings, key string) *listings {
	if all[key] == nil {
		all[key] = &listings{}
	}
	return all[key]
}

func (l *listings) add(models *board.Names, accepts bool) {
	if !slices.Contains(l.all, models) {
		l.all = append(l.all, models)
	}
	if accepts && !slices.Contains(l.accepting, models) {
		l.accepting = append(l.accepting, models)
	}
}

func anyLists(lists []*board.Names, model string) bool {
	return slices.ContainsFunc(lists, func(n *board.Names) bool { return n.Has(model) })
}

// dropUnlistedModels compares each candidate with the decode ranks of its region or, if it is a
// group, of the group.
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

// keepListedModels removes models that no reachable rank lists. It removes none while an engine has
// not named its models, or if no rank lists any of them: the candidate may serve them alone.
func keepListedModels(c *prefill.Candidate, reachable *listings) {
	isListed := func(model string) bool { return anyLists(reachable.all, model) }
	if !reachable.anyUnnamed && slices.ContainsFunc(c.Models, isListed) {
		c.Models = slices.DeleteFunc(c.Models, func(model string) bool { return !isListed(model) })
	}
}

// markFallbackModels marks models that only ranks list which take no requests now. If no rank takes
// requests, no model is better off, and none is marked.
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

// Indexes of arrays with one value per side.
const (
	prefillSide = iota
	decodeSide
)

// markOneSided marks a model that one side does not list, if that side has its base model and all
// its engines have named their models. If the side does not have the base model at all, e.g. one
// for embeddings, one engine alone may serve it.
func markOneSided(routes map[string]Route, engines []*Engine) {
	hasBase := map[string][2]bool{} // by base model and side
	var unknown [2]bool             // by side: an engine has not named its models yet
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
		baseModel := r.Board // a route's board has the name of its base model
		for side, isListed := range r.listed {
			if isListed || r.OneSided {
				continue
			}
			r.OneSided = hasBase[baseModel][side] && !unknown[side]
		}
		routes[name] = r
	}
}

// BoardFor returns the board whose ranks decode a request after the prefill engine c: that of c if
// its ranks list the model, else another of the region whose ranks do, else that of c. An empty
// region is the proxy's own.
func (p *Snapshot) BoardFor(c prefill.Candidate, model, region string) string {
	if c.Aggregated { // the ranks also decode
		return c.Board
	}
	otherBoard := "" // of another base model
	for _, e := range p.order {
		isOfRegion := e.otherRegion == region // empty for the proxy's own region
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
