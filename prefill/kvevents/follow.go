package kvevents

import "github.com/cespare/xxhash/v2"

// follower keeps a publisher's batches in order. It is told of
// live ones and asks for those that it missed.
type follower struct {
	// replay yields the publisher's batches from one on, in order, until its end
	// marker or until yield says that it is enough.
	replay func(from uint64, yield func(seq uint64, payload []byte) bool) error
	apply  func(payload []byte)
	cold   func() // forget all that was applied
	count  *counters

	next   uint64 // sequence number of the next batch
	synced bool   // next is known
	sum    uint64 // of the batch before next
	first  uint64 // the batch that synced
}

// connected takes up a new connection. A publisher that still has the batch that was
// applied last is the one we knew, and is asked for the rest; from any other, as
// after a restart, comes all that it has.
func (f *follower) connected() {
	if f.synced && f.resume() {
		return
	}
	f.restart()
}

func (f *follower) resume() bool {
	known, whole := false, true
	err := f.replay(f.next-1, func(seq uint64, payload []byte) bool {
		switch {
		case !known:
			known = seq == f.next-1 && xxhash.Sum64(payload) == f.sum
			return known
		case seq != f.next:
			whole = false
			return false
		}
		f.applyNext(seq, payload)
		return true
	})
	return known && whole && err == nil
}

// restart forgets everything and asks for all that the publisher still has.
// Without a replay the first live batch is the beginning.
func (f *follower) restart() {
	if f.synced {
		f.synced = false
		f.cold()
	}
	_ = f.replay(0, f.follow)
}

// live takes a batch of the subscription.
func (f *follower) live(seq uint64, payload []byte) {
	if f.synced && seq > f.next {
		switch lost := f.fill(); {
		case lost:
		case seq > f.next: // it is not to be had
			f.lose()
		default:
			f.count.replayed.Add(1)
		}
	}
	f.follow(seq, payload)
}

// fill asks for what lies between next and a live batch. When some of it is lost
// it goes on with what there is.
func (f *follower) fill() (lost bool) {
	err := f.replay(f.next, func(seq uint64, payload []byte) bool {
		if seq > f.next {
			f.lose()
			lost = true
		}
		return f.follow(seq, payload)
	})
	if err != nil && !lost {
		f.lose()
		lost = true
	}
	return lost
}

func (f *follower) lose() {
	f.count.cold.Add(1)
	f.synced = false
	f.cold()
}

// follow applies a batch unless it was applied already. There is never enough.
func (f *follower) follow(seq uint64, payload []byte) bool {
	if !f.synced || seq >= f.next {
		f.applyNext(seq, payload)
	}
	return true
}

func (f *follower) applyNext(seq uint64, payload []byte) {
	if !f.synced {
		f.first = seq
	}
	f.next, f.synced, f.sum = seq+1, true, xxhash.Sum64(payload)
	f.apply(payload)
}
