package receipt

import "time"

// Hits counts the tokens of prompts, and how many of them were in a prefix cache.
type Hits struct{ Prompt, Cached int }

func (h *Hits) add(o Hits) { h.Prompt, h.Cached = h.Prompt+o.Prompt, h.Cached+o.Cached }

const (
	minutesKept = 15 // number of minutes for which sums are kept, including the present minute
	maxKeys     = 64 // API keys that can have sums at the same time; a key keeps its sums as long as it sends requests
)

// sums holds the hits of ended requests, by the name of the caller's API key. They are kept apart from the receipts, because the ring drops
// receipts when there are too many, and sums must only be dropped by age.
type sums map[string]*minutes

// minutes holds the hits of one API key, minute by minute.
type minutes struct {
	last int64 // minute (Unix time / 60) in which the key's last request ended
	each [minutesKept]struct {
		minute int64
		Hits
	}
}

func minuteOf(t time.Time) int64 { return t.Unix() / 60 }

// isOutdated says whether sums of minute m no longer count in the minute now. After the clock was set back, m may also be far in the
// future.
func isOutdated(m, now int64) bool { return m <= now-minutesKept || m >= now+minutesKept }

// add counts a request that has ended, unless maxKeys other keys have recent requests.
func (s sums) add(r *Receipt) {
	if r.PromptTokens <= 0 { // the request failed before its prefill
		return
	}
	now := minuteOf(r.endTime())
	k := s[r.Key]
	if k == nil {
		if k = s.newSums(now); k == nil {
			return
		}
		s[r.Key] = k
	}
	m := &k.each[now%minutesKept]
	if m.minute != now { // the entry still has the sums of an older minute
		m.minute, m.Hits = now, Hits{}
	}
	m.add(Hits{r.PromptTokens, r.cached()})
	if k.last < now || isOutdated(k.last, now) { // an outdated minute after now is from before the clock was set back
		k.last = now
	}
}

// newSums returns empty sums for one more key; nil: maxKeys other keys have recent requests. If all places are taken, it first drops the
// keys without recent requests.
func (s sums) newSums(now int64) *minutes {
	if len(s) == maxKeys {
		for key, k := range s {
			if isOutdated(k.last, now) {
				delete(s, key)
			}
		}
	}
	if len(s) == maxKeys {
		return nil
	}
	return &minutes{}
}

// cached is how many tokens of the prompt were in a prefix cache: as the engine reported, or as evenkeel expected if the engine reported
// none.
func (r *Receipt) cached() int {
	if n := len(r.Attempts); r.CachedTokens <= 0 && n > 0 && r.Attempts[n-1].Prefill != nil {
		return r.Attempts[n-1].Prefill.Hit // the expected hit of the attempt that served the request
	}
	return max(0, r.CachedTokens)
}

// Hits returns the hits of a key's requests that ended in about the last minute (last), and in the 14 minutes before (before).
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
		case isOutdated(m.minute, minuteOf(now)):
		case m.minute >= minuteOf(now.Add(-30*time.Second)): // the present minute, and in its first 30 s also the one before
			last.add(m.Hits)
		default:
			before.add(m.Hits)
		}
	}
	return last, before
}
