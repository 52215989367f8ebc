package receipt

import "time"

// Hits counts tokens of prompts, and those in a prefix cache.
type Hits struct{ Prompt, Cached int }

func (h *Hits) add(o Hits) { h.Prompt, h.Cached = h.Prompt+o.Prompt, h.Cached+o.Cached }

const (
	minutesKept = 15 // number of minutes for which sums are kept, including the present minute
	maxKeys     = 64 // with sums at a time, which stay while the key sends requests
)

// sums are by API key. The ring drops receipts when there are too many, but sums only by age.
type sums map[string]*minutes

type minutes struct {
	latest int64 // Unix time / 60 of the key's last request; outdated sums make room for another key
	each   [minutesKept]struct {
		minute int64
		Hits
	}
}

func minuteOf(t time.Time) int64 { return t.Unix() / 60 }

// After the clock was set back, m may be far in the future.
func isOutdated(m, now int64) bool { return m <= now-minutesKept || m >= now+minutesKept }

// add leaves out a new key if maxKeys others have recent requests.
func (s sums) add(r *Receipt) {
	if r.PromptTokens <= 0 {
		return
	}
	now := minuteOf(r.endTime())
	ofKey := s[r.Key]
	if ofKey == nil {
		if ofKey = s.newSums(now); ofKey == nil {
			return
		}
		s[r.Key] = ofKey
	}
	m := &ofKey.each[now%minutesKept] // a ring
	if m.minute != now {              // of an older minute
		m.minute, m.Hits = now, Hits{}
	}
	m.add(Hits{r.PromptTokens, r.cached()})
	if ofKey.latest < now || isOutdated(ofKey.latest, now) {
		// An outdated minute after now is from before the clock was set back.
		ofKey.latest = now
	}
}

// newSums drops keys without recent requests if all places are taken; nil: there are none.
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

// cached is what the engine reported or, without a report, what evenkeel expected.
func (r *Receipt) cached() int {
	engineReportedNone := r.CachedTokens <= 0
	if n := len(r.Attempts); engineReportedNone && n > 0 && r.Attempts[n-1].Prefill != nil {
		return r.Attempts[n-1].Prefill.Hit // of the attempt that served the request
	}
	return max(0, r.CachedTokens)
}

// Hits returns the hits of a key's requests that ended in about the last minute, and in the 14
// minutes before.
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
		case isOutdated(m.minute, minuteOf(now)):
		// the present minute and, in its first 30 s, also the one before
		case m.minute >= minuteOf(now.Add(-30*time.Second)):
			lastMinute.add(m.Hits)
		default:
			before.add(m.Hits)
		}
	}
	return lastMinute, before
}
