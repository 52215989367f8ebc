package lease

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// world runs machines against one store in simulated time. Every clock has its
// own rate and origin; requests and answers are late or lost; a request whose
// sender has given up may still come to pass.
type world struct {
	t     time.Duration // true time
	rng   *rand.Rand
	rec   Record // the store; Term is filled in by look
	write int
	ttl   time.Duration // of a store that ends terms by its own clock; 0: it keeps no time
	ends  time.Duration // true time at which the holder's term does
	nodes []*node
	late  time.Duration // a message takes at most this
	lose  float64       // or is lost
	limbo bool          // what is sent into a partition may arrive, one day
	deny  Call          // the store refuses these
	asked []*plea       // for pledges, under way
	past  []Record      // all that the store ever had
	lost  int64         // the highest epoch that it had when it was restored; 0: never
}

// plea is a pledge that is asked for, and its answer.
type plea struct {
	from     *node
	run      *Machine // of the asker
	to       string
	ask      Vote
	sent     time.Time
	arrives  time.Duration // true
	answered time.Duration // true; 0: not yet
}

type node struct {
	name  string
	m     *Machine
	rate  float64 // of its clock
	begun time.Time
	seen  string // Stamp, as read or written last
	cut   []span // from the store and from everybody
	shut  []span // from the store alone
	apart []span // from the other proxies alone
	dead  bool
	runs  int // it was started so often again
	call  *flight
	stray []flight // given up, perhaps not gone
}

type span struct{ from, to time.Duration }

type flight struct {
	call     Call
	by       Config
	seen     string
	epoch    int64
	above    int64
	sent     time.Time
	arrives  time.Duration // true; below 0: never
	answered time.Duration // true; below 0: not yet, or never
	rec      Record
	err      error
}

const (
	tickOfWorld = 50 * time.Millisecond
	patience    = 5 * time.Second // of a caller, by its clock
)

func (n *node) now(t time.Duration) time.Time {
	return n.begun.Add(time.Duration(float64(t) * n.rate))
}

func (n *node) isCut(t time.Duration) bool {
	return within(n.cut, t)
}

func newWorld(ttl time.Duration) *world {
	return &world{rng: rand.New(rand.NewPCG(1, 2)), ttl: ttl}
}

// join adds a proxy. The first is the home.
func (w *world) join(name string, rate float64) *node {
	k := len(w.nodes)
	n := &node{name: name, rate: rate, begun: time.Unix(int64(1000*k), 0)}
	n.m = NewMachine(Config{Self: Identity(name, "b"), Home: k == 0, TakeoverRank: max(0, k-1), Times: DefaultTimes})
	n.m.canServe = true
	w.nodes = append(w.nodes, n)
	return n
}

// favour makes a node the first in order, and the others those after it.
func (w *world) favour(first int) {
	for i, n := range w.nodes {
		n.m.SetRole(n.now(w.t), i == first, max(0, (i-first+len(w.nodes))%len(w.nodes)-1), true)
	}
}

// begin starts a node, for the first time or again, with a list of members.
func (w *world) begin(n *node, members ...string) {
	if n.call != nil {
		n.stray = append(n.stray, *n.call)
	}
	n.call, n.dead, n.seen = nil, false, ""
	n.runs++
	cfg := n.m.cfg
	cfg.Self, cfg.Members, cfg.Begun = Identity(n.name, fmt.Sprint("b", n.runs)), members, n.now(w.t)
	n.m = NewMachine(cfg)
	n.m.canServe = true
	n.m.ObserveEpoch(w.lost) // from the others, before it takes anything
}

// restore brings the store back from a copy: it has what it had once. All that live have heard of
// the epoch of the moment, and so of a lease that only its holder knew. A copy that names as holder
// a process which still believes to be the holder is left out: this process would go on, and
// nothing would tell it that there was another one.
func (w *world) restore(share float64) {
	if len(w.past) == 0 {
		return
	}
	old := w.past[int(share*float64(len(w.past)-1))]
	for _, n := range w.nodes {
		if !n.dead && n.m.held && n.m.cfg.Self == old.Holder && n.m.epoch == old.Epoch {
			return
		}
	}
	for _, r := range w.past {
		w.lost = max(w.lost, r.Epoch)
	}
	w.rec = old
	if w.ttl > 0 && w.rec.Holder != "" {
		w.rec.Expiry, w.ends = NotExpired, w.t+max(w.ttl, w.rec.Duration)
	}
	for _, n := range w.nodes {
		n.m.ObserveEpoch(w.lost)
	}
}

