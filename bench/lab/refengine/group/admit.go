package group

import (
	"slices"
	"time"

	"evenkeel/bench/lab/refengine/cache"
)

// preempt makes room for the tokens of the coming step: while a rank's KV does
// not fit, its most recently admitted request goes, never its only one.
func (g *Group) preempt() {
	for i := range g.ranks {
		r := &g.ranks[i]
		r.pressed = false
		for len(r.running) > 1 && r.used()+r.growth(g.cfg) > g.cfg.Blocks {
			last := len(r.running) - 1
			j := r.running[last]
			r.running[last] = nil
			r.running = r.running[:last]
			r.pressed = true
			g.count.Preemptions.Add(1)
			if g.cfg.Recompute {
				j.phase = gone
				j.End.Store(Recomputed)
				nudge(j.Wake)
				continue
			}
			j.phase, j.remote = queued, false // recomputed in place when blocks are free, invisible but for the time
			r.waiting = slices.Insert(r.waiting, 0, j)
		}
	}
}

// admit gives out KV blocks and slots, first come first served. A request
// whose KV is on its way lets others overtake; one that finds no blocks does
// not. A rank that had to preempt admits nobody in that step.
func (g *Group) admit() {
	g.prefills = 0
	for i := range g.ranks {
		r := &g.ranks[i]
		r.prefills = 0
		if r.pressed {
			continue
		}
		free := g.cfg.Blocks - r.used() - r.growth(g.cfg)
		var prefills time.Duration
		kept := r.waiting[:0]
		blocked := false
		for _, j := range r.waiting {
			if j.phase == queued && !blocked {
				g.grant(r, j, &free, len(kept) == 0 && len(r.running)+len(r.stranded)+len(r.answered) == 0)
				blocked = j.phase == queued
			}
			if j.phase != ready || len(r.running) >= g.cfg.Slots {
				kept = append(kept, j)
				continue
			}
			if j.local {
				g.count.LocalPrefills.Add(1)
				prefills += g.prefill(j)
				j.local = false
			}
			j.phase = running
			g.giveTurn(j)
			r.running = append(r.running, j)
		}
		clear(r.waiting[len(kept):])
		r.waiting, r.prefills = kept, prefills
		g.prefills = max(g.prefills, prefills)
	}
}

// prefill computes a prompt on its decode rank and returns what that adds to the
// step, of all ranks of the group.
func (g *Group) prefill(j *Job) time.Duration {
	cached, bad := g.caches[j.rank].Match(j.salt, j.ids)
	j.Cached.Store(int64(cached))
	g.caches[j.rank].Add(j.salt, j.ids, bad)
	return g.cfg.PrefillBase + time.Duration(j.kvTokens()-cached)*g.cfg.PrefillPer
}

// grant gives a queued request its KV blocks, if they and, for a local
// prefill, a slot are free. One that is alone on its rank always gets them.
func (g *Group) grant(r *decodeRank, j *Job, free *int, alone bool) {
	need := cache.Blocks(j.kvTokens() + g.cfg.TokensPerChunk)
	if need > *free && !alone {
		return
	}
	if r.full(g.cfg, j.remote) {
		return
	}
	*free -= need
	if j.remote {
		j.phase = pulling
		close(j.Granted)
	} else {
		j.phase, j.local = ready, true
	}
}
