// Package loop watches many sockets on few goroutines. With a goroutine per socket, every few bytes that arrive wake, schedule and park a
// goroutine. A loop asks the kernel once for all sockets that have bytes, and calls their handlers one after the other.
//
// Libraries such as gnet and netpoll do the same, but they own their connections from accept to close. Here a socket is in a loop only
// while an answer streams, and is an ordinary net.Conn before and after.
//
// Go's poller watches a loop's epoll instance. A waiting loop is therefore a parked goroutine like any other. A thread that waits in a
// system call instead would keep a processor from the other goroutines.
package loop

import "time"

// A Handler is called on its loop's goroutine. It must not block.
type Handler interface {
	// Ready is called when the watched socket can be read or written. ended says that the other side sends no more, or that the
	// connection has failed. The bytes that can be read then are the last ones.
	Ready(w *Watch, ended bool, now time.Time)
	// Expired is called when the time set by WakeAt has come.
	Expired(w *Watch, now time.Time)
}

// tickLength is the length of a tick, and therefore the precision of WakeAt. The wheel has a slot for each of the next 1024 ticks, about 33
// s. A watch that is due later is put into the last slot. When this slot is checked, the watch is set again.
const (
	tickLength = 32 * time.Millisecond
	slots      = 1024
)

// wheel sorts watches by the tick at which the loop checks them. This tick may be earlier than the time set by WakeAt, so that a watch that
// gets a later time whenever bytes arrive need not move in the wheel.
type wheel struct {
	slots  [slots]*Watch
	cursor int64 // the next tick to check
	first  int64 // the first tick that may have a watch; 0: no tick has one
	count  int   // number of watches in the wheel
}

// tick is the number of the tick in which a time lies, given in ns since the loop's base.
func tick(at int64) int64 { return at / int64(tickLength) }

// schedule puts w into the slot of its time (w.at), or leaves it in an earlier slot. A time beyond the wheel's last slot gets that slot,
// and a time in the past gets the slot that is checked next.
func (h *wheel) schedule(w *Watch) {
	lastTick := h.cursor + slots - 1
	t := min(max(tick(w.at)+1, h.cursor), lastTick) // +1, so that the time has come when the tick is checked
	if w.tick != 0 {
		if w.tick <= t { // the watch is checked before its time, and then set again
			return
		}
		h.remove(w)
	}
	w.tick = t
	if h.first == 0 || t < h.first {
		h.first = t
	}
	slot := &h.slots[t%slots] // the first watch of the slot's linked list; w goes before it
	w.next = *slot
	if w.next != nil {
		w.next.prev = w
	}
	*slot = w
	h.count++
}

// remove takes a watch out of its slot, if it is in one.
func (h *wheel) remove(w *Watch) {
	if w.tick == 0 {
		return
	}
	if w.prev != nil {
		w.prev.next = w.next
	} else { // the watch is the first one of its slot
		h.slots[w.tick%slots] = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	}
	w.prev, w.next, w.tick = nil, nil, 0
	h.count--
}

// findFirst sets first to the tick of the next watch; 0: there is none.
func (h *wheel) findFirst() {
	h.first = 0
	if h.count == 0 {
		return
	}
	for h.first = h.cursor; h.slots[h.first%slots] == nil; { // ends, because some slot has a watch
		h.first++
	}
}

// due is when the next watch must be checked, in ns since the loop's base; 0: there is no watch.
func (h *wheel) due() int64 { return h.first * int64(tickLength) }

// expire empties the slots of all ticks up to now. It appends the watches whose time (at) has come to dst. The time of others has not come:
// WakeAt has put it off while the watch stayed in its slot, or it lies beyond the last slot of the wheel. expire puts them into later
// slots.
func (h *wheel) expire(dst []*Watch, now int64) []*Watch {
	current := tick(now)
	if current-h.cursor >= slots {
		h.cursor = current - slots + 1 // so that the loop below checks every slot only once
	}
	var notYet *Watch // linked list of watches whose time has not come
	for ; h.cursor <= current; h.cursor++ {
		for w := h.slots[h.cursor%slots]; w != nil; w = h.slots[h.cursor%slots] {
			h.remove(w)
			switch {
			case w.at == 0: // WakeAt was called with the zero time, so the watch has no time any more
			case w.at <= now:
				w.at = 0
				dst = append(dst, w)
			default: // set again below, when the cursor has passed now, because schedule counts slots from the cursor
				w.next, notYet = notYet, w
			}
		}
	}
	for notYet != nil {
		w := notYet
		notYet, w.next = w.next, nil
		h.schedule(w)
	}
	h.findFirst()
	return dst
}
