package kvevents

import "github.com/cespare/xxhash/v2"

// follower applies a publisher's batches in order. It receives the live batches, and requests missed batches by replay.
type follower struct {
	// replay yields the publisher's batches from sequence number `from` on, in order, until the publisher's end
	// marker or until yield returns false.
	replay   func(from uint64, yield func(seq uint64, payload []byte) bool) error
	apply    func(payload []byte)
	dropAll  func() // drops all blocks that the applied batches named
	counters *counters

	nextSeq  uint64 // sequence number of the next batch
	synced   bool   // nextSeq is known: a batch was applied since the last restart or lost batch
	lastHash uint64 // hash of the payload of the batch before nextSeq; shows whether a publisher is still the same
	firstSeq uint64 // sequence number of the first batch after the last restart or lost batch
}

// resumeOrRestart begins on a new connection. A publisher that still has the batch that was applied last is the same as before,
// and the follower requests only the batches since. From any other publisher, such as a restarted one, it requests all
// batches.
func (f *follower) resumeOrRestart() {
	if f.synced && f.resume() {
		return
	}
	f.restart()
}

// resume requests the batches since the last connection, and applies them. It reports whether this succeeded: the
// publisher still had the batch that was applied last, and sent all batches after it.
func (f *follower) resume() (ok bool) {
	foundLast, gap := false, false
	err := f.replay(f.nextSeq-1, func(seq uint64, payload []byte) bool {
		switch {
		case !foundLast: // the first batch must be the one that was applied last; otherwise the replay ends here
			foundLast = seq == f.nextSeq-1 && xxhash.Sum64(payload) == f.lastHash
			return foundLast
		case seq != f.nextSeq: // a batch is missing
			gap = true
			return false
		}
		f.applyNext(seq, payload)
		return true
	})
	return foundLast && !gap && err == nil
}

// restart drops everything and requests all batches that the publisher still has.
func (f *follower) restart() {
	if f.synced { // otherwise nothing was applied since the last drop
		f.synced = false
		f.dropAll()
	}
	_ = f.replay(0, f.applyIfNew) // if the replay fails, the follower starts with the first live batch
}

// receiveLive applies a live batch of the subscription. If batches before it are missing, it first requests them by replay.
func (f *follower) receiveLive(seq uint64, payload []byte) {
	if f.synced && seq > f.nextSeq {
		switch lost := f.fillGap(); {
		case lost: // fillGap has dropped all blocks and counted the gap
		case seq > f.nextSeq: // the replay ended before the missing batches
			f.dropAfterGap()
		default:
			f.counters.gapsReplayed.Add(1)
		}
	}
	f.applyIfNew(seq, payload)
}

// fillGap requests the batches from nextSeq on. If the publisher no longer has some of them, it drops everything that was
// applied before, continues with the batches that come, and reports lost.
func (f *follower) fillGap() (lost bool) {
	err := f.replay(f.nextSeq, func(seq uint64, payload []byte) bool {
		if seq > f.nextSeq { // the publisher has skipped batches
			f.dropAfterGap()
			lost = true
		}
		return f.applyIfNew(seq, payload) // true: the replay goes on
	})
	if err != nil && !lost { // the replay failed; after a loss, the blocks from before it were dropped already
		f.dropAfterGap()
		lost = true
	}
	return lost
}

// dropAfterGap drops everything that was applied, because batches are missing. It counts the gap. The next batch begins a new
// sequence.
func (f *follower) dropAfterGap() {
	f.counters.gapsCold.Add(1)
	f.synced = false
	f.dropAll()
}

// applyIfNew applies a batch unless it was applied already. It always returns true, so that a replay continues to its end.
func (f *follower) applyIfNew(seq uint64, payload []byte) bool {
	if !f.synced || seq >= f.nextSeq {
		f.applyNext(seq, payload)
	}
	return true
}

// applyNext applies a batch, and expects the batch with the next sequence number from then on.
func (f *follower) applyNext(seq uint64, payload []byte) {
	if !f.synced { // this batch begins a new sequence
		f.firstSeq = seq
	}
	f.nextSeq, f.synced, f.lastHash = seq+1, true, xxhash.Sum64(payload)
	f.apply(payload)
}
