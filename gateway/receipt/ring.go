package receipt

import (
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// A Ring keeps the receipts of the last requests that ended, and of all that
// run. A nil Ring keeps none.
type Ring struct {
	maxBytes int64

	mu      sync.Mutex
	ended   []*Receipt // a ring of its capacity, never changed again
	next    int        // where the next receipt goes
	count   int
	bytes   int64
	byID    map[string]*Receipt // those that ended, by our own ids: clients' are not unique
	running map[string]*Live
	hits    sums
}

// NewRing returns a ring for the last receipts, up to so many, and for fewer if
// they would take more than maxBytes; nil if last is 0 or less.
func NewRing(last int, maxBytes int64) *Ring {
	if last <= 0 {
		return nil
	}
	return &Ring{maxBytes: maxBytes, ended: make([]*Receipt, last), byID: map[string]*Receipt{}, running: map[string]*Live{}, hits: sums{}}
}

// Live is the receipt of a request that runs. A nil Live notes nothing.
type Live struct {
	ring *Ring
	mu   sync.Mutex
	r    Receipt
}

// Open begins a receipt.
func (g *Ring) Open(r *Receipt) *Live {
	if g == nil {
		return nil
	}
	l := &Live{ring: g, r: *r}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running[r.ID] = l
	return l
}

// Edit adds to the receipt.
func (l *Live) Edit(add func(*Receipt)) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	add(&l.r)
}

// End adds the last of it: from here on the receipt is one of those that ended.
func (l *Live) End(add func(*Receipt)) {
	if l == nil {
		return
	}
	l.mu.Lock()
	add(&l.r)
	l.r.close()
	done := l.r
	done.Attempts = slices.Clip(slices.Clone(done.Attempts)) // a leg that ends late writes into l.r, not into done
	l.mu.Unlock()
	l.ring.keep(&done)
}

// keep puts a receipt in the place of the oldest.
func (g *Ring) keep(r *Receipt) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.running, r.ID)
	if g.count == len(g.ended) {
		g.dropOldest()
	}
	g.ended[g.next] = r
	g.next = (g.next + 1) % len(g.ended)
	g.count++
	g.byID[r.ID] = r
	g.hits.add(r)
	for g.bytes += r.size(); g.bytes > g.maxBytes && g.count > 1; {
		g.dropOldest()
	}
}

func (g *Ring) dropOldest() {
	at := (g.next - g.count + len(g.ended)) % len(g.ended)
	old := g.ended[at]
	g.ended[at] = nil
	g.count--
	g.bytes -= old.size()
	delete(g.byID, old.ID)
}

// Find returns the receipt of the request with an id of ours, and up to n in
// all with those of the requests that clients gave this id, the latest first:
// two clients may send the same id, or an id of ours.
func (g *Ring) Find(id string, n int) []*Receipt {
	list := []*Receipt{}
	if g == nil {
		return list
	}
	theirs := Clip(id)
	var running []*Live
	g.mu.Lock()
	for i := range g.count {
		if r := g.back(i); r.ClientID == theirs && r.ID != id {
			list = append(list, r)
		}
	}
	for _, l := range g.running {
		if l.r.ClientID == theirs && l.r.ID != id { // both are set before the receipt is opened, and never again
			running = append(running, l)
		}
	}
	l, runs := g.running[id]
	own, ended := g.byID[id]
	g.mu.Unlock()
	for _, l := range running {
		list = append(list, l.copy())
	}
	slices.SortStableFunc(list, func(a, b *Receipt) int { return b.Arrival.Compare(a.Arrival) })
	switch {
	case runs:
		list = slices.Insert(list, 0, l.copy())
	case ended:
		list = slices.Insert(list, 0, own)
	}
	return list[:min(n, len(list))]
}

// back is the receipt that ended so many before the last; with g.mu held.
func (g *Ring) back(i int) *Receipt { return g.ended[(g.next-1-i+len(g.ended))%len(g.ended)] }

// Last returns up to n of the requests that ended, or of those that run, the
// latest first, and of those that pass the filter only.
func (g *Ring) Last(n int, f Filter, running bool) []*Receipt {
	list := []*Receipt{}
	if g == nil {
		return list
	}
	now := time.Now()
	if running {
		for _, l := range g.open() {
			if r := l.copy(); f.passes(r, now) {
				list = append(list, r)
			}
		}
		slices.SortFunc(list, func(a, b *Receipt) int { return b.Arrival.Compare(a.Arrival) })
		return list[:min(n, len(list))]
	}
	for _, r := range g.last(n, f) {
		if len(list) < n && f.passes(r, now) {
			list = append(list, r)
		}
	}
	return list
}

