package lease

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var three = []string{"a", "b", "c"}

// fellows joins three proxies that are each other's members.
func fellows(ttl time.Duration) *world {
	w := newWorld(ttl)
	for _, id := range three {
		w.begin(w.join(id, 1), three...)
	}
	return w
}

// cutStore takes the store away from everybody for so long.
func (w *world) cutStore(of time.Duration) (back time.Duration) {
	for _, n := range w.nodes {
		n.shut = append(n.shut, span{w.t, w.t + of})
	}
	return w.t + of
}

// The owner goes on for as long as it has all pledges, without a pause also
// when the store is back and has forgotten the lease, and its epoch never goes back.
func TestAnOwnerGoesOnByPledgesWhileTheStoreIsAway(t *testing.T) {
	for name, ttl := range stores {
		t.Run(name, func(t *testing.T) {
			w := fellows(ttl)
			w.until(60 * time.Second)
			require.Equal(t, "a", w.owners())
			back := w.cutStore(2 * time.Minute)
			require.Empty(t, w.until(back-time.Second), "nobody stops and nobody starts")
			v := w.nodes[0].m.View(w.nodes[0].now(w.t))
			require.True(t, v.Voted)
			require.True(t, v.StoreAway)
			require.Empty(t, w.until(back+time.Minute), "nobody stops when it is back, either")
			v = w.nodes[0].m.View(w.nodes[0].now(w.t))
			require.True(t, v.Admits)
			require.False(t, v.Voted)
			require.False(t, v.StoreAway)
			require.GreaterOrEqual(t, v.Epoch, int64(1))
		})
	}
}

// A lease was deleted. All members live, and promise at once that they do not take it.
func TestAnOwnerWhoseLeaseIsDeletedGoesOnByPledges(t *testing.T) {
	for name, ttl := range stores {
		t.Run(name, func(t *testing.T) {
			w := fellows(ttl)
			w.until(60 * time.Second)
			epoch := w.rec.Epoch
			w.rec = Record{}
			from := w.t
			for range 5 {
				w.until(w.t + time.Second)
			}
			require.Equal(t, "a", w.owners(), "its next renewal, and a round of promises: not a lease and two waits")
			require.Greater(t, w.rec.Epoch, epoch)
			require.Empty(t, w.until(from+time.Minute))

			w.nodes[2].dead = true
			w.rec = Record{}
			from = w.t
			require.Empty(t, w.until(from+time.Second), "it cannot know yet")
			w.until(from + 30*time.Second)
			require.Empty(t, w.owners(), "one member may admit, for all that is known")
			w.until(from + 40*time.Second)
			require.Equal(t, "a", w.owners(), "after a lease, and another one and a start delay")
		})
	}
}

// A promise that the process before may have given delays nothing when the owner hands over,
// because there is no other owner.
func TestAMemberThatHasJustStartedTakesWhatTheOwnerHandsOver(t *testing.T) {
	for name, ttl := range stores {
		t.Run(name, func(t *testing.T) {
			for _, leaves := range []bool{true, false} {
				w := fellows(ttl)
				w.until(60 * time.Second)
				require.Equal(t, "a", w.owners())
				a, b := w.nodes[0], w.nodes[1]
				w.begin(b, three...)
				w.until(w.t + 3*time.Second)
				a.m.SetRole(a.now(w.t), false, 3, false) // it drains, and b is the first of those that stay
				b.m.SetRole(b.now(w.t), true, 0, true)
				if leaves {
					a.m.Leave(a.now(w.t))
				}
				log := w.until(w.t + 3*time.Second)
				require.Equal(t, "b", w.owners(), "%v", log)
				require.NotContains(t, fmt.Sprint(log), "and")
			}
		})
	}
}

// A process that finds the lease released has not seen its holder.
func TestAMemberThatStartsWhenNobodyHoldsTheLeaseKeepsItsPromise(t *testing.T) {
	w := fellows(0)
	w.until(60 * time.Second)
	a, b := w.nodes[0], w.nodes[1]
	b.dead, w.nodes[2].dead = true, true
	a.m.Leave(a.now(w.t))
	w.until(w.t + time.Second)
	a.dead = true
	require.Empty(t, w.rec.Holder)
	w.begin(b, three...)
	b.m.SetRole(b.now(w.t), true, 0, true)
	from := w.t
	w.until(from + 19*time.Second)
	require.Empty(t, w.owners())
	w.until(from + 22*time.Second)
	require.Equal(t, "b", w.owners())
}

