package kvevents

import "github.com/cespare/xxhash/v2"

// follower keeps a publisher's batches in order. It is given the live batches, and asks for those that it missed.
type follower struct {
	// replay yields the publisher's batches from sequence number `from` on, in order, until the publisher's end
	// marker or until yield returns false.
	replay   func(from uint64, yield func(seq uint64, payload []byte) bool) error
	apply    func(payload []byte)
	cold     func() // forget all that was applied
	counters *counters

	next     uint64 // sequence number of the next batch
	synced   bool   // next is known
	lastHash uint64 // hash of the batch before next
	first    uint64 // number of the first batch since it was synced
}

// connected takes up a new connection. If the publisher still has the batch that was applied last, it is the same
// publisher, and is asked for the batches since. Any other publisher, as after a restart, is asked for all that it
// has.
func (f *follower) connected() {
	if f.synced && f.resume() {
		return
	}
	f.restart()
}

// resume asks for the batches since the last connection, and applies them. It reports whether it could: the publisher
// still had the batch that was applied last, and sent all that followed.
func (f *follower) resume() bool {
	known, whole := false, true
	err := f.replay(f.next-1, func(seq uint64, payload []byte) bool {
		switch {
		case !known:
			known = seq == f.next-1 && xxhash.Sum64(payload) == f.lastHash
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

// restart forgets everything and asks for all that the publisher still has. If there is no replay, the first live
// batch is the beginning.
func (f *follower) restart() {
	if f.synced {
		f.synced = false
		f.cold()
	}
	_ = f.replay(0, f.follow)
}

// live takes a batch that came by the subscription.
func (f *follower) live(seq uint64, payload []byte) {
	if f.synced && seq > f.next {
		switch lost := f.fill(); {
		case lost:
		case seq > f.next: // the missing batches cannot be had
			f.lose()
		default:
			f.counters.replayed.Add(1)
		}
	}
	f.follow(seq, payload)
}

// fill asks for the batches between next and a live batch. If some are lost, everything before is forgotten, and it
// goes on with the batches that come.
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

// lose forgets all that was applied, because batches are missing.
func (f *follower) lose() {
	f.counters.cold.Add(1)
	f.synced = false
	f.cold()
}

// follow applies a batch unless it was applied already. It always returns true: a replay is to go on to its end.
func (f *follower) follow(seq uint64, payload []byte) bool {
	if !f.synced || seq >= f.next {
		f.applyNext(seq, payload)
	}
	return true
}

// applyNext applies a batch, and expects the one after it from then on.
func (f *follower) applyNext(seq uint64, payload []byte) {
	if !f.synced {
		f.first = seq
	}
	f.next, f.synced, f.lastHash = seq+1, true, xxhash.Sum64(payload)
	f.apply(payload)
}
