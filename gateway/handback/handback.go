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
	gone bool // it was taken
}

// bytes is what a turn takes of memory.
func (t *Turn) bytes() int { return 4*len(t.IDs) + len(t.Params) + len(t.Scope) + 256 }

// Turns are those that are remembered. The zero value has none.
type Turns struct {
	mu      sync.Mutex
	byHash  map[uint64][]*Turn
	lengths map[int]int // how many turns have so many tokens
	order   []*Turn     // as they came
	bytes   int
}

// Keep remembers a turn. All turns together take at most so many bytes: the oldest, which are given up first, go for it.
func (k *Turns) Keep(t *Turn, now time.Time, most int) {
	if t.bytes() > most || len(t.IDs) == 0 || !now.Before(t.Until) {
		return
	}
	t.hash = begin(t.Scope)
	for _, id := range t.IDs {
		t.hash = next(t.hash, id)
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

// Take returns the longest turn that a prompt goes on from and that is of use; nil: there is none. A turn is taken once, because the
// engine gives its KV up when it was fetched.
func (k *Turns) Take(scope string, prompt []int32, now time.Time, useful func(*Turn) bool) *Turn {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.drop(func(old *Turn) bool { return !now.Before(old.Until) })
	if len(k.lengths) == 0 {
		return nil
	}
	var best *Turn
	hash := begin(scope)
	for i, id := range prompt[:max(0, len(prompt)-1)] { // the engine has to compute something
		if hash = next(hash, id); k.lengths[i+1] == 0 {
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
	}
	return best
}

// Len is how many turns are remembered.
func (k *Turns) Len() (n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, n1 := range k.lengths {
		n += n1
	}
	return n
}

// drop forgets the oldest turns as long as they are to go.
func (k *Turns) drop(goes func(*Turn) bool) {
	n := 0
	for ; n < len(k.order) && (k.order[n].gone || goes(k.order[n])); n++ {
		if !k.order[n].gone {
			k.forget(k.order[n])
		}
	}
	k.order = slices.Delete(k.order, 0, n)
}

func (k *Turns) forget(t *Turn) {
	t.gone = true
	k.bytes -= t.bytes()
	if k.lengths[len(t.IDs)]--; k.lengths[len(t.IDs)] == 0 {
		delete(k.lengths, len(t.IDs))
	}
	left := slices.DeleteFunc(k.byHash[t.hash], func(other *Turn) bool { return other == t })
	if k.byHash[t.hash] = left; len(left) == 0 {
		delete(k.byHash, t.hash)
	}
}

// begin and next make a hash of a scope and of tokens. It only has to tell most of them apart, as the tokens are compared.
func begin(scope string) uint64 {
	h := uint64(0xcbf29ce484222325)
	for i := range len(scope) {
		h = (h ^ uint64(scope[i])) * 0x100000001b3
	}
	return h
}

func next(h uint64, id int32) uint64 {
	h = (h ^ uint64(uint32(id))) * 0x9e3779b97f4a7c15
	return h ^ h>>29
}
