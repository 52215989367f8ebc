package lease

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var stores = map[string]time.Duration{"kubernetes": 0, "etcd": 15 * time.Second}

func TestDeadOwnersAreaIsTakenAndHandedBack(t *testing.T) {
	for name, ttl := range stores {
		t.Run(name, func(t *testing.T) {
			w := newWorld(ttl)
			home := w.join("us-1", 1)
			w.join("eu-1", 1)
			w.join("asia-1", 1)
			w.until(60 * time.Second)
			require.Equal(t, "us-1", w.owners())
			require.EqualValues(t, int64(1), w.rec.Epoch)

			cut := w.t
			home.cut = []span{{cut, cut + 60*time.Second}}
			w.until(cut + 10*time.Second)
			require.Empty(t, w.owners(), "the owner has stopped at 10 s at the latest")
			require.Equal(t, Fenced, home.m.View(home.now(w.t)).Phase)
			w.until(cut + 18*time.Second)
			require.Empty(t, w.owners(), "nobody starts before the lease has expired and the delay is over")
			require.Equal(t, "eu-1_b", w.rec.Holder, "the lease is free at 15 s, and the first in order takes it")
			w.until(cut + 23*time.Second)
			require.Equal(t, "eu-1", w.owners())
			require.EqualValues(t, 2, w.rec.Epoch)

			back := w.until(cut + 90*time.Second)
			require.Equal(t, "us-1", w.owners())
			require.EqualValues(t, 3, w.rec.Epoch)
			require.Len(t, back, 2, "one stops before the other starts: %v", back)
			require.True(t, strings.HasSuffix(back[0], " "), back)
		})
	}
}

func TestSecondInOrderTakesWhatTheFirstLeaves(t *testing.T) {
	w := newWorld(0)
	home, first := w.join("us-1", 1), w.join("eu-1", 1)
	w.join("asia-1", 1)
	w.until(60 * time.Second)
	first.m.canServe = false // it reaches too few engines
	home.cut = []span{{w.t, time.Hour}}
	from := w.t
	w.until(from + 19*time.Second)
	require.Empty(t, w.owners())
	w.until(from + 25*time.Second)
	require.Equal(t, "asia-1", w.owners(), "rank 1 waits 5 s more for the lease, and then no longer")
}

func TestReleasedAreaGoesToItsHomeAtOnceAndElseToTheOrder(t *testing.T) {
	w := newWorld(0)
	home := w.join("us-1", 1)
	w.join("eu-1", 1)
	w.until(60 * time.Second)
	from := w.t
	home.m.Leave(home.now(w.t))
	require.Empty(t, w.owners())
	log := w.until(from + 15*time.Second)
	require.Len(t, log, 1, "%v", log)
	require.Equal(t, "eu-1", w.owners(), "a clean release needs no delay of safety, only the home's turn")
}

func TestHandBackThatCannotBeReleasedLeavesTheHolderOwner(t *testing.T) {
	w := newWorld(0)
	w.join("us-1", 1)
	n := w.nodes[0]
	w.until(60 * time.Second)
	now := n.now(w.t)
	require.ErrorIs(t, n.m.GiveBack(now, 7), ErrNotHolder)
	require.NoError(t, n.m.GiveBack(now, 1))
	require.False(t, n.m.View(now).Admits, "stops before it answers")
	w.deny = Release
	w.until(w.t + 9*time.Second)
	require.Empty(t, w.owners())
	w.until(w.t + 4*time.Second)
	require.Equal(t, Owner, n.m.View(n.now(w.t)).Phase)
	require.EqualValues(t, int64(1), w.rec.Epoch)
}

func TestHigherEpochStopsAtOnceUntilItIsProvenFalse(t *testing.T) {
	w := newWorld(0)
	n := w.join("us-1", 1)
	w.until(60 * time.Second)
	now := n.now(w.t)
	n.m.ObserveRivalEpoch(now, 1)
	require.True(t, n.m.View(now).Admits, "its own epoch")
	n.m.ObserveRivalEpoch(now, 9)
	require.False(t, n.m.View(now).Admits)
	n.m.Renewed(now.Add(-1), now, nil)
	require.False(t, n.m.View(now).Admits, "a renewal that was sent before proves nothing")
	w.until(w.t + time.Second)
	require.Equal(t, "us-1", w.owners(), "the store knows of no epoch 9")
	now = n.now(w.t)
	n.m.ObserveRivalEpoch(now, 9)
	require.True(t, n.m.View(now).Admits, "a false word is not believed twice")
}

func TestALeaseThatIsDeletedBeforeItWasSeenMakesNoSecondOwner(t *testing.T) {
	for name, ttl := range stores {
		t.Run(name, func(t *testing.T) {
			for deleted := range 60 { // half a second each
				w := newWorld(ttl)
				home, next := w.join("us-1", 1), w.join("eu-1", 1)
				at := time.Duration(deleted) * time.Second / 2
				next.shut = []span{{at - 2*time.Second, at}}
				for w.t < 2*time.Minute {
					if w.t == at {
						w.rec = Record{}
						home.shut = []span{{at, at + 20*time.Second}} // and does not hear of it
					}
					w.step()
					require.NotContains(t, w.owners(), "and", "at %v, deleted at %v", w.t, at)
				}
				require.Equal(t, "us-1", w.owners())
			}
		})
	}
}

