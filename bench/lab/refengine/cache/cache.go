// Package cache is the prefix cache of a reference engine's rank, and the KV events
// that tell what it stores and drops.
package cache

import (
	"container/list"
	"sync"
)

// BlockSize is how many tokens of KV a block holds.
const BlockSize = 128

// Blocks is how many blocks so many tokens fill.
func Blocks(tokens int) int { return (tokens + BlockSize - 1) / BlockSize }

// Cache knows whole blocks by the hash of everything up to their end, and of the cache_salt before
// it. When it is full the least recent one goes, of one prompt the last first, as engines do. A nil
// cache is always empty.
type Cache struct {
	size   int     // blocks
	events *Events // nil: nobody is told

	mu     sync.Mutex
	known  map[uint64]*list.Element
	recent list.List           // of hashes, the newest first
	bad    map[uint64]struct{} // of known: the KV in them is another prompt's
}

// New is a cache of so many blocks; without any it is nil.
func New(size int, events *Events) *Cache {
	if size <= 0 {
		return nil
	}
	return &Cache{size: size, events: events, known: map[uint64]*list.Element{}, bad: map[uint64]struct{}{}}
}

const chainStart = 1

// saltOf is where the chain of a prompt with a cache_salt starts.
func saltOf(salt string) uint64 {
	h := uint64(chainStart)
	for _, c := range []byte(salt) {
		h = (h ^ uint64(c)) * 0x100000001b3
	}
	return h
}

func chain(h uint64, ids []int32) uint64 {
	for _, id := range ids {
		h = (h ^ uint64(id)) * 0x9e3779b97f4a7c15
		h ^= h >> 29
	}
	return h
}

// Match counts the tokens of the blocks that are known from the start. The
// last token is always computed, as engines do. bad: what was found there is not
// this prompt's KV, and no engine would notice.
func (c *Cache) Match(salt string, ids []int32) (tokens int, bad bool) {
	if c == nil {
		return 0, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	h := saltOf(salt)
	for tokens+BlockSize < len(ids) {
		h = chain(h, ids[tokens:tokens+BlockSize])
		if c.known[h] == nil {
			break
		}
		_, wrong := c.bad[h]
		bad = bad || wrong
		tokens += BlockSize
	}
	return tokens, bad
}

// Add stores a prompt that was computed or pulled: its first blocks if all are
// too many. bad: the KV that was pulled is another prompt's.
func (c *Cache) Add(salt string, ids []int32, bad bool) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var hashes []uint64
	h := saltOf(salt)
	for at := 0; at+BlockSize <= len(ids) && len(hashes) < c.size; at += BlockSize {
		h = chain(h, ids[at:at+BlockSize])
		hashes = append(hashes, h)
	}
	var stored []run
	if salt == "" { // those who read the events can do nothing with blocks that are not made of tokens alone
		stored = c.missing(hashes, ids)
	}
	for i := len(hashes) - 1; i >= 0; i-- { // the deepest is the least recent
		if e := c.known[hashes[i]]; e != nil {
			c.recent.MoveToFront(e)
			continue
		}
		c.known[hashes[i]] = c.recent.PushFront(hashes[i])
		if bad {
			c.bad[hashes[i]] = struct{}{}
		}
	}
	var removed []uint64
	for c.recent.Len() > c.size {
		h := c.recent.Remove(c.recent.Back()).(uint64)
		delete(c.known, h)
		delete(c.bad, h)
		removed = append(removed, h)
	}
	c.events.changed(removed, stored, false)
}

// missing are the blocks that are not known yet, in rows.
func (c *Cache) missing(hashes []uint64, ids []int32) (runs []run) {
	parent := uint64(chainStart)
	for i, h := range hashes {
		if c.known[h] == nil {
			if len(runs) == 0 || i > 0 && c.known[hashes[i-1]] != nil {
				runs = append(runs, run{parent: parent})
			}
			last := &runs[len(runs)-1]
			last.hashes = append(last.hashes, h)
			last.ids = append(last.ids, ids[i*BlockSize:(i+1)*BlockSize]...)
		}
		parent = h
	}
	return runs
}

// Reset forgets all blocks.
func (c *Cache) Reset() {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.known)
	clear(c.bad)
	c.recent.Init()
	c.events.changed(nil, nil, true)
}
