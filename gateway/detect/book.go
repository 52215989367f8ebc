package detect

import (
	"cmp"
	"slices"
	"time"
)

const (
	togetherWithin  = 30 * time.Second // findings that begin at most this long apart begin together
	effectWithin    = 2 * time.Minute  // an effect may begin this long after its cause
	backWithin      = 90 * time.Second // a finding that returns continues its incident
	resolvedKeptFor = 15 * time.Minute
	maxIncidents    = 64   // bound on the incidents that are kept, open and resolved
	maxFindings     = 2000 // more in one round are ignored, to bound the work
	maxNames        = 48   // bound on the names in Incident.Where
)

// Incident is what is wrong because of one cause, in the form in which it is shown.
type Incident struct {
	ID       int      `json:"id"`      // unique while the proxy runs
	Kind     Kind     `json:"kind"`    // kind of the finding that leads; also a label of the metric evenkeel_incident
	State    State    `json:"state"`   // new, lasting, paused or over
	Subject  string   `json:"subject"` // place of the finding that leads, as in the metric evenkeel_incident; empty: the whole proxy
	Severity string   `json:"severity"`
	Panel    string   `json:"panel"`           // panel of the live page that shows more
	Headline string   `json:"headline"`        // the cause in a few words
	What     string   `json:"what"`            // the cause, as a sentence
	Harm     string   `json:"harm,omitempty"`  // sentence with numbers on what clients noticed; empty: nothing, or not known yet
	Where    []string `json:"where"`           // first names of the engines, ranks, groups or models that are at fault; empty: the whole proxy
	Named    string   `json:"named"`           // the names of Where, and what each of them is, as sentences; empty: What has all names
	Ranks    []string `json:"ranks,omitempty"` // first names of the ranks that the incident is about, in addition to Where
	Count    int      `json:"count"`           // number of places at fault, including those that Where leaves out
	SinceMs  int64    `json:"since_ms"`
	UntilMs  int64    `json:"until_ms"` // Unix time at which the incident ended; 0: it lasts
	LastMs   int64    `json:"last_ms"`  // Unix time of the last finding, if the incident comes and goes and is not found now; else 0
	// how often the finding that leads has come back and gone, and for warnings all that ended with
	// the same text, which are not listed
	Times   int    `json:"times"`
	FirstMs int64  `json:"first_ms"`          // since_ms of the first occurrence
	Clients string `json:"clients"`           // what clients notice of the incident
	Next    string `json:"next"`              // what the operator should do
	Command string `json:"command"`           // a shell command to copy; empty: there is none
	Runbook string `json:"runbook"`           // name of the incident's entry in the runbook; empty: there is none
	Crowded bool   `json:"crowded,omitempty"` // many requests wait, as the cause of the incident or as an effect of it
}

// Book holds the open incidents, and those that ended in the last 15 minutes. The zero value is
// ready to use.
type Book struct {
	lastID int
	now    time.Time
	// some engine gets no requests, so Incidents may advise to bring engines back first
	enginesAway     bool
	list            []*incident
	unplaced        []string  // findings in no incident, because the list is full of more harmful ones
	unplacedSince   time.Time // zero: there are none
	unplacedHaveBad bool
}

// Observe updates the incidents with all findings of this moment, of which it ignores those beyond
// maxFindings. An incident without findings ends.
func (b *Book) Observe(now time.Time, found []Finding) {
	found = slices.Clone(found[:min(maxFindings, len(found))]) // a copy, because it is sorted in place
	// causes before their effects, and what has lasted longer first
	slices.SortStableFunc(found, func(x, y Finding) int {
		return cmp.Or(cmp.Compare(x.sortKey(), y.sortKey()), cmp.Compare(y.LastedFor, x.LastedFor))
	})
	r := b.newRound(now, found)
	b.now = now
	b.enginesAway = len(r.away) > 0
	b.unplaced, b.unplacedHaveBad = nil, false // collected anew
	var cameBack, isNew []*member
	for _, f := range r.found {
		o := r.owners[f.subject()]
		isOfItsOwn := o != nil && o.isOpen() && o.members[0].Kind != ProxyBusy
		// it was late before the proxy was
		f.follows = f.follows && !(isOfItsOwn && now.Sub(o.openSince) > togetherWithin)
		switch {
		case o != nil && o.isOpen() && !(isOfItsOwn && f.follows):
			o.take(f, r)
		case o != nil || f.Kind == ProxyBusy:
			cameBack = append(cameBack, f)
		default:
			isNew = append(isNew, f)
		}
	}
	// what is new may show that what came back is another outage
	for _, f := range append(cameBack, isNew...) {
		b.place(f, r)
	}
	b.list = slices.DeleteFunc(b.list, func(o *incident) bool { return len(o.members) == 0 })
	for _, o := range b.list {
		o.settle(now, r.previous, r.away)
	}
	b.dropOld(now)
}

// measureHarm compares each open incident that harms clients with the time before it began.
func (b *Book) measureHarm(r *Ring) {
	for _, o := range b.list {
		if !o.isOpen() || o.harm() < leastHarm {
			continue
		}
		// or a finding that began earlier has joined
		if o.baseline == nil || o.since.Before(o.baselineSince) {
			o.baseline, o.baselineSince = r.baseline(o.since), o.since
		}
		o.harmText = r.describeHarm(o.baseline)
	}
}

// dropOld drops incidents that were resolved long ago and, while there are too many, the first ones
// by isDroppedBefore. The findings of an open one become unplaced.
func (b *Book) dropOld(now time.Time) {
	b.list = slices.DeleteFunc(b.list, func(o *incident) bool { return !o.isOpen() && now.Sub(o.until) >= resolvedKeptFor })
	for len(b.list) > maxIncidents {
		dropped := 0
		for i, o := range b.list {
			if o.isDroppedBefore(b.list[dropped]) {
				dropped = i
			}
		}
		if o := b.list[dropped]; o.isOpen() { // its findings are in no incident now
			for _, m := range o.present() {
				b.unplaced = append(b.unplaced, m.What)
				b.unplacedHaveBad = b.unplacedHaveBad || m.Severity == Bad
			}
		}
		b.list = slices.Delete(b.list, dropped, dropped+1)
	}
	if len(b.unplaced) == 0 {
		b.unplacedSince = time.Time{}
	} else if b.unplacedSince.IsZero() {
		b.unplacedSince = now
	}
}

// isDroppedBefore: ended incidents go first, in the order in which they ended, then those with less
// harm, and of equal ones the newest.
func (o *incident) isDroppedBefore(other *incident) bool {
	switch ended, otherEnded := !o.isOpen(), !other.isOpen(); {
	case ended && otherEnded:
		return o.until.Before(other.until)
	case ended || otherEnded:
		return ended
	}
	return cmp.Or(cmp.Compare(o.harm(), other.harm()), cmp.Compare(other.id, o.id)) < 0
}
