package kvevents

import "github.com/cespare/xxhash/v2"

// follower applies a publisher's batches in order: live ones, and missed ones by replay.
type follower struct {
	// replay yields the batches from sequence number `from` on, in order, until the publisher's end
	// marker or until yield returns false.
	replay   func(from uint64, yield func(seq uint64, payload []byte) bool) error
	apply    func(payload []byte)
	dropAll  func() // that the applied batches named
	counters *counters

	nextSeq  uint64 // of the next batch
	synced   bool   // nextSeq is known: a batch was applied since the last restart or lost batch
	lastHash uint64 // of the payload before nextSeq; shows whether a publisher is still the same
	firstSeq uint64 // of the first batch after the last restart or lost batch
}

// resumeOrRestart begins on a new connection. A publisher that still has the batch that was applied
// last is the same as before. From any other, such as a restarted one, the follower requests all
// batches.
func (f *follower) resumeOrRestart() {
	if f.synced && f.resume() {
		return
	}
	f.restart()
}

// resume requests and applies the batches since the last connection. ok: the publisher still had
// the batch that was applied last, and sent all batches after it.
func (f *follower) resume() (ok bool) {
	foundLast, gap := false, false
	err := f.replay(f.nextSeq-1, func(seq uint64, payload []byte) bool {
		switch {
		case !foundLast: // the first batch must be the one that was applied last
			foundLast = seq == f.nextSeq-1 && xxhash.Sum64(payload) == f.lastHash
			return foundLast
		case seq != f.nextSeq:
			gap = true
			return false
		}
		f.applyNext(seq, payload)
		return true
	})
	return foundLast && !gap && err == nil
}

func (f *follower) restart() {
	if f.synced { // otherwise nothing was applied since the last drop
		f.synced = false
		f.dropAll()
	}
	_ = f.replay(0, f.applyIfNew) // if it fails, the follower starts with the first live batch
}

func (f *follower) receiveLive(seq uint64, payload []byte) {
	if f.synced && seq > f.nextSeq {
		switch lost := f.fillGap(); {
		case lost: // fillGap has counted the gap
		case seq > f.nextSeq: // the replay ended before the missing batches
			f.dropAfterGap()
		default:
			f.counters.gapsReplayed.Add(1)
		}
	}
	f.applyIfNew(seq, payload)
}

// fillGap requests the batches from nextSeq on. If the publisher no longer has some of them, it
// drops everything that was applied before, and reports lost.
func (f *follower) fillGap() (lost bool) {
	err := f.replay(f.nextSeq, func(seq uint64, payload []byte) bool {
		if seq > f.nextSeq { // the publisher has skipped batches
			f.dropAfterGap()
			lost = true
		}
		return f.applyIfNew(seq, payload) // true: the replay goes on
	})
	if err != nil && !lost { // after a loss, the blocks were dropped already
		f.dropAfterGap()
		lost = true
	}
	return lost
}

// dropAfterGap drops everything, so that the next batch begins a new sequence.
func (f *follower) dropAfterGap() {
	f.counters.gapsCold.Add(1)
	f.synced = false
	f.dropAll()
}

// applyIfNew always returns true, so that a replay continues to its end.
func (f *follower) applyIfNew(seq uint64, payload []byte) bool {
	if !f.synced || seq >= f.nextSeq {
		f.applyNext(seq, payload)
	}
	return true
}

func (f *follower) applyNext(seq uint64, payload []byte) {
	if !f.synced {
		f.firstSeq = seq
	}
	f.nextSeq, f.synced, f.lastHash = seq+1, true, xxhash.Sum64(payload)
	f.apply(payload)
}
