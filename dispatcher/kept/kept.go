// Package kept counts the KV that an engine keeps after answers have ended, for the next turns of
// their chats. No running request reads this KV, so it adds no time to a step. But it takes room:
// vLLM does not evict it before its time is over, and preempts requests instead.
package kept

import (
	"slices"
	"time"
)

const (
	// The keep time is divided into so many parts. The KV of all answers that end within one part
	// shares one entry, which counts until the keep time of the latest is over.
	timeParts = 64
	// Two more are for the parts that are just ending and beginning.
	mostEntries = timeParts + 2
)

// KV counts the KV tokens that the engine of one rank keeps of ended answers.
type KV struct {
	tokens  int64
	entries []entry // by time of expiry, the next one first
}

type entry struct {
	tokens                  int64
	lastAdded               time.Time // when tokens were last added to this entry
	firstExpiry, lastExpiry time.Time // when the engine frees the first tokens of the entry, and the last ones
}

// Reserve allocates memory, so that Add allocates nothing.
func (k *KV) Reserve() { k.entries = slices.Grow(k.entries, mostEntries-len(k.entries)) }

// Add counts tokens that the engine keeps for keepFor from now on. It drops expired KV first, and
// returns how much. If the number of entries reaches mostEntries because keepFor has changed,
// tokens are always added to the last entry.
func (k *KV) Add(tokens int64, now time.Time, keepFor time.Duration) (expired int64) {
	expired = k.Expire(now)
	k.tokens += tokens
	expiry, count := now.Add(keepFor), len(k.entries)
	if count > 0 {
		last := &k.entries[count-1]
		if expiry.Before(last.lastExpiry) { // keepFor has become shorter, but entries must stay in order
			expiry = last.lastExpiry
		}
		samePart := expiry.Sub(last.firstExpiry) < keepFor/timeParts
		if samePart || count == mostEntries {
			last.tokens, last.lastAdded, last.lastExpiry = last.tokens+tokens, now, expiry
			return expired
		}
	}
	k.entries = append(k.entries, entry{tokens: tokens, lastAdded: now, firstExpiry: expiry, lastExpiry: expiry})
	return expired
}

// Expire drops the KV whose keep time is over, and returns how much.
func (k *KV) Expire(now time.Time) (expired int64) {
	expiredEntries := 0
	for ; expiredEntries < len(k.entries) && !now.Before(k.entries[expiredEntries].lastExpiry); expiredEntries++ {
		expired += k.entries[expiredEntries].tokens
	}
	k.entries = slices.Delete(k.entries, 0, expiredEntries)
	k.tokens -= expired
	return expired
}

// DropSurplus corrects the count by the engine's own KV gauge: at the time at, the board counted
// surplus tokens too many. It drops those that expire first: if several answers share KV, such as a
// prefix of a chat, the engine keeps one copy until the time of the last answer is over. Entries to
// which KV was added at or after the time at stay, because the gauge may not include them.
func (k *KV) DropSurplus(surplus int64, at time.Time) (dropped int64) {
	for i := range k.entries {
		e := &k.entries[i]
		if !e.lastAdded.Before(at) { // so it and all later entries have KV that the gauge may not include
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

// Clear drops all KV, as when the engine restarts.
func (k *KV) Clear() (dropped int64) {
	dropped, k.tokens, k.entries = k.tokens, 0, k.entries[:0]
	return dropped
}

// Tokens take room, but are no load.
func (k *KV) Tokens() int64 { return k.tokens }

// SumOfEntries is for the board's check that it equals Tokens.
func (k *KV) SumOfEntries() (tokens int64) {
	for i := range k.entries {
		tokens += k.entries[i].tokens
	}
	return tokens
}

// AddedBefore counts the entries to which nothing was added at or after the given time.
func (k *KV) AddedBefore(at time.Time) (tokens int64) {
	for i := range k.entries {
		if k.entries[i].lastAdded.Before(at) {
			tokens += k.entries[i].tokens
		}
	}
	return tokens
}

// Next returns when Expire will next drop KV; zero: no KV is kept.
func (k *KV) Next() time.Time {
	if len(k.entries) == 0 {
		return time.Time{}
	}
	return k.entries[0].lastExpiry
}
