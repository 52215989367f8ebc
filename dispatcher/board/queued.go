package board

import "time"

// promoteQueued marks requests in the engine's queue as begun, oldest first, as long as a slot and KV room are free for them, because
// engines take requests in order. An engine that runs no other request of this proxy begins with the first request even if the board counts
// no KV room for it.
func (b *board) promoteQueued(r *rank) {
	if r.engineQueued == 0 {
		return
	}
	b.refreshLoad(r)
	records := b.slots.records
	// Number of requests that the engine has begun, and their KV tokens: those on the rank without those of the queued requests.
	begun, kv := len(r.slots)-r.engineQueued, r.kv
	for i, slot := range r.slots {
		if records[slot].inEngineQueue {
			kv -= r.running[i].Tokens()
		}
	}
	for ; r.engineQueued > 0; r.engineQueued-- {
		oldest, ok := b.oldestQueued(r)
		if !ok {
			r.engineQueued = 0 // the count was too high: no request waits in the queue
			return
		}
		s := &records[oldest]
		tokens := r.running[s.pos].Tokens()
		isFull := begun >= r.usableSlots() || r.Capacity > 0 && kv+tokens > r.usableCapacity()
		if begun > 0 && isFull {
			return // an engine takes requests in order, so the younger ones wait, too
		}
		begun, kv = begun+1, kv+tokens
		s.inEngineQueue = false
	}
}

// oldestQueued returns the slot of the request that has waited longest in the queue of the rank's engine; ok is false if no request waits
// there.
func (b *board) oldestQueued(r *rank) (oldest int32, ok bool) {
	records := b.slots.records
	for _, slot := range r.slots {
		if records[slot].inEngineQueue && (!ok || records[slot].boundBefore(&records[oldest])) {
			oldest, ok = slot, true
		}
	}
	return oldest, ok
}

// boundBefore says whether a request got its slot before the other request. If both got their slots at the same time, the smaller ID counts
// as first.
func (s *slotRecord) boundBefore(other *slotRecord) bool {
	return s.boundAt.Before(other.boundAt) || s.boundAt.Equal(other.boundAt) && s.id < other.id
}

// PresumedSeconds is the mean time for which a request has its slot, in s, as assumed until the first request has ended. Each request that
// ends moves the mean by paceWeight times the difference between its own time and the mean.
const (
	PresumedSeconds = 30
	paceWeight      = 1.0 / 16
)

// newPace returns the pace of a board on which no request has ended yet: the mean time in a slot is presumed.
func newPace() Throughput { return Throughput{Seconds: PresumedSeconds} }

// recordEnd updates the means by a request that has ended: inSlot is how long it had its slot, and kv how many KV tokens it had at the end.
func (p *Throughput) recordEnd(inSlot time.Duration, kv int64) {
	p.Seconds += paceWeight * (inSlot.Seconds() - p.Seconds)
	p.tokens += paceWeight * (float64(kv) - p.tokens)
}

// emitPace emits how many slots the board has, how many of them are free, how many entries wait, and for how long requests keep their
// slots. The last number is a mean, which recordEnd updates when a request ends; emitPace counts the others. For each model name that only
// some ranks list, it emits the same about these ranks (a placement has the ranks of one name). It runs at the end of a Tick, after its
// rounds: the effect wakes the callers that wait for Dispatcher.Room, and before the end they would read outdated numbers.
func (b *board) emitPace() {
	b.pace.Slots, b.pace.Free = 0, 0
	for _, g := range b.groups {
		for _, r := range g.steppingRanks {
			b.pace.addRank(r)
		}
	}
	// No client waits for a discarded entry: it only makes its prefill engine free the KV.
	b.pace.Waiting = b.pool.Len() - b.discardedWaiting
	for i, placement := range b.sortedPlacements {
		b.sortedPaces[i] = placement.paceOfName(&b.pace) // takes over only the means from b.pace, and counts the rest anew
		// Entries that ask for this name cannot take the slots of ranks that do not list it. So if more of them wait than slots are
		// free on the ranks that list it, the surplus does not count for the whole board.
		b.pace.Waiting -= max(0, placement.waitingForName-b.sortedPaces[i].Free)
	}
	b.emit(Effect{Kind: EffectPace, Group: GroupKey{Model: b.model}, Pace: b.pace, Named: b.sortedPaces})
}

// addRank counts the slots of a rank that takes requests: the slots whose requests the engine has begun, and the free slots for which there
// is KV room. They count as at least 1, because Dispatcher.Room takes 0 as a board whose ranks take no requests, but as at most the usable
// slots. Free slots without KV room do not count, because Dispatcher.Room would promise them although no request can use them.
func (p *Throughput) addRank(r *rank) {
	if r.takesRequests() {
		free := r.freeFor(p.tokens)
		p.Slots += min(r.usableSlots(), max(1, len(r.slots)-r.engineQueued+free))
		p.Free += free
	}
}

// freeFor returns for how many of its free slots the rank has KV room. tokens is the mean number of KV tokens that a request needs; 0: not
// known, so all free slots count.
func (r *rank) freeFor(tokens float64) int {
	free := max(0, r.freeSlots())
	if r.Capacity == 0 || tokens == 0 {
		return free
	}
	freeKV := max(0, r.usableCapacity()-r.kv)
	return int(min(float64(free), float64(freeKV)/tokens))
}

// paceOfName returns the slots of the ranks that list a name, the free ones among them, and the number of entries that wait for the name.
// The mean times are those of all ranks of the board (all).
func (p *namePlacement) paceOfName(all *Throughput) Throughput {
	t := Throughput{Seconds: all.Seconds, tokens: all.tokens, Waiting: p.waitingForName}
	for _, r := range p.ranks {
		t.addRank(r)
	}
	return t
}
