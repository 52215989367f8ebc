package receipt

import "time"

// Hits are the tokens of prompts, and of them those that were in a prefix cache.
type Hits struct{ Prompt, Cached int }

func (h *Hits) add(o Hits) { h.Prompt, h.Cached = h.Prompt+o.Prompt, h.Cached+o.Cached }

const (
	summed   = 15 // minutes, the present one included
	mostKeys = 64 // keys that have sums. If there are more, the first ones have sums, as long as they send requests
)

// sums are the hits of requests that ended, by the name of the caller's key. The ring forgets receipts when there are too many. Sums are
// only forgotten by their age.
type sums map[string]*minutes

// minutes are the hits of one key.
type minutes struct {
	last int64 // minute, as the clock has it, of the request that ended last
	each [summed]struct {
		minute int64
		Hits
	}
}

func minuteOf(t time.Time) int64 { return t.Unix() / 60 }

// add counts a request that has ended.
func (s sums) add(r *Receipt) {
	if r.PromptTokens <= 0 { // the request failed before its prefill
		return
	}
	now := minuteOf(r.end())
	k := s[r.Key]
	if k == nil {
		if k = s.room(now); k == nil {
			return
		}
		s[r.Key] = k
	}
	m := &k.each[now%summed]
	if m.minute > now { // the request ended long ago, and its place has a later minute
		return
	}
	if m.minute < now {
		m.minute, m.Hits = now, Hits{}
	}
	m.add(Hits{r.PromptTokens, r.cached()})
	k.last = max(k.last, now)
}

// room makes room for one more key; nil: mostKeys other keys had requests that ended lately.
func (s sums) room(now int64) *minutes {
	if len(s) == mostKeys {
		for key, k := range s {
			if now-k.last >= summed {
				delete(s, key)
			}
		}
	}
	if len(s) == mostKeys {
		return nil
	}
	return &minutes{}
}

// cached is how many tokens of the prompt were in a prefix cache: as its engine said, or as the index thought where it says nothing.
func (r *Receipt) cached() int {
	if r.CachedTokens > 0 || len(r.Attempts) == 0 || r.Attempts[len(r.Attempts)-1].Prefill == nil {
		return max(0, r.CachedTokens)
	}
	return r.Attempts[len(r.Attempts)-1].Prefill.Hit
}

// Hits are those of a key's requests that ended in the last minute, give or take half a minute, and of those that ended in the
// rest of the last quarter of an hour.
func (g *Ring) Hits(key string, now time.Time) (last, before Hits) {
	if g == nil {
		return last, before
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	k := g.hits[key]
	if k == nil {
		return last, before
	}
	for i := range k.each {
		switch m := &k.each[i]; {
		case m.minute <= minuteOf(now)-summed:
		case m.minute >= minuteOf(now.Add(-30*time.Second)):
			last.add(m.Hits)
		default:
			before.add(m.Hits)
		}
	}
	return last, before
}
