// Package loop watches many sockets on few goroutines. A goroutine per socket is woken,
// scheduled and put to sleep for each few bytes that arrive; a loop asks the kernel once for
// all sockets that have bytes, and calls their handlers one after the other.
//
// Well-kept libraries do the same (gnet, netpoll), but they own their listeners and
// connections from accept to close. Here a socket is in a loop only while an
// answer streams, and is an ordinary net.Conn before and after.
//
// A loop's epoll instance is itself watched by Go's poller. So a loop that waits is a
// parked goroutine like any other, and not a thread in a system call that keeps a
// processor from the other goroutines.
package loop

import "time"

// A Handler is called on its loop's goroutine. It must not block.
type Handler interface {
	// Ready is called when the watched socket can be read or written. ended says that the other side sends no more, or that the connection
	// has failed: the bytes that can be read now are the last ones.
	Ready(w *Watch, ended bool, now time.Time)
	// Expired is called when the time set by Wake has come.
	Expired(w *Watch, now time.Time)
}

// granule is how exact Wake is: a tick of the wheel. The wheel has a slot for each of the next slots ticks; a
// watch that is due later is looked at before, and set again.
const (
	granule = 32 * time.Millisecond
	slots   = 1024
)

// wheel keeps watches by the tick at which they are looked at. That tick may come before the time that
// Wake set: if Wake sets a later time at each arrival, the watch need not move.
type wheel struct {
	slots  [slots]*Watch
	cursor int64 // the next tick to look at
	first  int64 // no earlier tick has a watch; 0: none has
	count  int
}

func tick(at int64) int64 { return at / int64(granule) }

// set puts w into the slot of its time, or leaves it in an earlier slot.
func (h *wheel) set(w *Watch) {
	t := min(max(tick(w.at)+1, h.cursor), h.cursor+slots-1)
	if w.tick != 0 {
		if w.tick <= t {
			return // it is looked at before its time, and then set again
		}
		h.remove(w)
	}
	w.tick = t
	if h.first == 0 || t < h.first {
		h.first = t
	}
	s := &h.slots[t%slots]
	if w.next = *s; w.next != nil {
		w.next.prev = w
	}
	*s = w
	h.count++
}

func (h *wheel) remove(w *Watch) {
	if w.tick == 0 {
		return
	}
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		h.slots[w.tick%slots] = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	}
	w.prev, w.next, w.tick = nil, nil, 0
	h.count--
}

// find sets first to the tick of the next watch.
func (h *wheel) find() {
	if h.first = 0; h.count == 0 {
		return
	}
	for h.first = h.cursor; h.slots[h.first%slots] == nil; {
		h.first++
	}
}

// due is when to look at the next watch, in ns since the loop's base; 0: there is none.
func (h *wheel) due() int64 { return h.first * int64(granule) }

// expire appends to dst the watches whose time has come, and sets the others again.
func (h *wheel) expire(dst []*Watch, now int64) []*Watch {
	last := tick(now)
	if last-h.cursor >= slots {
		h.cursor = last - slots + 1 // every slot is looked at once
	}
	var later *Watch
	for ; h.cursor <= last; h.cursor++ {
		for w := h.slots[h.cursor%slots]; w != nil; w = h.slots[h.cursor%slots] {
			h.remove(w)
			switch {
			case w.at == 0:
			case w.at <= now:
				w.at = 0
				dst = append(dst, w)
			default:
				w.next, later = later, w
			}
		}
	}
	for later != nil {
		w := later
		later, w.next = w.next, nil
		h.set(w)
	}
	h.find()
	return dst
}
