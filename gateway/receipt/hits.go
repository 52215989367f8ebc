package receipt

import "time"

// Hits counts the tokens of prompts, and how many of them were in a prefix cache.
type Hits struct{ Prompt, Cached int }

// add adds the tokens of other prompts.
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
	latest int64 // minute (Unix time / 60) in which the key's last request ended; once outdated, the sums make room for another key
	each   [minutesKept]struct {
		minute int64
		Hits
	}
}

// minuteOf returns the minute of a time: its Unix time / 60.
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
	ofKey := s[r.Key]
	if ofKey == nil {
		if ofKey = s.newSums(now); ofKey == nil { // there is no room for another key
			return
		}
		s[r.Key] = ofKey
	}
	m := &ofKey.each[now%minutesKept] // each is a ring, in which every minute has its place
	if m.minute != now {              // the entry still has the sums of an older minute
		m.minute, m.Hits = now, Hits{}
	}
	m.add(Hits{r.PromptTokens, r.cached()})
	if ofKey.latest < now || isOutdated(ofKey.latest, now) { // an outdated minute after now is from before the clock was set back
		ofKey.latest = now
	}
}

// newSums returns empty sums for one more key; nil: maxKeys other keys have recent requests. If all places are taken, it first drops the
// keys without recent requests.
func (s sums) newSums(now int64) *minutes {
	if len(s) == maxKeys {
		for key, ofKey := range s {
			if isOutdated(ofKey.latest, now) {
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
	engineReportedNone := r.CachedTokens <= 0
	if n := len(r.Attempts); engineReportedNone && n > 0 && r.Attempts[n-1].Prefill != nil {
		return r.Attempts[n-1].Prefill.Hit // the expected hit of the attempt that served the request
	}
	return max(0, r.CachedTokens)
}

// Hits returns the hits of a key's requests that ended in about the last minute (lastMinute), and in the 14 minutes before (before). Both
// are zero if the key has no recent requests, or if no receipts are kept (g is nil).
func (g *Ring) Hits(key string, now time.Time) (lastMinute, before Hits) {
	if g == nil {
		return lastMinute, before
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	ofKey := g.hits[key]
	if ofKey == nil {
		return lastMinute, before
	}
	for i := range ofKey.each {
		switch m := &ofKey.each[i]; {
		case isOutdated(m.minute, minuteOf(now)): // too old to count
		case m.minute >= minuteOf(now.Add(-30*time.Second)): // the present minute, and in its first 30 s also the one before
			lastMinute.add(m.Hits)
		default:
			before.add(m.Hits)
		}
	}
	return lastMinute, before
}