// probe has all that live tell each other which epochs they have seen.
func (w *world) probe() {
	seen := int64(0)
	for _, n := range w.nodes {
		if !n.dead {
			seen = max(seen, n.m.maxEpochSeen)
		}
	}
	for _, n := range w.nodes {
		n.m.ObserveEpoch(seen)
	}
}

// pledges carries what owners ask of others, and their answers.
func (w *world) pledges() {
	for _, n := range w.nodes {
		if n.dead {
			continue
		}
		ask, ok := n.m.AskVotes(n.now(w.t))
		for _, id := range ask.Members {
			if d := w.way(n); ok && id != n.name && d >= 0 {
				w.asked = append(w.asked, &plea{from: n, run: n.m, to: id, ask: ask, sent: n.now(w.t), arrives: w.t + d})
			}
		}
	}
	w.asked = slices.DeleteFunc(w.asked, func(p *plea) bool {
		switch i := slices.IndexFunc(w.nodes, func(o *node) bool { return o.name == p.to && !o.dead }); {
		case p.answered > 0 && p.answered > w.t, p.answered == 0 && p.arrives > w.t:
			return false
		case p.answered > 0:
			if p.from.m == p.run && !p.from.dead {
				p.run.RecordVote(p.sent, p.from.now(w.t), p.to, p.ask.Epoch)
			}
			return true
		case i < 0 || w.nodes[i].m.GivePromise(w.nodes[i].now(w.t), p.ask) != nil:
			return true
		default:
			d := w.way(w.nodes[i])
			p.answered = w.t + d
			return d < 0
		}
	})
}

// way is how long a message to or from another proxy takes; below 0: for ever.
func (w *world) way(n *node) time.Duration {
	if within(n.apart, w.t) {
		return -1
	}
	return w.delay(n)
}

// store is how long a message to or from the store takes.
func (w *world) store(n *node) time.Duration {
	if within(n.shut, w.t) {
		return -1
	}
	return w.delay(n)
}

func within(list []span, t time.Duration) bool {
	return slices.ContainsFunc(list, func(s span) bool { return t >= s.from && t < s.to })
}

func (w *world) delay(n *node) time.Duration {
	switch {
	case n.isCut(w.t):
		if !w.limbo || w.rng.Float64() < .5 {
			return -1
		}
		return time.Duration(w.rng.Int64N(int64(40 * time.Second)))
	case w.rng.Float64() < w.lose:
		return -1
	case w.late == 0:
		return 0
	}
	return time.Duration(w.rng.Int64N(int64(w.late)))
}

func (w *world) step() {
	w.t += tickOfWorld
	if w.ttl > 0 && w.rec.Expiry == NotExpired && w.t >= w.ends {
		w.rec.Expiry = Expired
	}
	w.pledges()
	for _, n := range w.nodes {
		n.stray = slices.DeleteFunc(n.stray, func(f flight) bool {
			if f.arrives < 0 || f.arrives > w.t {
				return f.arrives < 0
			}
			w.exec(n, &f, false)
			return true
		})
		if n.dead {
			continue
		}
		if n.call == nil {
			if call, _ := n.m.Next(n.now(w.t)); call != None {
				n.call = &flight{call: call, by: n.m.cfg, seen: n.seen, epoch: n.m.epoch, above: n.m.maxEpochSeen, sent: n.now(w.t),
					arrives: -1, answered: -1}
				if d := w.store(n); d >= 0 {
					n.call.arrives = w.t + d
				}
			}
		}
		f := n.call
		if f == nil {
			continue
		}
		if f.arrives >= 0 && f.arrives <= w.t && f.answered < 0 {
			w.exec(n, f, true)
			f.arrives = -1
			if d := w.store(n); d >= 0 {
				f.answered = w.t + d
			}
		}
		switch now := n.now(w.t); {
		case f.answered >= 0 && f.answered <= w.t:
			n.call = nil
			n.learn(f, now)
		case now.Sub(f.sent) >= patience:
			n.call = nil
			n.stray = append(n.stray, *f)
			f.err = context.DeadlineExceeded
			n.learn(f, now)
		}
	}
}

