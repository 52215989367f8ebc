package fleet

import (
	"slices"

	"evenkeel/gateway/owner"
)

// Scopes counts the engines of every scope, and those that answer.
func (f *Fleet) Scopes() map[string]owner.Reach {
	f.mu.RLock()
	defer f.mu.RUnlock()
	all := map[string]owner.Reach{}
	for _, in := range f.instances {
		if !in.decodes() && !f.Admission.Has(owner.Regions) { // a group is one of engines that decode, a region is all that is there
			continue
		}
		r := all[f.scopeOf(in)]
		if r.All++; in.status.Up {
			r.Up++
		}
		all[f.scopeOf(in)] = r
	}
	return all
}

// BoardsOf are the boards with a group's ranks.
func (f *Fleet) BoardsOf(name string) (boards []string) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, in := range f.instances {
		if !in.decodes() || in.conf.Group != name || len(in.status.Models) == 0 {
			continue
		}
		if b := boardOf(in.status.Models); !slices.Contains(boards, b) {
			boards = append(boards, b)
		}
	}
	return boards
}

// Owned says whether some decode group with a board's ranks that list a model is ours.
func (f *Fleet) Owned(board, model string) bool {
	return f.groupWith(board, model, (*owner.Scope).Admits)
}

// Begins says whether requests for a model may begin here that a board's ranks will decode; model empty: for some model.
func (f *Fleet) Begins(board, model string) bool {
	return f.groupWith(board, model, (*owner.Scope).Begins)
}

// groupWith finds a group of a board's ranks that list a model; where this proxy is alone there is
// one.
func (f *Fleet) groupWith(board, model string, is func(*owner.Scope) bool) bool {
	s := f.Admission
	if !s.Has(owner.Groups) {
		return true
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, in := range f.instances {
		if !in.decodes() || len(in.status.Models) == 0 || boardOf(in.status.Models) != board && in.board() != board || model != "" && !in.has(model) {
			continue
		}
		if a := s.Of(in.conf.Group); a != nil && is(a) {
			return true
		}
	}
	return false
}

// Admits says whether the owner of a worker's region is this proxy.
func (f *Fleet) Admits(worker int32) bool {
	r := f.Rank(worker)
	return r == nil || !f.Admission.Has(owner.Regions) || r.Scope.Admits()
}
