package kvevents

import (
	"strings"
	"sync"

	"evenkeel/prefill/index"
)

// Sink receives the changes of a candidate's prefix cache, in the order of the engine's events. The stream's goroutine
// takes the sink's lock before each call. A sink must not keep the slices, which are reused.
type Sink interface {
	sync.Locker
	Stored(s index.Slot, keys []index.Key)
	Removed(s index.Slot, keys []index.Key)
	Cleared(s index.Slot, why index.Reason) // why: index.Removed if the engine reported it, index.Cold if events are missing
}

// mirror maps the engine's hash of each block that the engine holds to the block's key in the index. A key depends only on the
// block's tokens and its parent. An engine's hash may depend on more, so that several hashes may have the same key. For example,
// with EAGLE and no connector, vLLM from 0.33 on also hashes the tokens that follow a block. The index holds a key until the
// engine has removed the last of its hashes.
type mirror struct {
	slot      index.Slot
	scope     index.Scope
	sink      Sink
	maxHashes int // most hashes that known may hold before the stream drops all blocks
	counters  *counters

	known       map[engineHash]block
	hashesOf    map[index.Key]int32 // number of hashes in known that have this key
	hasher      index.Hasher
	keys        []index.Key
	removedKeys []index.Key // keys whose last hash the present event removes
}

type block struct {
	key   index.Key
	group int64 // number of the group of KV cache layers that stored the block
}

// maxKnownHashes bounds the hashes that a stream remembers, to about 150 MiB: some publishers never report a removal.
const maxKnownHashes = 1 << 20

// apply passes one event on to the sink. An event of an unknown type is only counted.
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

// dropAll drops all blocks of the candidate, here and in the sink. why is the reason for metrics.
func (m *mirror) dropAll(why index.Reason) {
	clear(m.known)
	clear(m.hashesOf)
	m.sink.Lock()
	defer m.sink.Unlock()
	m.sink.Cleared(m.slot, why)
}

// onGPU reports whether an event is about GPU memory. An event that names no memory counts as one.
func onGPU(medium string) bool { return medium == "" || strings.EqualFold(medium, "gpu") }

// fullAttention reports whether the blocks of a group of layers with this spec show which prefixes are cached. Groups with
// another kind of attention, such as a sliding window, keep only some blocks of a prefix.
func fullAttention(spec string) bool {
	return spec == "" || spec == "full_attention" || strings.HasPrefix(spec, "mla")
}

// applyStored passes on the blocks that an engine has stored in GPU memory, up to the first block whose hash depends on more
// than tokens: its key is not known.
func (m *mirror) applyStored(e *event) {
	if !onGPU(e.medium) || !fullAttention(e.attentionKind) { // the event says nothing about cached prefixes in GPU memory
		return
	}
	if e.blockTokens == 0 || len(e.tokens) != e.blockTokens*len(e.hashes) { // the event contradicts itself
		m.counters.decodeErrors.Add(1)
		return
	}
	// vLLM also names the beginning of a block, as a shorter one (0.33, v1/core/block_pool.py). After a restart, nothing is known.
	if len(m.known) == 0 || int64(e.blockTokens) > m.counters.blockTokens.Load() {
		m.counters.blockTokens.Store(int64(e.blockTokens))
	}
	hashable := m.hashableBlocks(e)
	if hashable == 0 { // no block of the event has a known key
		m.counters.skipped.Add(int64(len(e.hashes)))
		return
	}
	parent, known := m.parentKey(e)
	if !known { // a key depends on the block before, so that these blocks have no known key either
		m.counters.unknownParents.Add(1)
		return
	}
	m.keys = m.hasher.Tokens(m.keys[:0], parent, e.tokens[:hashable*e.blockTokens], e.blockTokens)
	m.removedKeys = m.removedKeys[:0]
	for i, k := range m.keys {
		m.recordHash(e.hashes[i], block{k, e.group}) // adds to removedKeys if the hash was the last one of another key before
	}
	m.counters.skipped.Add(int64(len(e.hashes) - hashable))
	m.sink.Lock()
	defer m.sink.Unlock()
	if len(m.removedKeys) > 0 {
		m.sink.Removed(m.slot, m.removedKeys)
	}
	m.sink.Stored(m.slot, m.keys)
}

// parentKey is the key before the first stored block of an event. known is false if the parent block is not known.
func (m *mirror) parentKey(e *event) (key index.Key, known bool) {
	if e.isRoot { // the event's first block starts a prompt
		scope := m.scope
		scope.LoRA = e.lora
		return scope.Root(index.Tokens, e.blockTokens), true
	}
	parent, known := m.known[e.parent]
	return parent.key, known
}

// recordHash records that the engine holds a block under a hash. The hash may be known already, because vLLM reports a block
// again for each request that finds it in the cache. If the hash had another key, and this key has no other hash, the key is added to
// removedKeys.
func (m *mirror) recordHash(h engineHash, b block) {
	old, wasKnown := m.known[h]
	m.known[h] = b
	if wasKnown && old.key == b.key { // a repeated report: the hash is counted already
		return
	}
	if wasKnown { // the engine used this hash before for other tokens or another parent
		m.releaseHash(old.key) // may add the key to removedKeys
	}
	m.hashesOf[b.key]++
}

// releaseHash notes that the engine no longer holds one hash of a key. If this was the key's last hash, the key is added to
// removedKeys, which the caller must pass to the sink.
func (m *mirror) releaseHash(k index.Key) {
	if m.hashesOf[k]--; m.hashesOf[k] > 0 {
		return
	}
	delete(m.hashesOf, k)
	m.removedKeys = append(m.removedKeys, k)
}

// hashableBlocks is how many of an event's first blocks depend only on tokens and on a LoRA whose name is known. The blocks after
// these have no known parent.
func (m *mirror) hashableBlocks(e *event) int {
	if e.loraID != "" && e.lora == "" { // the LoRA's name is not known, only its number
		return 0
	}
	for i, keys := range e.extraKeys {
		if keys != "" && keys != e.lora { // the hash depends on more than the tokens and the LoRA
			return min(i, len(e.hashes))
		}
	}
	return len(e.hashes)
}

// applyRemoved passes on the keys whose last hash the engine has removed from GPU memory. An event that names a group of layers
// removes only blocks that were stored in this group.
func (m *mirror) applyRemoved(e *event) {
	if !onGPU(e.medium) { // the blocks stay in GPU memory
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

// overfull reports whether more hashes are known than the stream may remember.
func (m *mirror) overfull() bool { return len(m.known) > m.maxHashes }
