package kvevents

import (
	"strings"
	"sync"

	"evenkeel/prefill/index"
)

// Sink receives what a candidate's engine holds, in the order of its events. The stream's goroutine takes the
// sink's lock before each call. The slices are reused afterwards.
type Sink interface {
	sync.Locker
	Stored(s index.Slot, keys []index.Key)
	Removed(s index.Slot, keys []index.Key)
	Cleared(s index.Slot, why index.Reason) // index.Removed: the engine said so; index.Cold: its events have a gap
}

// mirror maps an engine's hashes of the blocks that it holds to their keys in the index. Keys are made of tokens and
// parent, whatever the engine's hashes are made of, so several hashes may have one key. With EAGLE and no connector,
// vLLM from 0.33 on hashes a block together with the tokens that follow it, and holds one prefix as often as prompts
// go on from it in different ways. The index holds a key until the engine has removed the last of its hashes.
type mirror struct {
	slot       index.Slot
	scope      index.Scope
	sink       Sink
	mostHashes int // hashes that may be known
	counters   *counters

	known   map[engineHash]block
	holders map[index.Key]int32 // hashes in known that have this key
	hasher  index.Hasher
	keys    []index.Key
	gone    []index.Key // keys whose last hash an event removes
}

type block struct {
	key   index.Key
	group int64
}

// mostKnown bounds how many blocks are remembered of a publisher that never removes one: about 150 MiB.
const mostKnown = 1 << 20

// apply passes one event on to the sink.
func (m *mirror) apply(e *event) {
	switch e.kind {
	case blockStored:
		m.stored(e)
	case blockRemoved:
		m.removed(e)
	case allCleared:
		m.forget(index.Removed)
	default:
		m.counters.unknownTypes.Add(1)
	}
}

// forget drops all that is known of the candidate.
func (m *mirror) forget(why index.Reason) {
	clear(m.known)
	clear(m.holders)
	m.sink.Lock()
	defer m.sink.Unlock()
	m.sink.Cleared(m.slot, why)
}

func onGPU(medium string) bool { return medium == "" || strings.EqualFold(medium, "gpu") }

// fullAttention reports whether a block of a group with this spec is needed for a hit, and is enough. The groups of
// other layers keep only the blocks that their window needs.
func fullAttention(spec string) bool {
	return spec == "" || spec == "full_attention" || strings.HasPrefix(spec, "mla")
}

// stored passes on the blocks that an engine has stored in GPU memory, as far as their keys can be made: up to the first
// block that depends on more than tokens.
func (m *mirror) stored(e *event) {
	if !onGPU(e.medium) || !fullAttention(e.spec) {
		return
	}
	if e.block == 0 || len(e.tokens) != e.block*len(e.hashes) {
		m.counters.decodeErrors.Add(1)
		return
	}
	m.counters.block.Store(int64(e.block))
	plain := m.plain(e)
	if plain == 0 {
		m.counters.skipped.Add(int64(len(e.hashes)))
		return
	}
	var parent index.Key
	if e.isRoot {
		scope := m.scope
		scope.LoRA = e.lora
		parent = scope.Root(index.Tokens, e.block)
	} else {
		parentBlock, ok := m.known[e.parent]
		if !ok {
			m.counters.unknownParents.Add(1)
			return
		}
		parent = parentBlock.key
	}
	m.keys = m.hasher.Tokens(m.keys[:0], parent, e.tokens[:plain*e.block], e.block)
	m.gone = m.gone[:0]
	for i, k := range m.keys {
		m.hold(e.hashes[i], block{k, e.group})
	}
	m.counters.skipped.Add(int64(len(e.hashes) - plain))
	m.sink.Lock()
	defer m.sink.Unlock()
	if len(m.gone) > 0 {
		m.sink.Removed(m.slot, m.gone)
	}
	m.sink.Stored(m.slot, m.keys)
}

// hold records that the engine holds a block under a hash. The hash may be known already: vLLM stores it again for
// each request that finds it in the cache.
func (m *mirror) hold(h engineHash, b block) {
	old, wasHeld := m.known[h]
	m.known[h] = b
	if wasHeld && old.key == b.key {
		return
	}
	if wasHeld { // only an engine whose hashes are not made of tokens and parent does this
		m.release(old.key)
	}
	m.holders[b.key]++
}

// release notes that a hash of a key is no longer held, and appends the key to gone if that was the last one.
func (m *mirror) release(k index.Key) {
	if m.holders[k]--; m.holders[k] > 0 {
		return
	}
	delete(m.holders, k)
	m.gone = append(m.gone, k)
}

// plain is how many of the stored blocks, from the first, depend on nothing but tokens and a LoRA whose name is
// known. The blocks behind these have no known parent.
func (m *mirror) plain(e *event) int {
	if e.loraID != "" && e.lora == "" {
		return 0
	}
	for i, word := range e.extra {
		if word != "" && word != e.lora {
			return min(i, len(e.hashes))
		}
	}
	return len(e.hashes)
}

// removed passes on the keys of which an engine has removed the last hash from GPU memory.
func (m *mirror) removed(e *event) {
	if !onGPU(e.medium) {
		return
	}
	m.gone = m.gone[:0]
	for _, h := range e.hashes {
		b, ok := m.known[h]
		if ok && (!e.hasGroup || e.group == b.group) {
			delete(m.known, h)
			m.release(b.key)
		}
	}
	if len(m.gone) > 0 {
		m.sink.Lock()
		defer m.sink.Unlock()
		m.sink.Removed(m.slot, m.gone)
	}
}

func (m *mirror) full() bool { return len(m.known) > m.mostHashes }
