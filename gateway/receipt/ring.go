package receipt

import (
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"evenkeel/internal/words"
)

// A Ring keeps the receipts of the last requests that ended, and of all that run. A nil Ring keeps
// none.
type Ring struct {
	maxBytes int64

	mu      sync.Mutex
	ended   []*Receipt                 // a ring buffer; its receipts never change
	next    int                        // index in ended for the next receipt
	count   int                        // receipts in ended
	bytes   int64                      // about how much memory the receipts in ended take
	byID    map[string]*Receipt        // of ended; ids of clients are not unique
	running map[string]*RunningReceipt // receipts of requests that run, by evenkeel's request id
	hits    sums
}

// NewRing keeps at most `last` ended receipts, and fewer if they would take more than maxBytes;
// nil: `last` is 0 or less.
func NewRing(last int, maxBytes int64) *Ring {
	if last <= 0 {
		return nil
	}
	room := min(int64(last), maxBytes/sizeReceipt+1) // more never fit, and each place takes memory
	return &Ring{
		maxBytes: maxBytes, ended: make([]*Receipt, room), byID: map[string]*Receipt{}, running: map[string]*RunningReceipt{}, hits: sums{},
	}
}

// RunningReceipt is the receipt of a request that runs. A nil RunningReceipt records nothing.
type RunningReceipt struct {
	ring *Ring
	mu   sync.Mutex
	r    Receipt
}

// Open begins the receipt of a request that runs.
func (g *Ring) Open(r *Receipt) *RunningReceipt {
	if g == nil {
		return nil
	}
	l := &RunningReceipt{ring: g, r: *r}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running[r.ID] = l
	return l
}

// Edit calls change with the receipt locked.
func (l *RunningReceipt) Edit(change func(*Receipt)) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	change(&l.r)
}

// End changes the receipt a last time, and moves it to the ended ones.
func (l *RunningReceipt) End(change func(*Receipt)) {
	if l == nil {
		return
	}
	l.mu.Lock()
	change(&l.r)
	l.r.close()
	done := l.r
	done.Attempts = slices.Clip(slices.Clone(done.Attempts)) // legs that end late still write into l.r
	l.mu.Unlock()
	l.ring.addEnded(&done)
}

func (g *Ring) addEnded(r *Receipt) {
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
	g.bytes += r.size()
	for g.bytes > g.maxBytes && g.count > 1 { // the new one stays, even if it alone is too large
		g.dropOldest()
	}
}

// The caller holds g.mu.
func (g *Ring) dropOldest() {
	index := (g.next - g.count + len(g.ended)) % len(g.ended)
	oldest := g.ended[index]
	g.ended[index] = nil
	g.count--
	g.bytes -= oldest.size()
	delete(g.byID, oldest.ID)
}

// Find returns up to n receipts for an id: that of evenkeel's id, and then, latest first, those of
// clients' ids: several clients may use the same, and even evenkeel's.
func (g *Ring) Find(id string, n int) []*Receipt {
	list := []*Receipt{}
	if g == nil {
		return list
	}
	clientID := words.Clip(id) // as receipts have it
	var running []*RunningReceipt
	g.mu.Lock()
	for i := range g.count {
		if r := g.endedBefore(i); r.ClientID == clientID && r.ID != id {
			list = append(list, r)
		}
	}
	for _, l := range g.running {
		if l.r.ClientID == clientID && l.r.ID != id { // neither id ever changes, so l.mu is not needed
			running = append(running, l)
		}
	}
	runningOfID, runs := g.running[id]
	endedOfID, ended := g.byID[id]
	g.mu.Unlock() // a copy waits for the lock of its receipt
	for _, l := range running {
		list = append(list, l.copy())
	}
	slices.SortStableFunc(list, func(a, b *Receipt) int { return b.Arrival.Compare(a.Arrival) })
	switch {
	case runs:
		list = slices.Insert(list, 0, runningOfID.copy())
	case ended:
		list = slices.Insert(list, 0, endedOfID)
	}
	return list[:min(n, len(list))]
}

// The caller holds g.mu.
func (g *Ring) endedBefore(i int) *Receipt { return g.ended[(g.next-1-i+len(g.ended))%len(g.ended)] }

// Last returns up to n receipts that pass the filter, latest first: of requests that run (running),
// or else of those that ended.
func (g *Ring) Last(n int, f Filter, running bool) []*Receipt {
	list := []*Receipt{}
	if g == nil {
		return list
	}
	now := time.Now()
	if running {
		for _, l := range g.runningReceipts() {
			if r := l.copy(); f.passes(r, now) {
				list = append(list, r)
			}
		}
		slices.SortFunc(list, func(a, b *Receipt) int { return b.Arrival.Compare(a.Arrival) })
		return list[:min(n, len(list))]
	}
	filters := f != (Filter{}) // more than n are read then
	for _, r := range g.lastEnded(n, filters) {
		if len(list) < n && f.passes(r, now) {
			list = append(list, r)
		}
	}
	return list
}

