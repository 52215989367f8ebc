package kvevents

import (
	"strings"
	"sync"

	"evenkeel/prefill/index"
)

// Sink receives the changes of a candidate's prefix cache, in the order of the engine's events. The
// stream's goroutine takes the sink's lock before each call. A sink must not keep the slices, which
// are reused.
type Sink interface {
	sync.Locker
	Stored(s index.Slot, keys []index.Key)
	Removed(s index.Slot, keys []index.Key)
	Cleared(s index.Slot, why index.Reason) // index.Removed if the engine reported it, index.Cold if events are missing
}

// mirror maps the engine's hash of each block that the engine holds to the block's key. A key
// depends only on the block's tokens and its parent. An engine's hash may depend on more, so that
// several hashes may have the same key: with EAGLE and no connector, vLLM from 0.33 on also hashes
// the tokens that follow a block. The index holds a key until the engine has removed the last of
// its hashes.
type mirror struct {
	slot      index.Slot
	scope     index.Scope
	sink      Sink
	maxHashes int // most hashes in known before the stream drops all blocks
	counters  *counters

	known       map[engineHash]block
	hashesOf    map[index.Key]int32 // hashes in known that have this key
	hasher      index.Hasher
	keys        []index.Key
	removedKeys []index.Key // the present event removes their last hash
}

type block struct {
	key   index.Key
	group int64 // number of the group of KV cache layers
}

// maxKnownHashes is about 150 MiB: some publishers never report a removal.
const maxKnownHashes = 1 << 20

func (m *mirror) apply(e *event) {
	switch e.kind {
	case blockStored:
		m.applyStored(e)
	case blockRemoved:
		m.applyRemoved(e)
	case allCleared:
		m.dropAll(index.Removed)
	default:
		m.counters.unknownTypes.Add(1)
	}
}

func (m *mirror) dropAll(why index.Reason) {
	clear(m.known)
	clear(m.hashesOf)
	m.sink.Lock()
	defer m.sink.Unlock()
	m.sink.Cleared(m.slot, why)
}

// onGPU is true for an event that names no memory.
func onGPU(medium string) bool { return medium == "" || strings.EqualFold(medium, "gpu") }

// fullAttention is false for groups of layers with another kind of attention, such as a sliding
// window: they keep only some blocks of a prefix, and do not show which prefixes are cached.
func fullAttention(spec string) bool {
	return spec == "" || spec == "full_attention" || strings.HasPrefix(spec, "mla")
}

// applyStored passes on the blocks stored in GPU memory, up to the first whose hash depends on more
// than tokens: its key is not known.
func (m *mirror) applyStored(e *event) {
	if !onGPU(e.medium) || !fullAttention(e.attentionKind) {
		return
	}
	if e.blockTokens == 0 || len(e.tokens) != e.blockTokens*len(e.hashes) { // the event contradicts itself
		m.counters.decodeErrors.Add(1)
		return
	}
	// vLLM also names the beginning of a block, as a shorter one (0.33, v1/core/block_pool.py). After
	// a restart, nothing is known.
	if len(m.known) == 0 || int64(e.blockTokens) > m.counters.blockTokens.Load() {
		m.counters.blockTokens.Store(int64(e.blockTokens))
	}
	hashable := m.hashableBlocks(e)
	if hashable == 0 {
		m.counters.skipped.Add(int64(len(e.hashes)))
		return
	}
	parent, known := m.parentKey(e)
	if !known { // a key depends on the block before
		m.counters.unknownParents.Add(1)
		return
	}
	m.keys = m.hasher.Tokens(m.keys[:0], parent, e.tokens[:hashable*e.blockTokens], e.blockTokens)
	m.removedKeys = m.removedKeys[:0]
	for i, k := range m.keys {
		m.recordHash(e.hashes[i], block{k, e.group}) // may add to removedKeys
	}
	m.counters.skipped.Add(int64(len(e.hashes) - hashable))
	m.sink.Lock()
	defer m.sink.Unlock()
	if len(m.removedKeys) > 0 {
		m.sink.Removed(m.slot, m.removedKeys)
	}
	m.sink.Stored(m.slot, m.keys)
}

func (m *mirror) parentKey(e *event) (key index.Key, known bool) {
	if e.isRoot {
		scope := m.scope
		scope.LoRA = e.lora
		return scope.Root(index.Tokens, e.blockTokens), true
	}
	parent, known := m.known[e.parent]
	return parent.key, known
}

// recordHash records that the engine holds a block under a hash, which may be known already,
// because vLLM reports a block again for each request that finds it in the cache.
func (m *mirror) recordHash(h engineHash, b block) {
	old, wasKnown := m.known[h]
	m.known[h] = b
	if wasKnown && old.key == b.key { // a repeated report
		return
	}
	if wasKnown { // the engine used this hash before for other tokens or another parent
		m.releaseHash(old.key)
	}
	m.hashesOf[b.key]++
}

// releaseHash adds a key without further hashes to removedKeys, which the caller must pass to the
// sink.
func (m *mirror) releaseHash(k index.Key) {
	if m.hashesOf[k]--; m.hashesOf[k] > 0 {
		return
	}
	delete(m.hashesOf, k)
	m.removedKeys = append(m.removedKeys, k)
}

// hashableBlocks is how many of an event's first blocks depend only on tokens and on a LoRA whose
// name is known.
func (m *mirror) hashableBlocks(e *event) int {
	if e.loraID != "" && e.lora == "" {
		return 0
	}
	for i, keys := range e.extraKeys {
		if keys != "" && keys != e.lora { // the hash depends on more than the tokens and the LoRA
			return min(i, len(e.hashes))
		}
	}
	return len(e.hashes)
}

// applyRemoved passes on what the engine has removed. An event that names a group of layers removes
// only blocks that were stored in this group.
func (m *mirror) applyRemoved(e *event) {
	if !onGPU(e.medium) {
		return
	}
	m.removedKeys = m.removedKeys[:0]
	for _, h := range e.hashes {
		b, known := m.known[h]
		ofGroup := !e.hasGroup || e.group == b.group
		if known && ofGroup {
			delete(m.known, h)
			m.releaseHash(b.key) // may add to removedKeys
		}
	}
	if len(m.removedKeys) > 0 {
		m.sink.Lock()
		defer m.sink.Unlock()
		m.sink.Removed(m.slot, m.removedKeys)
	}
}

func (m *mirror) overfull() bool { return len(m.known) > m.maxHashes }