func (n *node) learn(f *flight, now time.Time) {
	if f.err == nil && f.call != AskBack {
		n.seen = f.rec.Stamp
	}
	switch f.call {
	case Look:
		n.m.Looked(f.sent, now, f.rec, f.err)
	case Acquire:
		n.m.Acquired(f.sent, now, f.rec, f.err)
	case Renew:
		n.m.Renewed(f.sent, now, f.err)
	case Release:
		n.m.Released(f.sent, now, f.err)
	case AskBack:
		n.m.AskedBack(now, f.err)
	}
}

// exec is what a call does when it reaches the store. Who still waits for it
// reads again what another wrote meanwhile, who has gone does not.
func (w *world) exec(n *node, f *flight, waits bool) {
	if f.call == w.deny {
		f.err = errors.New("denied")
		return
	}
	same := f.seen == w.rec.Stamp
	ours := w.rec.Holder == f.by.Self && w.rec.Epoch == f.epoch && w.rec.Expiry != Expired && (same || waits)
	switch f.call {
	case Acquire:
		if !same || w.rec.Expiry == NotExpired {
			f.err = ErrTaken
			return
		}
		w.put(f.by.Self, max(w.rec.Epoch, f.above)+1)
		w.rec.Duration, w.rec.Members = f.by.Duration, f.by.Members
		if w.ttl > 0 {
			w.ends = w.t + f.by.Duration
		}
	case Renew:
		if !ours {
			f.err = ErrLost
			return
		}
		w.put(w.rec.Holder, w.rec.Epoch)
	case Release:
		if !ours {
			f.err = ErrLost
			return
		}
		w.put("", w.rec.Epoch)
	case AskBack:
		f.err = ErrNotHolder
		for _, o := range w.nodes {
			if o.m.held && o != n && !o.isCut(w.t) {
				f.err = o.m.GiveBack(o.now(w.t), o.m.epoch)
			}
		}
	}
	f.rec = w.rec
}

func (w *world) put(holder string, epoch int64) {
	w.write++
	w.rec = Record{Holder: holder, Epoch: epoch, Stamp: fmt.Sprint(w.write), Duration: w.rec.Duration, Members: w.rec.Members}
	w.past = append(w.past, w.rec)
	if w.ttl > 0 && holder != "" {
		w.rec.Expiry, w.ends = NotExpired, w.t+max(w.ttl, w.rec.Duration)
	}
}

// owners names who admits.
func (w *world) owners() string {
	var list []string
	for _, n := range w.nodes {
		if !n.dead && n.m.View(n.now(w.t)).Admits {
			list = append(list, n.name)
		}
	}
	return strings.Join(list, " and ")
}

// until runs the world to a moment and reports every change of owners.
func (w *world) until(t time.Duration) (log []string) {
	was := w.owners()
	for w.t < t {
		w.step()
		if is := w.owners(); is != was {
			log = append(log, fmt.Sprintf("%v %s", w.t.Round(time.Second), is))
			was = is
		}
	}
	return log
}

// stores are the two kinds: one that keeps no time, one that ends terms. An owner that is cut off
// stops, the first taker waits until it must have, and who returns gets the scope back in two
// steps. Somebody deletes a lease right after it was acquired, before the next in order looks: for
// that one it was never there, and the first cannot know. The store is restored from a copy of a
// moment at which nobody held the lease, while an owner renewed it a moment ago. Who has created a
// lease that was deleted, and leaves before it may admit, does not release it: whoever finds it
// released admits at once, and the owner before has not stopped yet. With a lease never two admit,
// whatever the network does and however the clocks run, as long as none is twice as fast as
// another; and when the trouble is over the home owns its scope. The limit of the promise, as a
// witness: a taker's clock that runs more than twice as fast.
