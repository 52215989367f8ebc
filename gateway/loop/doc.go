// Package loop watches many sockets on few goroutines. With a goroutine per socket, every few bytes
// wake, schedule and park one. A loop asks the kernel once for all sockets that have bytes, and
// calls their handlers in turn.
//
// Libraries such as gnet and netpoll own their connections from accept to close. Here a socket is
// in a loop only while an answer streams, and is an ordinary net.Conn before and after.
//
// Go's poller watches a loop's epoll instance, so that a waiting loop is a parked goroutine. A
// thread that waits in a system call would keep a processor from the other goroutines.
package loop

import "time"

// A Handler is called on its loop's goroutine and must not block.
type Handler interface {
	// Ready is called when the socket can be read or written. ended says that the other side sends no
	// more, or that the connection has failed: the bytes that can be read then are the last ones.
	Ready(w *Watch, ended bool, now time.Time)
	// Expired is called when the time of WakeAt has come.
	Expired(w *Watch, now time.Time)
}

// tickLength is the precision of WakeAt. The wheel spans 1024 ticks, about 33 s; a watch that is
// due later is put into the last slot, and set again from there.
const (
	tickLength = 32 * time.Millisecond
	slots      = 1024
)

// wheel sorts watches by the tick at which they are checked, which may be before the time of
// WakeAt: a watch that gets a later time whenever bytes arrive need not move.
type wheel struct {
	slots  [slots]*Watch
	cursor int64
	first  int64 // the first tick that may have a watch; 0: no tick has one
	count  int
}

func tick(at int64) int64 { return at / int64(tickLength) }

func (h *wheel) schedule(w *Watch) {
	lastTick := h.cursor + slots - 1
	// The 1 is there so that the time has come when the tick is checked.
	t := min(max(tick(w.at)+1, h.cursor), lastTick)
	if w.tick != 0 {
		if w.tick <= t {
			return
		}
		h.remove(w)
	}
	w.tick = t
	if h.first == 0 || t < h.first {
		h.first = t
	}
	slot := &h.slots[t%slots] // a linked list
	w.next = *slot
	if w.next != nil {
		w.next.prev = w
	}
	*slot = w
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

func (h *wheel) findFirst() {
	h.first = 0
	if h.count == 0 {
		return
	}
	for h.first = h.cursor; h.slots[h.first%slots] == nil; { // ends, because some slot has a watch
		h.first++
	}
}

// due is in ns since the loop's base; 0: there is no watch.
func (h *wheel) due() int64 { return h.first * int64(tickLength) }

// expire appends the watches whose time has come, up to now, to dst. Others were put off by WakeAt,
// or lie beyond the wheel.
func (h *wheel) expire(dst []*Watch, now int64) []*Watch {
	current := tick(now)
	if current-h.cursor >= slots {
		h.cursor = current - slots + 1 // so that every slot is checked only once
	}
	var notYet *Watch
	for ; h.cursor <= current; h.cursor++ {
		for w := h.slots[h.cursor%slots]; w != nil; w = h.slots[h.cursor%slots] {
			h.remove(w)
			switch {
			case w.at == 0:
			case w.at <= now:
				w.at = 0
				dst = append(dst, w)
			default: // set again below, because schedule counts from the cursor
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