func TestAnOwnerWithoutAllPledgesStopsAsBefore(t *testing.T) {
	for name, disturb := range map[string]func(w *world){
		"one is dead":       func(w *world) { w.nodes[2].dead = true },
		"one is cut off":    func(w *world) { w.nodes[2].apart = []span{{w.t, time.Hour}} },
		"one has no list":   func(w *world) { w.begin(w.nodes[2]) },
		"one has its own":   func(w *world) { w.begin(w.nodes[2], "a", "b", "c", "d") },
		"nobody has a list": func(w *world) { w.begin(w.nodes[0]); w.until(w.t + time.Minute) },
	} {
		t.Run(name, func(t *testing.T) {
			w := fellows(0)
			w.until(60 * time.Second)
			disturb(w)
			require.Equal(t, "a", w.owners())
			w.cutStore(time.Minute)
			w.until(w.t + 13*time.Second)
			require.Empty(t, w.owners())
		})
	}
}

// A promise is kept by its claim when the store is back for one side only.
func TestAPromiseIsKeptWhenTheStoreIsBackForOneSideOnly(t *testing.T) {
	for name, ttl := range stores {
		t.Run(name, func(t *testing.T) {
			w := fellows(ttl)
			w.until(60 * time.Second)
			back := w.cutStore(30 * time.Second)
			w.nodes[0].shut = []span{{w.t, time.Hour}}
			require.Empty(t, w.until(back+5*time.Minute), "b and c have the store and the promise that they gave")
			require.Equal(t, "a", w.owners())
			w.nodes[0].apart = []span{{w.t, time.Hour}}
			log := w.until(w.t + time.Minute)
			require.Equal(t, "b", w.owners(), log)
			require.Len(t, log, 2, "one stopped before the other began")
		})
	}
}

func TestANewcomerThatIsNotOnTheListNeverTakesTheLease(t *testing.T) {
	for _, list := range [][]string{nil, {"a", "b", "c", "d"}, three} {
		t.Run(fmt.Sprint(list), func(t *testing.T) {
			w := fellows(0)
			w.until(60 * time.Second)
			d := w.join("d", 1)
			w.begin(d, list...)
			for _, n := range w.nodes[:3] {
				n.dead = true
			}
			w.until(w.t + 5*time.Minute)
			require.Empty(t, w.owners())
			require.True(t, d.m.excluded())
			w.begin(w.nodes[1], "a", "b", "c", "d") // who is on both lists may take it, and names the other
			w.until(w.t + time.Minute)
			require.Equal(t, "b", w.owners())
			w.nodes[1].dead = true
			w.until(w.t + time.Minute)
			if len(list) == 4 {
				require.Equal(t, "d", w.owners())
			}
		})
	}
}

// Whose clock is told a longer lease by the holder waits as long.
func TestTheHoldersDurationIsObeyed(t *testing.T) {
	for name, ttl := range stores {
		t.Run(name, func(t *testing.T) {
			w := newWorld(ttl)
			long := w.join("us-1", 1)
			c := long.m.cfg
			c.Duration, c.RenewDeadline, c.StartDelay = 60*time.Second, 40*time.Second, 20*time.Second // it stops long after our own lease is over
			long.m = NewMachine(c)
			w.join("eu-1", 1)
			w.until(90 * time.Second)
			require.Equal(t, "us-1", w.owners())
			long.cut = []span{{w.t, time.Hour}}
			from := w.t
			log := w.until(from + 75*time.Second)
			require.Len(t, log, 1, "its lease and a third of it pass before another admits: %v", log)
			require.True(t, strings.HasSuffix(log[0], " "), "it stops first: %v", log)
			log = w.until(from + 120*time.Second)
			require.Len(t, log, 1, log)
			require.Equal(t, "eu-1", w.owners())
		})
	}
}

func TestANewLeaseStartsAboveEveryEpochThatWasSeen(t *testing.T) {
	w := newWorld(0)
	home := w.join("us-1", 1)
	eu := w.join("eu-1", 1)
	eu.m.ObserveEpoch(41)
	w.until(60 * time.Second)
	home.dead = true
	w.until(w.t + time.Minute)
	require.Equal(t, "eu-1", w.owners())
	require.EqualValues(t, 42, w.rec.Epoch)
	w.rec = Record{} // somebody deletes it
	w.until(w.t + time.Minute)
	require.Equal(t, "eu-1", w.owners())
	require.EqualValues(t, 43, w.rec.Epoch)
	eu.m.ObserveEpoch(1 << 40)
	w.rec = Record{}
	w.until(w.t + time.Minute)
	require.EqualValues(t, 44, w.rec.Epoch, "what no Lease could hold is not believed")

	w.rec.Epoch = 3 // somebody edits it
	w.begin(home)
	home.m.ObserveEpoch(eu.m.maxEpochSeen) // by its probe
	w.until(w.t + time.Minute)
	require.Equal(t, "us-1", w.owners())
	require.Greater(t, w.rec.Epoch, int64(44))
}

