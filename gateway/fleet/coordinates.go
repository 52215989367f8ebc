package fleet

import (
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// placed is where a candidate is reached by decode engines, and the process of which that is true.
type placed struct {
	born Birth
	at   *mooncake.Coordinates
}

// Coordinates are where decode engines reach a prefill engine that writes to them; nil: nobody knows
// yet, or it is another process now.
func (f *Fleet) Coordinates(c prefill.Candidate) *mooncake.Coordinates {
	known, _ := f.coordinates.Load(c.ID)
	p, ok := known.(placed)
	if ok && p.born == f.Born(c.Instance) {
		return p.at
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	if in := f.instances[c.Instance]; in != nil && !ok { // what was configured is true of the first process that is seen
		return in.conf.Coordinates()
	}
	return nil
}

// Learn keeps what a candidate that was born at b has said about that.
func (f *Fleet) Learn(c prefill.Candidate, b Birth, at *mooncake.Coordinates) {
	f.coordinates.Store(c.ID, placed{b, at})
}

// Ranks is how many data-parallel ranks an engine has behind its address.
func (f *Fleet) Ranks(instance string) int {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if in := f.instances[instance]; in != nil {
		return max(1, in.conf.Ranks)
	}
	return 1
}
