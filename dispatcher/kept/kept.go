// Package kept counts the KV that an engine keeps after answers have ended, for the next turns of their chats. No request reads
// this KV, so it is no load. But its room is taken: vLLM evicts none of it before its time is over, and preempts requests instead.
package kept

import (
	"slices"
	"time"
)

const (
	// parts divides the time for which KV is kept. The KV of answers that end within one part of it is one entry, which lasts until the end
	// of the latest.
	parts = 64
	// mostEntries is how many entries there can be at one time: one for each part, and two for the parts that are just ending
	// and beginning.
	mostEntries = parts + 2
)

// KV is what the engine of one rank keeps.
type KV struct {
	tokens  int64
	entries []entry // by their ends
}

// entry is the KV of answers that ended at about the same time.
type entry struct {
	tokens            int64
	since             time.Time // when the latest KV was added
	firstUntil, until time.Time // when the engine gives up the earliest KV of the entry, and the latest
}

// Reserve allocates the memory for all entries, so that Add allocates nothing.
func (k *KV) Reserve() { k.entries = slices.Grow(k.entries, mostEntries-len(k.entries)) }

// Add counts tokens that the engine keeps for the time lasts from now on. If they are given up less than lasts/parts after the earliest
// KV of the last entry, they join that entry, and also if there is no room for another entry. Add returns how many other tokens expired,
// as Expire does.
func (k *KV) Add(tokens int64, now time.Time, lasts time.Duration) (expired int64) {
	expired = k.Expire(now)
	k.tokens += tokens
	until, n := now.Add(lasts), len(k.entries)
	if n > 0 {
		last := &k.entries[n-1]
		if until.Before(last.until) { // lasts has become shorter: entries stay in the order of their ends
			until = last.until
		}
		if n == mostEntries || until.Sub(last.firstUntil) < lasts/parts {
			last.tokens, last.since, last.until = last.tokens+tokens, now, until
			return expired
		}
	}
	k.entries = append(k.entries, entry{tokens: tokens, since: now, firstUntil: until, until: until})
	return expired
}

// Expire drops the KV whose time is over, and returns how many tokens that was.
func (k *KV) Expire(now time.Time) (expired int64) {
	n := 0
	for ; n < len(k.entries) && !now.Before(k.entries[n].until); n++ {
		expired += k.entries[n].tokens
	}
	k.entries = slices.Delete(k.entries, 0, n)
	k.tokens -= expired
	return expired
}

// Seen corrects the account by the gauge of the engine: at an instant, the engine had fewer tokens in use than the board counted, and
// the difference is given as fewer. Seen drops so many kept tokens, and those first that would be given up first: of KV that several
// answers share, such as a prefix of a chat, the engine keeps one copy until the time of the last answer is over. Entries to which KV
// was added at or after the instant stay. It returns how many tokens were dropped.
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

// Clear drops all KV, and returns how many tokens that was.
func (k *KV) Clear() (forgotten int64) {
	forgotten, k.tokens, k.entries = k.tokens, 0, k.entries[:0]
	return forgotten
}

// Tokens returns how many tokens are kept.
func (k *KV) Tokens() int64 { return k.tokens }

// Sum returns the same number as Tokens, added up from the entries, for the check of the ledger.
func (k *KV) Sum() (tokens int64) {
	for i := range k.entries {
		tokens += k.entries[i].tokens
	}
	return tokens
}

// Before returns how many tokens are in entries to which nothing was added at or after an instant.
func (k *KV) Before(at time.Time) (tokens int64) {
	for i := range k.entries {
		if k.entries[i].since.Before(at) {
			tokens += k.entries[i].tokens
		}
	}
	return tokens
}

// Next returns when Expire will drop the next entry; zero: no KV is kept.
func (k *KV) Next() time.Time {
	if len(k.entries) == 0 {
		return time.Time{}
	}
	return k.entries[0].until
}

// Clone returns a copy, with the memory that was reserved.
func (k *KV) Clone() KV {
	c := *k
	c.entries = append(make([]entry, 0, cap(k.entries)), k.entries...)
	return c
}