// The revisions of an etcd that serves a cluster, too, are higher than an epoch of a Kubernetes
// Lease may be.
func TestAnEpochThatOnlyEtcdCanCountToIsReplacedByAHigherOne(t *testing.T) {
	w := newWorld(stores["etcd"])
	n := w.join("us-1", 1)
	n.m.cfg.MaxEpoch = 1 << 62
	w.until(60 * time.Second)
	n.m.Refused(n.now(w.t), 1<<40)
	w.until(w.t + time.Second)
	require.Equal(t, "us-1", w.owners())
	require.EqualValues(t, 1<<40+1, w.rec.Epoch, "by a guard in front of an engine, after etcd has lost its data")
	n.m.ObserveEpoch(1 << 41) // by a probe
	w.rec = Record{}
	w.until(w.t + time.Minute)
	require.EqualValues(t, 1<<41+1, w.rec.Epoch)
	n.m.ObserveEpoch(1<<62 + 1)
	w.rec = Record{}
	w.until(w.t + time.Minute)
	require.EqualValues(t, 1<<41+2, w.rec.Epoch, "what leaves nothing to count with is not believed")
}

func TestAnEpochThatIsRefusedBeforeAnEngineIsReplacedByAHigherOne(t *testing.T) {
	w := newWorld(0)
	n := w.join("us-1", 1)
	w.until(60 * time.Second)
	n.m.Refused(n.now(w.t), 1)
	require.True(t, n.m.View(n.now(w.t)).Admits, "its own is refused for another reason")
	n.m.Refused(n.now(w.t), 17)
	require.False(t, n.m.View(n.now(w.t)).Admits)
	w.until(w.t + time.Second)
	require.Equal(t, "us-1", w.owners())
	require.EqualValues(t, 18, w.rec.Epoch)
	n.m.Refused(n.now(w.t), 30)
	require.True(t, n.m.View(n.now(w.t)).Admits, "whoever says that again and again cannot stop an owner")
}

func TestASlowStoreIsAway(t *testing.T) {
	m := owner(t)
	m.Renewed(seconds(2), seconds(4), nil)
	require.False(t, m.View(seconds(4)).StoreAway)
	m.Renewed(seconds(4), seconds(7), nil)
	require.True(t, m.View(seconds(7)).StoreAway)
	require.Error(t, m.GiveBack(seconds(7), 8), "nobody could take it")
	require.True(t, m.View(seconds(7)).Admits)
	m.Renewed(seconds(7), seconds(8), nil)
	require.False(t, m.View(seconds(8)).StoreAway)
	m.Renewed(seconds(9), seconds(10), errLate)
	require.True(t, m.View(seconds(10)).StoreAway)
}

