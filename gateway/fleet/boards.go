package fleet

import (
	"cmp"
	"strings"

	"evenkeel/gateway/owner"
)

// RegionMark stands between a board and its region, where that is not ours.
const RegionMark = "@"

// BoardIn is where the ranks of another region are while they are ours: KV does
// not cross regions, so what was prefilled there is decoded there.
func BoardIn(board, region string) string {
	if region == "" {
		return board
	}
	return board + RegionMark + region
}

// AggregatedMark follows a model in the name of the board of its ranks that prefill and decode. A request is on
// the one kind of ranks or on the other from its turn on, so each kind has a board.
const AggregatedMark = "+aggregated"

// Called is a board as people read its name, or the name of a group with it; aggregated says that its ranks prefill and decode.
func Called(board string) (name string, aggregated bool) {
	model, region, ok := cutLast(board, AggregatedMark)
	if !ok || region != "" && !strings.HasPrefix(region, RegionMark) {
		return board, false
	}
	return model + region + " (aggregated)", true
}

func cutLast(s, mark string) (before, after string, found bool) {
	if i := strings.LastIndex(s, mark); i >= 0 {
		return s[:i], s[i+len(mark):], true
	}
	return s, "", false
}

// board is the one that an engine's model is on in its own region.
func (i *instance) board() string {
	if i.role == Aggregated {
		return boardOf(i.status.Models) + AggregatedMark
	}
	return boardOf(i.status.Models)
}

// abroad is the region of an engine that is another's by its config.
func (f *Fleet) abroad(in *instance) string {
	if in.conf.Region == f.host.Settings().Geo.Self.Region {
		return ""
	}
	return in.conf.Region
}

// RegionFor is where a hand-off of a prefill engine is decoded, empty for ours.
func (f *Fleet) RegionFor(prefiller string) string {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if in := f.instances[prefiller]; in != nil {
		return f.abroad(in)
	}
	return ""
}

// decodes are the engines with slots that answer and are meant, as they are now.
func (f *Fleet) decodes(meant func(*instance) bool) (list []*instance) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, in := range f.instances {
		if in.decodes() && in.status.Up && meant(in) {
			list = append(list, new(*in))
		}
	}
	return list
}

// scopeOf is the scope whose owner admits to an engine: its decode group, or its
// region.
func (f *Fleet) scopeOf(in *instance) string {
	if f.Admission.Has(owner.Groups) {
		return in.conf.Group
	}
	return cmp.Or(in.conf.Region, f.host.Settings().Geo.Self.Region)
}

// boardOf is the board that an engine's model is on; empty: its models are not known.
func (f *Fleet) boardOf(in *instance) string {
	if len(in.status.Models) == 0 {
		return ""
	}
	return BoardIn(in.board(), f.abroad(in))
}
