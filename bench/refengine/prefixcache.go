package refengine

import (
	"container/list"
	"sync"
)

// prefixCache knows whole blocks by the hash of everything up to their end.
// When it is full the least recent one goes, of one prompt the last first, as
// engines do. A nil cache is always empty.
type prefixCache struct {
	size   int       // blocks
	events *kvEvents // nil: nobody is told

	mu     sync.Mutex
	known  map[uint64]*list.Element
	recent list.List // of hashes, the newest first
}

func newPrefixCache(size int, events *kvEvents) *prefixCache {
	if size <= 0 {
		return nil
	}
	return &prefixCache{size: size, events: events, known: map[uint64]*list.Element{}}
}

const chainStart = 1

func chain(h uint64, ids []int32) uint64 {
	for _, id := range ids {
		h = (h ^ uint64(id)) * 0x9e3779b97f4a7c15
		h ^= h >> 29
	}
	return h
}

// match counts the tokens of the blocks that are known from the start. The
// last token is always computed, as engines do.
func (c *prefixCache) match(ids []int32) (tokens int) {
	if c == nil {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	h := uint64(chainStart)
	for tokens+blockSize < len(ids) {
		h = chain(h, ids[tokens:tokens+blockSize])
		if c.known[h] == nil {
			break
		}
		tokens += blockSize
	}
	return tokens
}

// add takes in a prompt that was computed: its first blocks if all are too many.
func (c *prefixCache) add(ids []int32) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var hashes []uint64
	h := uint64(chainStart)
	for at := 0; at+blockSize <= len(ids) && len(hashes) < c.size; at += blockSize {
		h = chain(h, ids[at:at+blockSize])
		hashes = append(hashes, h)
	}
	stored := c.missing(hashes, ids)
	for i := len(hashes) - 1; i >= 0; i-- { // the deepest is the least recent
		if e := c.known[hashes[i]]; e != nil {
			c.recent.MoveToFront(e)
			continue
		}
		c.known[hashes[i]] = c.recent.PushFront(hashes[i])
	}
	var removed []uint64
	for c.recent.Len() > c.size {
		h := c.recent.Remove(c.recent.Back()).(uint64)
		delete(c.known, h)
		removed = append(removed, h)
	}
	c.events.changed(removed, stored, false)
}

// missing are the blocks that are not known yet, in rows.
func (c *prefixCache) missing(hashes []uint64, ids []int32) (runs []kvRun) {
	parent := uint64(chainStart)
	for i, h := range hashes {
		if c.known[h] == nil {
			if len(runs) == 0 || i > 0 && c.known[hashes[i-1]] != nil {
				runs = append(runs, kvRun{parent: parent})
			}
			run := &runs[len(runs)-1]
			run.hashes = append(run.hashes, h)
			run.ids = append(run.ids, ids[i*blockSize:(i+1)*blockSize]...)
		}
		parent = h
	}
	return runs
}

func (c *prefixCache) reset() {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.known)
	c.recent.Init()
	c.events.changed(nil, nil, true)
}