// Never two admit, whatever becomes of pledges and of those who give them: they are
// lost, late, from processes that died since, from newcomers and from proxies with
// another list; the store is away for all, or for some; it loses its data, or has those of
// an earlier moment.
func TestNeverTwoAdmitByPledges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ttl := stores[rapid.SampledFrom([]string{"kubernetes", "etcd"}).Draw(t, "store")]
		w := newWorld(ttl)
		w.rng = rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		w.limbo = true
		w.late = time.Duration(rapid.SampledFrom([]int{0, 50, 1000, 4000, 12000}).Draw(t, "late ms")) * time.Millisecond
		w.lose = rapid.SampledFrom([]float64{0, 0, .1, .4}).Draw(t, "lost")
		const trouble = 200 * time.Second
		lists := [][]string{three, three, three, {"a", "b", "c", "d"}, {"a", "b"}, nil}
		list := func(of string) []string { return rapid.SampledFrom(lists).Draw(t, "list of "+of) }
		spans := func(what string, most int, longest time.Duration) (s []span) {
			for range rapid.IntRange(0, most).Draw(t, what) {
				from := time.Duration(rapid.IntRange(0, int(trouble)).Draw(t, "from"))
				s = append(s, span{from, min(trouble, from+time.Duration(rapid.IntRange(0, int(longest)).Draw(t, "for")))})
			}
			return s
		}
		all := spans("times without a store", 2, 2*time.Minute)
		same := rapid.Bool().Draw(t, "all have the same list")
		for _, id := range []string{"a", "b", "c", "d"} {
			n := w.join(id, rapid.Float64Range(1, 1.98).Draw(t, id+"'s clock"))
			n.shut = append(spans(id+" without a store", 2, time.Minute), all...)
			n.apart = spans(id+" without the others", 1, 30*time.Second)
			n.cut = spans(id+" cut off", 1, 30*time.Second)
			if same {
				w.begin(n, three...)
			} else {
				w.begin(n, list(id)...)
			}
		}
		type change struct {
			at   int
			node int
			list []string
			dies bool
			gone bool // the lease is deleted
			back bool // the store is restored from a copy
			goes bool // it leaves, as a process that drains does
			home bool // it becomes the first in order
		}
		var changes []change
		for range rapid.IntRange(0, 8).Draw(t, "changes") {
			c := change{
				at: rapid.IntRange(0, int(trouble/tickOfWorld)).Draw(t, "at"), node: rapid.IntRange(0, 3).Draw(t, "of"),
				dies: rapid.Bool().Draw(t, "dies"), gone: rapid.IntRange(0, 5).Draw(t, "deleted") == 0,
				back: rapid.IntRange(0, 5).Draw(t, "restored") == 0,
				goes: rapid.IntRange(0, 3).Draw(t, "leaves") == 0, home: rapid.IntRange(0, 3).Draw(t, "first") == 0, list: three,
			}
			if !same {
				c.list = list("it")
			}
			changes = append(changes, c)
		}
		epoch, tenure := int64(0), ""
		check := func() {
			o := w.owners()
			if strings.Contains(o, "and") {
				t.Fatalf("at %v %s admit; lease %+v", w.t, o, w.rec)
			}
			i := slices.IndexFunc(w.nodes, func(n *node) bool { return n.name == o })
			if i < 0 {
				return
			}
			e := w.nodes[i].m.epoch
			if is := fmt.Sprint(o, e); is != tenure { // later it may hear of epochs that were before
				tenure = is
				if e < epoch && w.nodes[i].m.maxEpochSeen >= epoch {
					t.Fatalf("at %v %s admits with epoch %d and knows of %d", w.t, o, e, w.nodes[i].m.maxEpochSeen)
				}
			}
			epoch = max(epoch, e)
		}
		for w.t < trouble {
			for _, c := range changes {
				switch n := w.nodes[c.node]; {
				case c.at != int(w.t/tickOfWorld):
				case c.gone:
					w.rec = Record{}
				case c.back:
					w.restore(w.rng.Float64())
				case c.home:
					w.favour(c.node)
				case c.goes:
					n.m.Leave(n.now(w.t))
				case c.dies:
					n.dead = true
				default:
					w.begin(n, c.list...)
				}
			}
			w.step()
			check()
		}
		w.late, w.lose = 100*time.Millisecond, 0
		w.favour(0)
		for i, n := range w.nodes[:3] {
			if same && (n.dead || n.m.stopping || i == 0 && w.rec.Holder == "") {
				w.begin(n, three...)
			}
		}
		for w.t < trouble+3*time.Minute {
			w.probe()
			w.step()
			check()
		}
		if o := w.owners(); same && o != "a" {
			t.Fatalf("in the end %q owns the scope; lease %+v; %+v", o, w.rec, w.nodes[0].m.View(w.nodes[0].now(w.t)))
		}
	})
}

// Pledges prolong, and bring nothing back that is over: others may have promised
// something else since.
func TestPledgesDoNotBringBackWhatIsOver(t *testing.T) {
	m := owner(t)
	m.cfg.Members = []string{"eu-1", "us-1"}
	_, ok := m.AskVotes(seconds(3))
	require.False(t, ok, "the store has confirmed a renewal just now")
	_, ok = m.AskVotes(seconds(5))
	require.True(t, ok)
	_, ok = m.AskVotes(seconds(6))
	require.False(t, ok, "once per retry")
	m.RecordVote(seconds(5), seconds(6), "eu-1", 8)
	require.True(t, m.View(seconds(14)).Voted)
	require.False(t, m.View(seconds(15)).Admits)
	m.RecordVote(seconds(14), seconds(15), "eu-1", 8)
	require.False(t, m.View(seconds(15)).Admits, "it came too late")
	_, ok = m.AskVotes(seconds(16))
	require.False(t, ok)
	m.Renewed(seconds(16), seconds(16), nil)
	require.True(t, m.View(seconds(16)).Admits)
	require.NoError(t, m.GiveBack(seconds(17), 8))
	m.RecordVote(seconds(16), seconds(17), "eu-1", 8)
	require.False(t, m.View(seconds(18)).Admits, "a release may still come to pass")
}
