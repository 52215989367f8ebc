// Package kept counts the KV that an engine keeps after answers have ended, for the next turns of their chats. No running request reads
// this KV, so it is no load. But it takes room: vLLM does not evict it before its time is over, and preempts requests instead.
package kept

import (
	"slices"
	"time"
)

const (
	// parts is into how many parts the time for which KV is kept is divided. The KV of all answers that end within one part is one entry,
	// which counts until the time of the latest answer is over.
	parts = 64
	// mostEntries is the largest number of entries at one time: one for each part, and two for the parts that are just ending and
	// beginning.
	mostEntries = parts + 2
)

// KV counts the KV tokens that the engine of one rank keeps.
type KV struct {
	tokens  int64
	entries []entry // in the order in which their time is over
}

// entry is the KV of answers that ended at about the same time.
type entry struct {
	tokens            int64
	since             time.Time // when KV was last added
	firstUntil, until time.Time // when the engine frees the first KV of the entry, and the last
}

// Reserve allocates the memory for all entries, so that Add allocates nothing.
func (k *KV) Reserve() { k.entries = slices.Grow(k.entries, mostEntries-len(k.entries)) }

// Add counts tokens that the engine keeps for the time lasts from now on. If their time ends less than lasts/parts after that of the first
// KV in the last entry, or if there is no room for another entry, they are added to the last entry. Add calls Expire first, and returns its
// result.
func (k *KV) Add(tokens int64, now time.Time, lasts time.Duration) (expired int64) {
	expired = k.Expire(now)
	k.tokens += tokens
	until, count := now.Add(lasts), len(k.entries)
	if count > 0 {
		last := &k.entries[count-1]
		if until.Before(last.until) { // lasts has become shorter, but the entries must stay in the order of their ends
			until = last.until
		}
		if count == mostEntries || until.Sub(last.firstUntil) < lasts/parts {
			last.tokens, last.since, last.until = last.tokens+tokens, now, until
			return expired
		}
	}
	k.entries = append(k.entries, entry{tokens: tokens, since: now, firstUntil: until, until: until})
	return expired
}

// Expire drops the KV whose time is over, and returns the number of dropped tokens.
func (k *KV) Expire(now time.Time) (expired int64) {
	n := 0
	for ; n < len(k.entries) && !now.Before(k.entries[n].until); n++ {
		expired += k.entries[n].tokens
	}
	k.entries = slices.Delete(k.entries, 0, n)
	k.tokens -= expired
	return expired
}

// DropSurplus corrects the account by the gauge of the engine. At the time at, the board counted so many tokens (surplus) more than the
// engine had in use. DropSurplus drops so many kept tokens, and returns how many it dropped. It begins with the tokens whose time ends
// first: if several answers share KV, such as a prefix of a chat, the engine keeps one copy until the time of the last answer is over.
// DropSurplus does not change entries to which KV was added at or after the time at.
func (k *KV) DropSurplus(surplus int64, at time.Time) (forgotten int64) {
	for i := range k.entries {
		e := &k.entries[i]
		if !e.since.Before(at) {
			break
		}
		n := min(e.tokens, max(0, surplus-forgotten))
		e.tokens -= n
		forgotten += n
	}
	k.entries = slices.DeleteFunc(k.entries, func(e entry) bool { return e.tokens == 0 })
	k.tokens -= forgotten
	return forgotten
}

// Clear drops all KV, and returns the number of dropped tokens.
func (k *KV) Clear() (forgotten int64) {
	forgotten, k.tokens, k.entries = k.tokens, 0, k.entries[:0]
	return forgotten
}

// Tokens returns how many tokens are kept.
func (k *KV) Tokens() int64 { return k.tokens }

// Sum adds up the tokens of all entries. The result must be the same as that of Tokens, which the board checks.
func (k *KV) Sum() (tokens int64) {
	for i := range k.entries {
		tokens += k.entries[i].tokens
	}
	return tokens
}

// Before returns how many tokens are in entries to which no KV was added at or after the given time.
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

// Clone returns a copy with as much reserved memory.
func (k *KV) Clone() KV {
	c := *k
	c.entries = append(make([]entry, 0, cap(k.entries)), k.entries...)
	return c
}