func TestAReleaseThatTheStoreRemembersFromEarlierIsNotBelieved(t *testing.T) {
	for name, ttl := range stores {
		t.Run(name, func(t *testing.T) {
			w := newWorld(ttl)
			home, owner := w.join("us-1", 1), w.join("eu-1", 1)
			w.until(60 * time.Second)
			home.m.Leave(home.now(w.t))
			w.until(w.t + 5*time.Second)
			free := w.rec
			require.Empty(t, free.Holder)
			w.until(w.t + time.Minute)
			require.Equal(t, "eu-1", w.owners())
			w.deny = AskBack // the holder does not hear it
			w.begin(home)
			home.m.ObserveEpoch(owner.m.maxEpochSeen) // but its probes are answered
			w.until(w.t + time.Minute)
			require.Equal(t, "eu-1", w.owners())
			w.rec = free
			owner.shut = []span{{w.t, w.t + 30*time.Second}} // and does not hear of it
			for end := w.t + 2*time.Minute; w.t < end; {
				w.step()
				require.NotContains(t, w.owners(), "and")
			}
			require.Equal(t, "us-1", w.owners())
			require.Greater(t, w.rec.Epoch, owner.m.epoch)
		})
	}
}

func TestALeaseThatWasDeletedIsNotReleasedTooEarly(t *testing.T) {
	for name, ttl := range stores {
		t.Run(name, func(t *testing.T) {
			w := newWorld(ttl)
			home, owner := w.join("us-1", 1), w.join("eu-1", 1)
			home.dead = true
			w.until(60 * time.Second)
			require.Equal(t, "eu-1", w.owners())
			w.rec = Record{}
			owner.shut = []span{{w.t, w.t + 30*time.Second}} // it does not hear of it
			for n := range 8 {                               // processes of the home, each ended soon
				w.begin(home)
				home.m.canServe = true
				for end := w.t + time.Duration(n)*500*time.Millisecond; w.t < end; {
					w.step()
					require.NotContains(t, w.owners(), "and")
				}
				home.m.Leave(home.now(w.t))
				for end := w.t + time.Second; w.t < end; {
					w.step()
					require.NotContains(t, w.owners(), "and")
				}
			}
			w.begin(home)
			for end := w.t + 2*time.Minute; w.t < end; {
				w.step()
				require.NotContains(t, w.owners(), "and")
			}
			require.Equal(t, "us-1", w.owners())
		})
	}
}

func TestNeverTwoAdmit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ttl := stores[rapid.SampledFrom([]string{"kubernetes", "etcd"}).Draw(t, "store")]
		w := newWorld(ttl)
		w.rng = rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		w.limbo = true
		w.late = time.Duration(rapid.IntRange(0, 8000).Draw(t, "late ms")) * time.Millisecond
		w.lose = rapid.Float64Range(0, .5).Draw(t, "lost")
		const trouble = 150 * time.Second
		for _, name := range []string{"us-1", "eu-1", "asia-1"} {
			n := w.join(name, rapid.Float64Range(1, 1.98).Draw(t, name+"'s clock")) // the store's runs at 1
			for range rapid.IntRange(0, 3).Draw(t, "partitions of "+name) {
				from := time.Duration(rapid.IntRange(0, int(trouble)).Draw(t, "from"))
				n.cut = append(n.cut, span{from, min(trouble, from+time.Duration(rapid.IntRange(0, int(60*time.Second)).Draw(t, "for")))})
			}
		}
		restores := rapid.SliceOfN(rapid.IntRange(0, int(trouble/tickOfWorld)), 0, 3).Draw(t, "restored at")
		claims := rapid.SliceOfN(rapid.IntRange(0, int(trouble/tickOfWorld)), 0, 4).Draw(t, "false epochs at")
		admitted := false
		for w.t < trouble {
			if slices.Contains(claims, int(w.t/tickOfWorld)) {
				for _, n := range w.nodes {
					n.m.ObserveRivalEpoch(n.now(w.t), int64(w.rng.IntN(20)))
				}
			}
			if slices.Contains(restores, int(w.t/tickOfWorld)) {
				w.restore(w.rng.Float64())
			}
			w.step()
			if o := w.owners(); strings.Contains(o, "and") {
				t.Fatalf("at %v %s admit, epoch %d", w.t, o, w.rec.Epoch)
			} else if o != "" {
				admitted = true
			}
		}
		w.late, w.lose = 100*time.Millisecond, 0
		for w.t < trouble+3*time.Minute {
			w.probe()
			w.step()
			if o := w.owners(); strings.Contains(o, "and") {
				t.Fatalf("at %v %s admit, epoch %d", w.t, o, w.rec.Epoch)
			}
		}
		if o := w.owners(); o != "us-1" {
			t.Fatalf("in the end %q owns the scope (somebody did before: %v); lease %+v; %+v", o, admitted, w.rec,
				w.nodes[0].m.View(w.nodes[0].now(w.t)))
		}
	})
}

func TestClocksThatDifferByMoreThanTwiceMakeTwoOwners(t *testing.T) {
	w := newWorld(0)
	home := w.join("us-1", 1)
	w.join("eu-1", 3)
	w.until(60 * time.Second)
	home.cut = []span{{w.t, time.Hour}}
	both := false
	for to := w.t + 20*time.Second; w.t < to; {
		w.step()
		both = both || strings.Contains(w.owners(), "and")
	}
	require.True(t, both, "if this holds no more, say so in docs/fleet.md")
}
