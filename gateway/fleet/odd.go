package fleet

import (
	"cmp"
	"fmt"

	"go.uber.org/zap"

	"evenkeel/gateway/config"
)

// refuseOdd finds engines whose connector is another one than that of the other engines of
// their model: no KV could get from one to the other, or the decode rank would be chosen too
// late. Those that serve already say which connector a model has, and after them the first
// that is up. It is called with f.mu held.
func (f *Fleet) refuseOdd() {
	first := map[string]*instance{} // by board
	find := func(is func(*instance) bool) {
		for _, k := range f.order {
			if in := f.instances[k]; in.status.Up && len(in.status.Models) > 0 && is(in) {
				board := f.boardOf(in)
				first[board] = cmp.Or(first[board], in)
			}
		}
	}
	find(func(in *instance) bool { return in.serving })
	find(func(*instance) bool { return true })
	for _, k := range f.order {
		in := f.instances[k]
		why, one := "", first[f.boardOf(in)]
		if one != nil && config.Manner(in.profile) != config.Manner(one.profile) {
			why = fmt.Sprintf("its connector is %s (profile %s), and %s engine %s, which has model %s too, has %s (profile %s); all engines of a model share one connector",
				in.profile.Connector, in.conf.Profile, one.role, one.id, boardOf(in.status.Models), one.profile.Connector, one.conf.Profile)
		}
		if why != "" && in.odd == "" {
			f.host.Log.Error("an engine is refused: "+why, zap.String("engine", in.key()), zap.String("beside", one.key()))
		}
		in.odd = why
	}
}
