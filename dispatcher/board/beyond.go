package board

import (
	"time"

	"evenkeel/pool"
)

// Requests beyond the slots. A prefill engine keeps the KV of a hand-off only until a deadline. Some decode engines extend this deadline
// while the hand-off waits in their own queue, so the hand-off stays valid there for longer than in the proxy's pool. Therefore an entry
// that reaches its deadline in the pool is not refused if such an engine has room in its queue. The entry is bound to the rank and charged
// as usual, although the rank has no slot or no KV room for it yet. The engine begins with the request once both are free.

// bindOverdue binds an entry whose hand-off is at its deadline to a rank whose engine can begin with it at once, or else to the rank whose
// engine has the shortest queue. It returns false if no rank can take the entry. The loads of the ranks must be up to date (refreshLoad).
func (b *board) bindOverdue(e *pool.Entry, now time.Time) (bound bool) {
	if e.Discard {
		return false // no client waits for a discarded hand-off, and waiting in a queue would only make the prefill engine keep the KV for longer
	}
	w := b.waiting[e.ID]
	prompt := int64(w.prompt())
	var best *rank
	for _, g := range b.groups {
		for _, r := range g.steppingRanks {
			canTake := mayGo(e, r) && r.mayTakeOverdue(prompt) && !b.pairs.isQuarantined(e, r, now)
			if canTake && (best == nil || b.beginsSooner(r, best, prompt)) {
				best = r
			}
		}
	}
	if best == nil {
		return false
	}
	mustQueue := !best.startsAtOnce(prompt)
	if mustQueue {
		best.engineQueued++
		b.emit(Effect{Kind: EffectInEngineQueue})
	}
	b.admit(best, w, Binding{Policy: best.group.policyInForce().name, InEngineQueue: mustQueue}, now)
	return true
}

// mayTakeOverdue says whether the rank may get a prompt (in tokens) whose hand-off is at its deadline: its engine can begin at once, or
// there is room in the engine's own queue. The prefill engine frees the KV of a hand-off after the deadline, unless the decode engine makes
// it keep the KV for longer. MaxEngineQueue 0 stands for a decode engine that cannot do this, or must not (Config.Beyond is 0): such an
// engine gets no prompt at its deadline.
func (r *rank) mayTakeOverdue(prompt int64) bool {
	// Orphans are KV room of ended requests that the engine may hold until it restarts. All other KV comes free sooner or later.
	neverFits := r.Capacity > 0 && prompt > r.capacityWithoutOrphans()
	if !r.takesRequests() || r.MaxEngineQueue == 0 || neverFits {
		return false
	}
	// With a Limit above 0, the engine has just started, or may run requests of other proxies. Its queue must not get longer then.
	queueHasRoom := r.Limit == 0 && r.engineQueueLength() < r.MaxEngineQueue
	return queueHasRoom || r.startsAtOnce(prompt)
}

// startsAtOnce says whether the rank's engine would begin with a prompt (in tokens) at once: a slot and the KV room are free, and no
// request waits in the engine's queue.
func (r *rank) startsAtOnce(prompt int64) bool {
	return r.engineQueued == 0 && r.freeSlots() > 0 && r.hasKVRoom(prompt)
}

// engineQueueLength returns how many requests wait in the queue of the rank's engine. Policies that send entries at once bind more requests
// than there are slots, and engineQueued does not count these. So the queue has at least as many requests as the rank has beyond its slots:
// freeSlots is then below 0.
func (r *rank) engineQueueLength() int { return max(r.engineQueued, -r.freeSlots()) }

// beginsSooner says whether a prompt (in tokens) would probably begin sooner on rank r than on the other one. The rank on which the
// prompt begins at once wins. In a tie, the rank with fewer queued requests per slot wins, then the one with the larger share of free
// slots, then the one that holds less.
func (b *board) beginsSooner(r, other *rank, prompt int64) bool {
	if here := r.startsAtOnce(prompt); here != other.startsAtOnce(prompt) {
		return here
	}
	// To compare two numbers per slot without a division, each of them is multiplied by the slots of the other rank.
	mySlots, otherSlots := max(1, r.usableSlots()), max(1, other.usableSlots())
	if x, y := r.engineQueueLength()*otherSlots, other.engineQueueLength()*mySlots; x != y {
		return x < y
	}
	if x, y := r.freeSlots()*otherSlots, other.freeSlots()*mySlots; x != y {
		return x > y
	}
	return b.holdsLess(r, other)
}

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
		b.emit(Effect{Kind: EffectLeftEngineQueue, Group: GroupKey{Model: b.model}, Slot: oldest})
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
