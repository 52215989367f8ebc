// Package kept counts the KV that an engine keeps after answers have ended, for the next turns of their chats. No request reads
// this KV, so that it is no load. But its room is taken: vLLM evicts none of it before its time, and preempts requests instead.
package kept

import (
	"slices"
	"time"
)

const (
	// parts divides the time for which KV is kept: what comes within one part of it counts together, until the end of the latest.
	parts = 64
	// most is how many entries there can be at one time: those of all parts, of the one that ends and of the one that begins.
	most = parts + 2
)

// KV is what the engine of one rank keeps.
type KV struct {
	tokens  int64
	entries []entry // by their ends
}

// entry is KV that is kept from about the same time on.
type entry struct {
	tokens       int64
	since        time.Time // the latest of it came
	first, until time.Time // the ends of the earliest and of the latest of it
}

// Reserve makes the room for all that Add will ever want, so that it allocates nothing.
func (k *KV) Reserve() { k.entries = slices.Grow(k.entries, most-len(k.entries)) }

// Add counts tokens that are kept for so long from now on. It returns how many others were kept until now at most.
func (k *KV) Add(tokens int64, now time.Time, lasts time.Duration) (expired int64) {
	expired = k.Expire(now)
	k.tokens += tokens
	until, n := now.Add(lasts), len(k.entries)
	if n > 0 {
		last := &k.entries[n-1]
		if until.Before(last.until) {
			until = last.until
		}
		if n == most || until.Sub(last.first) < lasts/parts {
			last.tokens, last.since, last.until = last.tokens+tokens, now, until
			return expired
		}
	}
	k.entries = append(k.entries, entry{tokens: tokens, since: now, first: until, until: until})
	return expired
}

// Expire forgets what is not kept any longer, and returns how many tokens that were.
func (k *KV) Expire(now time.Time) (expired int64) {
	n := 0
	for ; n < len(k.entries) && !now.Before(k.entries[n].until); n++ {
		expired += k.entries[n].tokens
	}
	k.entries = slices.Delete(k.entries, 0, n)
	k.tokens -= expired
	return expired
}

// Seen takes in that an engine had fewer tokens in use at an instant than were thought to be. What is kept the shortest goes
// first: of KV that several answers share, a prefix of a chat, the engine keeps one copy, for as long as the last of them. What
// was kept from that instant on says nothing. It returns how many tokens were forgotten.
func (k *KV) Seen(fewer int64, at time.Time) (forgotten int64) {
	for i := range k.entries {
		e := &k.entries[i]
		if !e.since.Before(at) {
			break
		}
		n := min(e.tokens, max(0, fewer-forgotten))
		e.tokens -= n
		forgotten += n
	}
	k.entries = slices.DeleteFunc(k.entries, func(e entry) bool { return e.tokens == 0 })
	k.tokens -= forgotten
	return forgotten
}

// Clear forgets all of it, and returns how many tokens that were.
func (k *KV) Clear() (forgotten int64) {
	forgotten, k.tokens, k.entries = k.tokens, 0, k.entries[:0]
	return forgotten
}

// Tokens is how many tokens are kept.
func (k *KV) Tokens() int64 { return k.tokens }

// Sum is the same, counted anew.
func (k *KV) Sum() (tokens int64) {
	for i := range k.entries {
		tokens += k.entries[i].tokens
	}
	return tokens
}

// Before is how many of the tokens are kept from before an instant on.
func (k *KV) Before(at time.Time) (tokens int64) {
	for i := range k.entries {
		if k.entries[i].since.Before(at) {
			tokens += k.entries[i].tokens
		}
	}
	return tokens
}

// Next is when Expire will forget something; zero: nothing is kept.
func (k *KV) Next() time.Time {
	if len(k.entries) == 0 {
		return time.Time{}
	}
	return k.entries[0].until
}

// Clone copies it, with the room that was reserved.
func (k *KV) Clone() KV {
	c := *k
	c.entries = append(make([]entry, 0, cap(k.entries)), k.entries...)
	return c
}
