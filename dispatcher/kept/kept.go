// Package kept counts the KV that an engine keeps after answers have ended, for the next turns of their chats. No running request reads
// this KV, so it is no load. But it takes room: vLLM does not evict it before its time is over, and preempts requests instead.
package kept

import (
	"slices"
	"time"
)

const (
	// timeParts is into how many parts the time for which KV is kept is divided. The KV of all answers that end within one part is one entry,
	// which counts until the time of the latest answer is over.
	timeParts = 64
	// mostEntries is the largest number of entries at one time: one for each part, and two for the parts that are just ending and
	// beginning.
	mostEntries = timeParts + 2
)

// KV counts the KV tokens that the engine of one rank keeps.
type KV struct {
	tokens  int64
	entries []entry // in the order in which their time is over
}

// entry is the KV of answers that ended at about the same time.
type entry struct {
	tokens                  int64
	lastAdded               time.Time // when KV was last added
	firstExpiry, lastExpiry time.Time // when the engine frees the first KV of the entry, and the last
}

// Reserve allocates the memory for all entries, so that Add allocates nothing.
func (k *KV) Reserve() { k.entries = slices.Grow(k.entries, mostEntries-len(k.entries)) }

// Add counts tokens that the engine keeps for the time keepFor from now on. It calls Expire first, and returns its result.
//
// The tokens become an entry, or are added to the last entry if their time ends less than keepFor/timeParts after that of the first KV in
// this entry. The number of entries is bounded by this. If it is reached nevertheless, because keepFor has changed, all tokens are added to
// the last entry.
func (k *KV) Add(tokens int64, now time.Time, keepFor time.Duration) (expired int64) {
	expired = k.Expire(now)
	k.tokens += tokens
	expiry, count := now.Add(keepFor), len(k.entries)
	if count > 0 {
		last := &k.entries[count-1]
		if expiry.Before(last.lastExpiry) { // keepFor has become shorter, but the entries must stay in the order of their ends
			expiry = last.lastExpiry
		}
		if count == mostEntries || expiry.Sub(last.firstExpiry) < keepFor/timeParts {
			last.tokens, last.lastAdded, last.lastExpiry = last.tokens+tokens, now, expiry
			return expired
		}
	}
	k.entries = append(k.entries, entry{tokens: tokens, lastAdded: now, firstExpiry: expiry, lastExpiry: expiry})
	return expired
}

// Expire drops the KV whose time is over, and returns the number of dropped tokens.
func (k *KV) Expire(now time.Time) (expired int64) {
	n := 0
	for ; n < len(k.entries) && !now.Before(k.entries[n].lastExpiry); n++ {
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
func (k *KV) DropSurplus(surplus int64, at time.Time) (dropped int64) {
	for i := range k.entries {
		e := &k.entries[i]
		if !e.lastAdded.Before(at) {
			break
		}
		n := min(e.tokens, max(0, surplus-dropped))
		e.tokens -= n
		dropped += n
	}
	k.entries = slices.DeleteFunc(k.entries, func(e entry) bool { return e.tokens == 0 })
	k.tokens -= dropped
	return dropped
}

// Clear drops all KV, and returns the number of dropped tokens.
func (k *KV) Clear() (dropped int64) {
	dropped, k.tokens, k.entries = k.tokens, 0, k.entries[:0]
	return dropped
}

// Tokens returns how many tokens are kept.
func (k *KV) Tokens() int64 { return k.tokens }

// SumOfEntries adds up the tokens of all entries. The result must be the same as that of Tokens, which the board checks.
func (k *KV) SumOfEntries() (tokens int64) {
	for i := range k.entries {
		tokens += k.entries[i].tokens
	}
	return tokens
}

// AddedBefore returns how many tokens are in entries to which no KV was added at or after the given time.
func (k *KV) AddedBefore(at time.Time) (tokens int64) {
	for i := range k.entries {
		if k.entries[i].lastAdded.Before(at) {
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
	return k.entries[0].lastExpiry
}

// Clone returns a copy with as much reserved memory.
func (k *KV) Clone() KV {
	c := *k
	c.entries = append(make([]entry, 0, cap(k.entries)), k.entries...)
	return c
}