// last returns receipts of requests that ended, as many as may be needed, latest first.
// They never change, so they are looked through without the lock.
func (g *Ring) last(n int, f Filter) []*Receipt {
	g.mu.Lock()
	defer g.mu.Unlock()
	if f != (Filter{}) {
		n = g.count
	}
	list := make([]*Receipt, min(n, g.count))
	for i := range list {
		list[i] = g.back(i)
	}
	return list
}

// Latest returns the receipts of up to n requests, the newest arrival first. They are chosen among the requests that still
// run and the n that ended last.
func (g *Ring) Latest(n int) []*Receipt {
	list := g.Last(n, Filter{}, false)
	if g == nil {
		return list
	}
	newest := make([]*Live, 0, n+1) // of the requests that run; thousands may run, so only these are copied
	for _, l := range g.open() {
		at, _ := slices.BinarySearchFunc(newest, l, func(a, b *Live) int { return b.r.Arrival.Compare(a.r.Arrival) })
		if at < n {
			newest = slices.Insert(newest, at, l)
			newest = newest[:min(n, len(newest))]
		}
	}
	for _, l := range newest {
		list = append(list, l.copy())
	}
	slices.SortStableFunc(list, func(a, b *Receipt) int { return b.Arrival.Compare(a.Arrival) })
	list = slices.CompactFunc(list, func(a, b *Receipt) bool { return a.ID == b.ID }) // a request that ended meanwhile is in the list twice
	return list[:min(n, len(list))]
}

// open are the receipts of requests that run.
func (g *Ring) open() []*Live {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Collect(maps.Values(g.running))
}

// Load is what the requests of a key ask for now.
type Load struct {
	Waiting int // requests that wait for prefill or for a decode rank
	Prompts int // prompts that prefill engines compute, or whose KV they hold
	Tokens  int // of these prompts
}

// Loads returns the load of each key that has requests, by the key's name.
func (g *Ring) Loads() map[string]Load {
	keys := map[string]Load{}
	if g == nil {
		return keys
	}
	for _, l := range g.open() {
		l.mu.Lock()
		key := keys[l.r.Key]
		if l.r.State == Queued || l.r.State == Pooled {
			key.Waiting++
		}
		holds := l.r.State == Prefilling || l.r.State == Pooled || l.r.State == Transferring
		if n := len(l.r.Attempts); holds && n > 0 && l.r.Attempts[n-1].Prefill != nil {
			key.Prompts, key.Tokens = key.Prompts+1, key.Tokens+l.r.Attempts[n-1].Prefill.Prompt
		}
		keys[l.r.Key] = key
		l.mu.Unlock()
	}
	return keys
}

const (
	mostLately = 2000        // receipts that FailedOn looks at, the last ones
	lately     = time.Minute // of requests that ended since then
)

// end is when its request ended.
func (r *Receipt) end() time.Time {
	return r.Arrival.Add(time.Duration(r.Total * float64(time.Millisecond)))
}

// FailedOn looks at the requests that failed in the last minute. all is their number. host is where most of them had a failed attempt,
// and most is the number of those. If another host has at least half of most, host is empty: a request that fails on one host is tried
// on others, so that then no single host is at fault.
func (g *Ring) FailedOn(now time.Time) (host string, most, all int) {
	if g == nil {
		return "", 0, 0
	}
	hosts := map[string]int{}
	for _, r := range g.last(mostLately, Filter{}) {
		if r.Status < 500 || now.Sub(r.end()) > lately {
			continue
		}
		all++
		for h := range r.failedOn() {
			hosts[h]++
		}
	}
	next := 0
	for h, n := range hosts {
		if n > most {
			host, most, next = h, n, most
		} else {
			next = max(next, n)
		}
	}
	if 2*next >= most {
		return "", 0, all
	}
	return host, most, all
}

// failedOn are the hosts on which attempts failed.
func (r *Receipt) failedOn() map[string]bool {
	hosts := map[string]bool{}
	for i := range r.Attempts {
		engine, _, _ := strings.Cut(r.Attempts[i].FailedOn, "/")
		if host, _, err := net.SplitHostPort(engine); err == nil {
			hosts[host] = true
		}
	}
	return hosts
}

// copy is the receipt as it is now.
func (l *Live) copy() *Receipt {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.r
	r.Attempts = slices.Clone(r.Attempts) // what an attempt points to is set once
	return &r
}

// Count is how many receipts are kept of requests that ended, and of requests that run.
func (g *Ring) Count() (ended, running int) {
	if g == nil {
		return 0, 0
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.count, len(g.running)
}
