// Package handback remembers which answers' KV decode engines still have, so that the prefill engine of the conversation's next turn can
// fetch the KV instead of computing it. An engine fetches the KV that the request names, and does not compare tokens. So this package
// compares them: it offers KV only for a prompt that begins with exactly the tokens that the KV was computed from.
package handback

import (
	"encoding/json"
	"slices"
	"sync"
	"time"

	"evenkeel/gateway/fleet/roster"
)

// A Turn is an answer whose engine keeps its KV.
type Turn struct {
	Scope  string          // only a request of the same scope may use the KV
	IDs    []int32         // the tokens whose KV it is
	Params json.RawMessage // the kv_transfer_params with which a prefill request fetches the KV
	Made   roster.Birth    // the engine process that has the KV
	Came   time.Time
	Until  time.Time // the KV is not offered at this time or later

	hash uint64
}

// bytes is about how much memory a turn takes.
func (t *Turn) bytes() int { return 4*len(t.IDs) + len(t.Params) + len(t.Scope) + 256 }

// Turns are the turns that are remembered. The zero value has none.
type Turns struct {
	mu      sync.Mutex
	byHash  map[uint64][]*Turn
	lengths map[int]int // number of tokens -> how many turns have this number
	order   []*Turn     // all turns, the oldest first
	bytes   int         // memory that all turns take together
}

// Keep remembers a turn. All turns together take at most `most` bytes of memory: to make room, Keep forgets the oldest. A turn that alone
// takes more, that has no tokens, or that is too old is not remembered.
func (k *Turns) Keep(t *Turn, now time.Time, most int) {
	if t.bytes() > most || len(t.IDs) == 0 || !now.Before(t.Until) {
		return
	}
	t.hash = hashScope(t.Scope)
	for _, id := range t.IDs {
		t.hash = hashToken(t.hash, id)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.drop(func(old *Turn) bool { return !now.Before(old.Until) || k.bytes+t.bytes() > most })
	if k.byHash == nil {
		k.byHash, k.lengths = map[uint64][]*Turn{}, map[int]int{}
	}
	k.byHash[t.hash] = append(k.byHash[t.hash], t)
	k.lengths[len(t.IDs)]++
	k.order = append(k.order, t)
	k.bytes += t.bytes()
}

// Take returns the longest turn of a scope that useful accepts and with whose tokens the prompt begins; nil: there is none. It also forgets
// this turn, because the engine frees the KV once it was fetched.
func (k *Turns) Take(scope string, prompt []int32, now time.Time, useful func(*Turn) bool) *Turn {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.drop(func(old *Turn) bool { return !now.Before(old.Until) })
	if len(k.lengths) == 0 {
		return nil
	}
	var best *Turn
	hash := hashScope(scope)
	for i, id := range prompt[:max(0, len(prompt)-1)] { // the engine has to compute at least one token
		if hash = hashToken(hash, id); k.lengths[i+1] == 0 {
			continue
		}
		for _, t := range k.byHash[hash] {
			if t.Scope == scope && slices.Equal(t.IDs, prompt[:i+1]) && now.Before(t.Until) && useful(t) {
				best = t
			}
		}
	}
	if best != nil {
		k.forget(best)
		k.order = slices.DeleteFunc(k.order, func(t *Turn) bool { return t == best })
	}
	return best
}

// Len is how many turns are remembered.
func (k *Turns) Len() (n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, ofLength := range k.lengths {
		n += ofLength
	}
	return n
}

// drop forgets the oldest turns, up to the first one for which mayGo is false.
func (k *Turns) drop(mayGo func(*Turn) bool) {
	n := 0
	for ; n < len(k.order) && mayGo(k.order[n]); n++ {
		k.forget(k.order[n])
	}
	k.order = slices.Delete(k.order, 0, n)
}

// forget removes a turn from all fields but order, which the caller must correct.
func (k *Turns) forget(turn *Turn) {
	k.bytes -= turn.bytes()
	if k.lengths[len(turn.IDs)]--; k.lengths[len(turn.IDs)] == 0 {
		delete(k.lengths, len(turn.IDs))
	}
	left := slices.DeleteFunc(k.byHash[turn.hash], func(other *Turn) bool { return other == turn })
	if k.byHash[turn.hash] = left; len(left) == 0 {
		delete(k.byHash, turn.hash)
	}
}

// hashScope begins the hash of a turn with its scope, and hashToken adds a token to the hash. The hash only has to tell most turns apart,
// because Take also compares the tokens.
func hashScope(scope string) uint64 {
	h := uint64(0xcbf29ce484222325)
	for i := range len(scope) {
		h = (h ^ uint64(scope[i])) * 0x100000001b3
	}
	return h
}

func hashToken(h uint64, id int32) uint64 {
	h = (h ^ uint64(uint32(id))) * 0x9e3779b97f4a7c15
	return h ^ h>>29
}
