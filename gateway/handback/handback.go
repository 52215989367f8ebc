// Package handback remembers which decode engines keep the KV of their answers, so that the prefill engine of the conversation's next turn
// can fetch this KV instead of computing it again. An engine fetches KV without comparing tokens, so this package compares them: KV is
// offered only for a prompt that begins with exactly the tokens from which the KV was computed.
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
	Scope      string           // a turn is offered only to requests of the same scope
	IDs        []int32          // the tokens from which the KV was computed
	Params     json.RawMessage  // the kv_transfer_params with which a prefill request fetches the KV
	Process    roster.ProcessID // the engine process that has the KV
	KeptSince  time.Time        // when the answer ended
	OfferUntil time.Time        // the turn is not offered after this time

	hash uint64
}

// bytes returns how many bytes of memory a turn takes: 4 for each token, Params, Scope, and 256 for the struct and its map entries.
func (t *Turn) bytes() int { return 4*len(t.IDs) + len(t.Params) + len(t.Scope) + 256 }

// Turns is a set of turns, whose memory is bounded by Keep. The zero value is empty.
type Turns struct {
	mu      sync.Mutex
	byHash  map[uint64][]*Turn
	lengths map[int]int // how many turns have a given number of tokens
	order   []*Turn     // all turns, the oldest first
	bytes   int         // memory that all turns take, in bytes
}

// Keep remembers a turn. It forgets the oldest turns until all turns together take at most maxBytes of memory. It does not remember a turn
// that alone takes more, has no tokens, or is too old.
func (k *Turns) Keep(t *Turn, now time.Time, maxBytes int) {
	if t.bytes() > maxBytes || len(t.IDs) == 0 || !now.Before(t.OfferUntil) {
		return
	}
	t.hash = hashScope(t.Scope)
	for _, id := range t.IDs {
		t.hash = hashToken(t.hash, id)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.forgetOldest(func(old *Turn) bool {
		isTooOld := !now.Before(old.OfferUntil)
		return isTooOld || k.bytes+t.bytes() > maxBytes
	})
	if k.byHash == nil { // the first turn of the zero value
		k.byHash, k.lengths = map[uint64][]*Turn{}, map[int]int{}
	}
	k.byHash[t.hash] = append(k.byHash[t.hash], t)
	k.lengths[len(t.IDs)]++
	k.order = append(k.order, t)
	k.bytes += t.bytes()
}

// Take returns and forgets the longest turn of a scope that useful accepts and with whose tokens the prompt begins. It returns nil if there
// is none. A turn is returned only once, because an engine drops the KV after it was fetched.
func (k *Turns) Take(scope string, prompt []int32, now time.Time, useful func(*Turn) bool) *Turn {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.forgetOldest(func(old *Turn) bool { return !now.Before(old.OfferUntil) })
	if len(k.lengths) == 0 { // no turn is left, so the prompt need not be hashed
		return nil
	}
	var best *Turn
	hash := hashScope(scope)
	for i, id := range prompt[:max(0, len(prompt)-1)] { // the engine has to compute at least one token
		hash = hashToken(hash, id) // of the scope and the first i+1 tokens
		if k.lengths[i+1] == 0 {   // no turn has as many tokens
			continue
		}
		for _, t := range k.byHash[hash] {
			if t.Scope == scope && slices.Equal(t.IDs, prompt[:i+1]) && now.Before(t.OfferUntil) && useful(t) {
				best = t // t is as long as every turn that was found before, or longer
			}
		}
	}
	if best != nil {
		k.unindex(best)
		k.order = slices.DeleteFunc(k.order, func(t *Turn) bool { return t == best })
	}
	return best
}

// Len returns how many turns are remembered.
func (k *Turns) Len() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.order)
}

// forgetOldest forgets the oldest turns, up to the first one for which mayForget is false. The caller holds k.mu.
func (k *Turns) forgetOldest(mayForget func(*Turn) bool) {
	forgotten := 0
	for ; forgotten < len(k.order) && mayForget(k.order[forgotten]); forgotten++ {
		k.unindex(k.order[forgotten])
	}
	k.order = slices.Delete(k.order, 0, forgotten)
}

// unindex removes a turn from all fields of k except order. The caller holds k.mu.
func (k *Turns) unindex(turn *Turn) {
	k.bytes -= turn.bytes()
	if k.lengths[len(turn.IDs)]--; k.lengths[len(turn.IDs)] == 0 {
		delete(k.lengths, len(turn.IDs))
	}
	sameHash := slices.DeleteFunc(k.byHash[turn.hash], func(other *Turn) bool { return other == turn })
	k.byHash[turn.hash] = sameHash
	if len(sameHash) == 0 {
		delete(k.byHash, turn.hash)
	}
}

// hashScope begins the hash of a turn with its scope, by the hash function FNV-1a with its two constants.
func hashScope(scope string) uint64 {
	h := uint64(0xcbf29ce484222325)
	for i := range len(scope) {
		h = (h ^ uint64(scope[i])) * 0x100000001b3
	}
	return h
}

// hashToken adds a token to the hash of a turn: the multiplication by a large odd number spreads the token's bits to the upper half, and
// the shift brings them back to the lower one. Two turns may have the same hash, because Take also compares the tokens.
func hashToken(h uint64, id int32) uint64 {
	h = (h ^ uint64(uint32(id))) * 0x9e3779b97f4a7c15
	return h ^ h>>29
}
