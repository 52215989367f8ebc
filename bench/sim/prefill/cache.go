package prefill

import "evenkeel/bench/lab/trace"

// blockTokens is the KV block of the simulated engines: that of the traces.
const blockTokens = trace.BlockTokens

// cache is an engine's KV cache in blocks. A block that a request uses is
// pinned; one that none uses stays until its place is needed, the least recent
// first. Blocks without a name are never found again and free at once.
type cache struct {
	capacity int
	used     int // by blocks that are here, pinned or not, and by the nameless
	nameless int
	idle     int // here, but used by nobody

	here       []bool  // by block
	pins       []int32 // requests that use it
	next, prev []int32 // of those that are here and not pinned; the last one is the list's head
}

func newCache(capacity, names int) *cache {
	c := &cache{capacity: capacity, here: make([]bool, names), pins: make([]int32, names), next: make([]int32, names+1),
		prev: make([]int32, names+1)}
	c.next[names], c.prev[names] = int32(names), int32(names)
	return c
}

// match is how many of the blocks are here, from the first one on.
func (c *cache) match(blocks []int32) int {
	for i, b := range blocks {
		if !c.here[b] {
			return i
		}
	}
	return len(blocks)
}

// pin takes the blocks and some nameless ones for a request, or says that there
// is no room and takes nothing.
func (c *cache) pin(blocks []int32, nameless int) bool {
	need, spare := nameless, c.capacity-c.pinned()
	for _, b := range blocks {
		if c.pins[b] == 0 {
			need++
		}
	}
	if need > spare {
		return false
	}
	for _, b := range blocks { // first what is here, or it may be what goes
		if c.here[b] && c.pins[b] == 0 {
			c.unlink(b)
		}
		c.pins[b]++
	}
	for _, b := range blocks {
		if !c.here[b] {
			c.here[b] = true
			c.used++
		}
	}
	c.nameless += nameless
	c.used += nameless
	for c.used > c.capacity {
		oldest := c.next[len(c.here)]
		c.unlink(oldest)
		c.here[oldest] = false
		c.used--
	}
	return true
}

// unpin gives a request's blocks back. The deepest become the least recent, so
// that they go before what they hang on.
func (c *cache) unpin(blocks []int32, nameless int) {
	c.nameless -= nameless
	c.used -= nameless
	head := int32(len(c.here))
	for i := len(blocks) - 1; i >= 0; i-- {
		b := blocks[i]
		if c.pins[b]--; c.pins[b] == 0 {
			last := c.prev[head]
			c.next[last], c.prev[b], c.next[b], c.prev[head] = b, last, head, b
			c.idle++
		}
	}
}

func (c *cache) unlink(b int32) {
	c.next[c.prev[b]], c.prev[c.next[b]] = c.next[b], c.prev[b]
	c.idle--
}

// pinned are the blocks that cannot go.
func (c *cache) pinned() int { return c.used - c.idle }