// The receipts never change, so the caller needs no lock.
func (g *Ring) lastEnded(n int, all bool) []*Receipt {
	g.mu.Lock()
	defer g.mu.Unlock()
	if all {
		n = g.count
	}
	list := make([]*Receipt, min(n, g.count))
	for i := range list {
		list[i] = g.endedBefore(i)
	}
	return list
}

// Latest returns up to n receipts of running and ended requests, the newest arrival first.
func (g *Ring) Latest(n int) []*Receipt {
	if g == nil {
		return []*Receipt{}
	}
	const running = false
	list := g.Last(n, Filter{}, running)
	newest := make([]*RunningReceipt, 0, n+1) // thousands may run, so only these n are copied
	for _, l := range g.runningReceipts() {
		// An arrival never changes, so it is read without l.mu.
		place, _ := slices.BinarySearchFunc(newest, l, func(a, b *RunningReceipt) int { return b.r.Arrival.Compare(a.r.Arrival) })
		if place < n {
			newest = slices.Insert(newest, place, l)
			newest = newest[:min(n, len(newest))]
		}
	}
	for _, l := range newest {
		list = append(list, l.copy())
	}
	slices.SortStableFunc(list, func(a, b *Receipt) int { return b.Arrival.Compare(a.Arrival) })
	// A request that has just ended is in the list twice.
	list = slices.CompactFunc(list, func(a, b *Receipt) bool { return a.ID == b.ID })
	return list[:min(n, len(list))]
}

func (g *Ring) runningReceipts() []*RunningReceipt {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Collect(maps.Values(g.running))
}

// Load is that of one API key's requests.
type Load struct {
	Waiting int // requests that wait for prefill or for a decode rank
	Prompts int // prompts that prefill engines compute, or whose KV they hold
	Tokens  int // tokens of these prompts
}

// Loads returns the load of each key, by the key's name.
func (g *Ring) Loads() map[string]Load {
	keys := map[string]Load{}
	if g == nil {
		return keys
	}
	for _, l := range g.runningReceipts() {
		l.mu.Lock()
		load := keys[l.r.Key]
		if l.r.State == Queued || l.r.State == Pooled {
			load.Waiting++
		}
		// It computes the prompt, or holds its KV.
		onPrefillEngine := l.r.State == Prefilling || l.r.State == Pooled || l.r.State == Transferring
		if n := len(l.r.Attempts); onPrefillEngine && n > 0 && l.r.Attempts[n-1].Prefill != nil {
			load.Prompts++
			load.Tokens += l.r.Attempts[n-1].Prefill.Prompt
		}
		keys[l.r.Key] = load
		l.mu.Unlock()
	}
	return keys
}

const (
	mostSearched  = 2000        // how many of the last receipts FailedOn reads
	recentFailure = time.Minute // how far back FailedOn counts failures
)

func (r *Receipt) endTime() time.Time {
	return r.Arrival.Add(time.Duration(r.Total * float64(time.Millisecond)))
}

// FailedOn finds the host that is probably at fault for the requests that failed in the last
// minute: most of all had a failed attempt there. If another host has at least half as many, host
// is empty, because a request that fails on one host is tried on others.
func (g *Ring) FailedOn(now time.Time) (host string, most, all int) {
	if g == nil {
		return "", 0, 0
	}
	requestsOf := map[string]int{} // with a failed attempt
	const allOfThem = false        // so that a search stays short
	for _, r := range g.lastEnded(mostSearched, allOfThem) {
		if r.Status < 500 || now.Sub(r.endTime()) > recentFailure { // not by a fault here, or not lately
			continue
		}
		all++
		for h := range r.failedHosts() {
			requestsOf[h]++
		}
	}
	second := 0 // of the host with the second most
	for h, n := range requestsOf {
		if n > most {
			host, most, second = h, n, most
		} else {
			second = max(second, n)
		}
	}
	if 2*second >= most {
		return "", 0, all
	}
	return host, most, all
}

// Engines that are not named host:port are left out.
func (r *Receipt) failedHosts() map[string]bool {
	hosts := map[string]bool{}
	for i := range r.Attempts {
		engine, _, _ := strings.Cut(r.Attempts[i].FailedOn, "/") // a rank is host:port/rank
		if host, _, err := net.SplitHostPort(engine); err == nil {
			hosts[host] = true
		}
	}
	return hosts
}

func (l *RunningReceipt) copy() *Receipt {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.r
	r.Attempts = slices.Clone(r.Attempts) // Prefill and Decode are replaced and never changed
	return &r
}

// Count counts the receipts that are kept.
func (g *Ring) Count() (ended, running int) {
	if g == nil {
		return 0, 0
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.count, len(g.running)
}
