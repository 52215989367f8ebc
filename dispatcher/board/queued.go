package board

import "time"

// promoteQueued marks requests in the engine's queue as begun, oldest first, while there is room,
// because engines take requests in order. An engine that runs nothing else of this proxy begins
// with the first request even if the board counts no KV room for it.
func (b *board) promoteQueued(r *rank) {
	if r.engineQueued == 0 {
		return
	}
	b.refreshLoad(r)
	records := b.slots.records
	// Requests that the engine has begun, and their KV tokens.
	begun, kv := len(r.slots)-r.engineQueued, r.kv
	for i, slot := range r.slots {
		if records[slot].inEngineQueue {
			kv -= r.running[i].Tokens()
		}
	}
	for ; r.engineQueued > 0; r.engineQueued-- {
		oldest, ok := b.oldestQueued(r)
		if !ok {
			r.engineQueued = 0
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

func (b *board) oldestQueued(r *rank) (oldest int32, ok bool) {
	records := b.slots.records
	for _, slot := range r.slots {
		if records[slot].inEngineQueue && (!ok || records[slot].boundBefore(&records[oldest])) {
			oldest, ok = slot, true
		}
	}
	return oldest, ok
}

// boundBefore: at the same time, the smaller ID counts as first.
func (s *slotRecord) boundBefore(other *slotRecord) bool {
	return s.boundAt.Before(other.boundAt) || s.boundAt.Equal(other.boundAt) && s.id < other.id
}

// PresumedSeconds is the mean time in a slot until the first request has ended. Each that ends
// moves the mean by the share paceWeight of the difference.
const (
	PresumedSeconds = 30
	paceWeight      = 1.0 / 16
)

func newPace() Throughput { return Throughput{Seconds: PresumedSeconds} }

func (p *Throughput) recordEnd(inSlot time.Duration, kv int64) {
	p.Seconds += paceWeight * (inSlot.Seconds() - p.Seconds)
	p.tokens += paceWeight * (float64(kv) - p.tokens)
}

// emitPace runs at the end of a Tick, after its rounds, because the effect wakes the callers that
// wait for Dispatcher.Room, and before they would read outdated numbers. It emits the same for the
// ranks of each name that only some list.
func (b *board) emitPace() {
	b.pace.Slots, b.pace.Free = 0, 0
	for _, g := range b.groups {
		for _, r := range g.steppingRanks {
			b.pace.addRank(r)
		}
	}
	// No client waits for a discarded entry.
	b.pace.Waiting = b.pool.Len() - b.discardedWaiting
	for i, placement := range b.sortedPlacements {
		b.sortedPaces[i] = placement.paceOfName(&b.pace) // takes over only the means
		// Entries for this name cannot use other slots. So if more of them wait than its ranks have free
		// slots, the surplus does not count for the whole board.
		b.pace.Waiting -= max(0, placement.waitingForName-b.sortedPaces[i].Free)
	}
	b.emit(Effect{Kind: EffectPace, Group: GroupKey{Model: b.model}, Pace: b.pace, Named: b.sortedPaces})
}

// addRank counts the slots that the engine uses, and the free ones with KV room: at least 1,
// because Dispatcher.Room takes 0 as a board whose ranks take no requests. Free slots without KV
// room would be promised, although no request can use them.
func (p *Throughput) addRank(r *rank) {
	if r.takesRequests() {
		free := r.freeFor(p.tokens)
		p.Slots += min(r.usableSlots(), max(1, len(r.slots)-r.engineQueued+free))
		p.Free += free
	}
}

// freeFor returns for how many free slots there is KV room, with a mean of tokens per request; 0:
// not known, so all count.
func (r *rank) freeFor(tokens float64) int {
	free := max(0, r.freeSlots())
	if r.Capacity == 0 || tokens == 0 {
		return free
	}
	freeKV := max(0, r.usableCapacity()-r.kv)
	return int(min(float64(free), float64(freeKV)/tokens))
}

func (p *namePlacement) paceOfName(all *Throughput) Throughput {
	t := Throughput{Seconds: all.Seconds, tokens: all.tokens, Waiting: p.waitingForName}
	for _, r := range p.ranks {
		t.addRank(r)
	}
	return t
}
