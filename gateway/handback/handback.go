// Package handback remembers the KV that decode engines keep of their answers, so that the prefill engine of the next turn can fetch it
// instead of computing it. An engine fetches what it is told to and compares no token, so that the comparison is made here: KV is
// offered only for a prompt that begins with exactly the tokens that it was computed from.
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
	Scope  string          // who may go on from it: turns of another scope are never offered
	IDs    []int32         // the tokens whose KV it is
	Params json.RawMessage // the kv_transfer_params of a prefill request that fetches it
	Made   roster.Birth    // the process that has it
	Came   time.Time
	Until  time.Time // it is offered until then

	hash uint64
}

// bytes is what a turn takes of memory.
func (t *Turn) bytes() int { return 4*len(t.IDs) + len(t.Params) + len(t.Scope) + 256 }

// Turns are the turns that are remembered. The zero value has none.
type Turns struct {
	mu      sync.Mutex
	byHash  map[uint64][]*Turn
	lengths map[int]int // by number of tokens, how many turns have that many
	order   []*Turn     // as they came, the oldest first
	bytes   int         // of memory that all turns take
}

// Keep remembers a turn. All turns together take at most `most` bytes of memory: to make room, the oldest are given up. A turn that takes
// more than that alone, has no tokens or is too old is not remembered.
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

// Take returns the longest turn of a scope whose tokens a prompt begins with and that useful accepts; nil: there is none. A turn is taken
// once, because the engine gives its KV up when it was fetched.
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

// drop forgets the oldest turns, up to the first one that mayGo does not give up.
func (k *Turns) drop(mayGo func(*Turn) bool) {
	n := 0
	for ; n < len(k.order) && mayGo(k.order[n]); n++ {
		k.forget(k.order[n])
	}
	k.order = slices.Delete(k.order, 0, n)
}

// forget takes a turn out of everything but the order.
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
