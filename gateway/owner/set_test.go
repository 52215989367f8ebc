package owner

import (
	"context"
	"errors"
	"maps"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/geo"
	"evenkeel/lease"
)

// lent is a lease that can be taken away.
type lent struct {
	free
	mu    sync.Mutex
	away  bool
	epoch int64
}

func (l *lent) set(away bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.away = away
}

func (l *lent) Look(context.Context) (lease.Record, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	epoch := max(1, l.epoch)
	return lease.Record{Epoch: epoch, Stamp: strconv.FormatInt(epoch, 10)}, nil
}

func (l *lent) Acquire(_ context.Context, above int64) (lease.Record, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.epoch = above + 1
	return lease.Record{Holder: "us-1_x", Epoch: l.epoch, Stamp: "b"}, nil
}

func (l *lent) Renew(ctx context.Context, _ int64) error {
	l.mu.Lock()
	away := l.away
	l.mu.Unlock()
	if away {
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

// setOf is a Set with one scope that a lease gives us.
func setOf(t *testing.T, kind Kind, store lease.Engine) (*Set, *Scope) {
	s := &Set{
		kind: kind, conf: config.Default(), log: zap.NewNop(), region: "us", ctx: t.Context(), times: lease.DefaultTimes,
		checkNow: make(chan struct{}, 1), lost: make(chan struct{}), claimFailures: map[string]claimFailure{}, leavingScopes: map[string]*Scope{},
		deps: Deps{Publish: func(context.Context) {}, KVHoldTimeout: func() time.Duration { return time.Minute },
			Engines: func() map[string]EngineCounts { return map[string]EngineCounts{"us": {1, 1}} }},
	}
	s.metrics = newMetrics(s)
	a := s.newScope("us")
	a.home = true
	a.Claim(lease.Config{Self: "us-1_x", Home: true, Times: lease.DefaultTimes}, store,
		lease.Hooks{OnChange: func(v lease.View) { s.applyView(a, v) }}, zap.NewNop())
	s.all.Store(&map[string]*Scope{"us": a})
	return s, a
}

// A region is fenced as a decode group is: who stood still writes nothing to its
// engines, what has entered is written before the region goes, and every request
// carries the epoch of its owner.
func TestEveryKindOfAreaIsFencedAtTheWrite(t *testing.T) {
	for _, kind := range []Kind{Regions, Groups} {
		t.Run(string(kind), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, a := setOf(t, kind, &lent{})
				_, ok := a.Enter()
				require.False(t, ok, "it is not ours yet")
				lost := s.Losses()
				ctx, freeze := context.WithCancel(t.Context())
				var running sync.WaitGroup
				running.Go(func() { a.claim.Run(ctx) })
				synctest.Wait()
				freeze()
				running.Wait()
				written, ok := a.Enter()
				require.True(t, ok)
				require.Equal(t, []engine.Header{{Name: EpochHeader, Value: "2"}}, a.AppendEpochHeader(nil))
				time.Sleep(25 * time.Second)
				require.True(t, s.Admits("us"), "nobody could tell")
				require.ErrorIs(t, a.CheckOwned(), ErrNotOwner)

				go func() {
					time.Sleep(writeTimeout / 2)
					written()
				}()
				began := time.Now()
				s.applyView(a, lease.View{Phase: lease.Fenced, Epoch: 2})
				require.Equal(t, writeTimeout/2, time.Since(began).Truncate(10*time.Millisecond), "what had entered is written first")
				<-lost
				require.False(t, s.Admits("us"))
			})
		})
	}
}

// A group that comes back with the epoch that it had was nobody else's: that is no
// takeover.
func TestOnlyANewEpochIsATakeover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &lent{}
		s, a := setOf(t, Groups, store)
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		a.ownerLastSeen = time.Now().Add(-3 * time.Second)
		running.Go(func() { a.claim.Run(ctx) })
		synctest.Wait()
		require.True(t, a.Admits())
		require.EqualValues(t, 1, testutil.ToFloat64(s.metrics.takeovers))
		adopted := a.ownedSince
		store.set(true)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		require.False(t, a.Admits())
		require.Zero(t, a.ownedSince)
		store.set(false)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.True(t, a.Admits())
		require.EqualValues(t, 1, testutil.ToFloat64(s.metrics.takeovers))
		require.Equal(t, adopted, a.ownedSince, "others' requests have run out since the takeover")
		a.RecordRefusal("17") // by what stands in front of an engine
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.True(t, a.Admits())
		require.EqualValues(t, 2, testutil.ToFloat64(s.metrics.takeovers))
		require.Equal(t, []engine.Header{{Name: EpochHeader, Value: "18"}}, a.AppendEpochHeader(nil))
		require.Equal(t, int64(18), s.Tenure().Seen["us"], "peers are told")
		reg := prometheus.NewPedanticRegistry()
		require.NoError(t, reg.Register(s.metrics))
		require.NoError(t, testutil.GatherAndCompare(reg, strings.NewReader(`
# HELP evenkeel_ha_lease_store_away 1 while the store of the lease fails, or answers too slowly for an owner to renew in time.
# TYPE evenkeel_ha_lease_store_away gauge
evenkeel_ha_lease_store_away{group="us"} 0
# HELP evenkeel_ha_pledged 1 while this proxy admits requests only because all other members have promised not to take over (ha.members), and the store of the lease confirms nothing.
# TYPE evenkeel_ha_pledged gauge
evenkeel_ha_pledged{group="us"} 0
`), "evenkeel_ha_lease_store_away", "evenkeel_ha_pledged"))
		stop()
		running.Wait()
	})
}

// What a peer has seen of a scope's epochs counts, whether it owns the scope or not: who
// takes it next has a higher one, also where the store has forgotten all of them.
func TestTheNextEpochIsAboveWhatAPeerHasSeen(t *testing.T) {
	for _, kind := range []Kind{Regions, Groups} {
		t.Run(string(kind), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, a := setOf(t, kind, &lent{})
				if s.succession = (&siblings{set: s}); kind == Regions {
					s.succession = &neighbours{set: s}
				}
				s.OnProbe(geo.ProbeReport{Peer: "us-2", Region: "us", Tenure: geo.Tenure{Seen: map[string]int64{"us": 41, "other": 99}}})
				s.OnProbe(geo.ProbeReport{Peer: "us-3", Region: "us", Tenure: geo.Tenure{Seen: map[string]int64{"us": 7}}})
				if kind == Groups {
					// of a group there that has this name
					s.OnProbe(geo.ProbeReport{Peer: "eu-1", Region: "eu", Tenure: geo.Tenure{Seen: map[string]int64{"us": 77}}})
				}
				require.EqualValues(t, 41, a.claim.Seen())
				ctx, stop := context.WithCancel(t.Context())
				var running sync.WaitGroup
				running.Go(func() { a.claim.Run(ctx) })
				time.Sleep(2*s.times.Duration + s.times.StartDelay - time.Second)
				require.False(t, a.Admits(), "whoever holds epoch 41 may have renewed it a moment before the store forgot it")
				time.Sleep(2 * time.Second)
				require.True(t, a.Admits())
				require.Equal(t, []engine.Header{{Name: EpochHeader, Value: "42"}}, a.AppendEpochHeader(nil))
				stop()
				running.Wait()
			})
		})
	}
}

// Where nobody owns anything and the store of leases is away, a proxy says so and is
// not ready.
func TestAProxyWithoutOwnersAndStoreIsNotReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &lent{}
		s, a := setOf(t, Groups, store)
		require.Contains(t, s.UnreadyReason(time.Now()), "no proxy owns a decode group yet")
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { a.claim.Run(ctx) })
		synctest.Wait()
		require.Empty(t, s.UnreadyReason(time.Now()))
		store.set(true)
		time.Sleep(20 * time.Second)
		require.Contains(t, s.UnreadyReason(time.Now()), "the store of leases does not answer")
		require.True(t, a.view.Load().StoreAway)
		s.succession = &siblings{set: s}
		s.OnProbe(geo.ProbeReport{Peer: "us-2", Region: "us", Tenure: geo.Tenure{Groups: map[string]int64{"us": 2}}})
		require.Empty(t, s.UnreadyReason(time.Now()), "another owns it")
		s.all.Store(&map[string]*Scope{})
		require.Empty(t, s.UnreadyReason(time.Now()), "there are no engines, which is said elsewhere")
		stop()
		running.Wait()
	})
}

// listed is a lease of another proxy, which has listed the members that may take it.
type listed struct {
	free
	members []string
}

func (l *listed) Look(context.Context) (lease.Record, error) {
	return lease.Record{Holder: "us-2_y", Epoch: 3, Stamp: "a", Members: l.members}, nil
}

// A proxy that was added to the config is not on the lease's list before its holder has the new
// one, too.
func TestTheOrderOfAGroupLeavesOutWhomTheLeaseDoesNotList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, a := setOf(t, Groups, &listed{members: []string{"us-1", "us-2"}})
		o := &siblings{set: s, live: lease.NewMembers("us-1", false, time.Minute)}
		o.live.See([]string{"us-0", "us-1", "us-2"}, time.Now())
		require.Equal(t, []string{"us-0", "us-1", "us-2"}, o.ownerOrder(a), "it has not been read yet")
		a.claim.SetRole(false, 1, true)
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { a.claim.Run(ctx) })
		synctest.Wait()
		require.Equal(t, []string{"us-1", "us-2"}, o.ownerOrder(a))
		require.Equal(t, []string{"us-0", "us-1", "us-2"}, o.liveMembers())
		reg := prometheus.NewPedanticRegistry()
		require.NoError(t, reg.Register(s.metrics))
		require.NoError(t, testutil.GatherAndCompare(reg, strings.NewReader(`
# HELP evenkeel_ha_members_differ 1 while the holder of the decode group's lease has another list in ha.members than this proxy. While that is so, no owner goes on when the store of the lease is away.
# TYPE evenkeel_ha_members_differ gauge
evenkeel_ha_members_differ{group="us"} 1
`), "evenkeel_ha_members_differ"), "we have no list")
		s.configMembers = []string{"us-1"}
		require.Equal(t, []string{"us-1"}, o.ownerOrder(a), "nor whom our own list leaves out")
		stop()
		running.Wait()
	})
}

// Pledges are given by members to members, and to nobody in another's name.
func TestPromisesAreForWhoAsksInItsOwnName(t *testing.T) {
	s, a := setOf(t, Groups, &lent{})
	list := []string{"us-1", "us-2"}
	a.Claim(lease.Config{Self: "us-1_x", Times: lease.DefaultTimes, Members: list}, &lent{}, lease.Hooks{OnChange: func(lease.View) {}},
		zap.NewNop())
	ask := geo.Vote{Region: "us", Group: "us", Vote: lease.Vote{Holder: "us-2_y", Epoch: 3, Members: list}}
	require.NoError(t, s.Promise("us-2", ask))
	require.ErrorIs(t, s.Promise("us-3", ask), lease.ErrNoVote)
	ask.Members = list[:1]
	require.ErrorIs(t, s.Promise("us-2", ask), lease.ErrNoVote)
	ask.Group = "other"
	require.ErrorIs(t, s.Promise("us-2", ask), lease.ErrNoVote)
	var alone *Set
	require.Error(t, alone.Promise("us-2", ask))
}

// kept is a lease as a store keeps it, whose holder cannot always give it back.
type kept struct {
	mu     sync.Mutex
	rec    lease.Record
	writes int
	stuck  bool
}

func (k *kept) write(holder string, epoch int64) lease.Record {
	k.writes++
	k.rec = lease.Record{Holder: holder, Epoch: epoch, Stamp: strconv.Itoa(k.writes)}
	return k.rec
}

func (k *kept) Look(context.Context) (lease.Record, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.rec, nil
}

func (k *kept) Acquire(_ context.Context, above int64) (lease.Record, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.write("us-1_x", above+1), nil
}

func (k *kept) Renew(_ context.Context, epoch int64) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.rec.Holder == "" || k.rec.Epoch != epoch {
		return lease.ErrLost
	}
	k.write("us-1_x", epoch)
	return nil
}

func (k *kept) Release(_ context.Context, epoch int64) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.stuck {
		return errors.New("conflict")
	}
	k.write("", epoch)
	return nil
}

type alwaysOurs struct{ succession }

func (alwaysOurs) updateClaims(all map[string]*Scope, _ map[string]EngineCounts, _ time.Time) {
	for _, a := range all {
		a.claim.SetRole(true, 0, true)
	}
}

// heir is an order in which another proxy may stand.
type heir struct {
	succession
	lives atomic.Bool
}

func (h *heir) hasSuccessor(*Scope) bool { return h.lives.Load() }

func (h *heir) checkHandBack(*Scope, string, geo.HandBack) error { return nil }

// A proxy that asks for a scope once more, before its first question is answered, ends nothing: no
// request begins until both are.
func TestNoRequestBeginsWhileAScopeIsAskedFor(t *testing.T) {
	s, a := setOf(t, Regions, &lent{})
	s.succession = &heir{}
	a.view.Store(&lease.View{Admits: true})
	require.True(t, a.AcceptsNew())
	ask := geo.HandBack{Region: "us"}
	_, first, err := s.AllowHandBack("eu-1", ask)
	require.NoError(t, err)
	_, second, err := s.AllowHandBack("eu-1", ask)
	require.NoError(t, err)
	first()
	require.False(t, a.AcceptsNew())
	second()
	require.True(t, a.AcceptsNew())
}

// An owner that drains waits for a proxy that could own its scopes, but not for ever.
func TestAnOwnerThatDrainsWaitsForTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, a := setOf(t, Groups, &lent{})
		next := &heir{}
		s.succession, s.deps.Leaving = next, func() bool { return true }
		owns := func(admits, away bool) { a.view.Store(&lease.View{Admits: admits, StoreAway: away}) }
		waits := func() time.Duration {
			begun := time.Now()
			s.HandOver(t.Context())
			require.False(t, s.HandingOver())
			return time.Since(begun)
		}
		owns(true, false)
		require.Zero(t, waits(), "nobody else is there")
		next.lives.Store(true)
		owns(true, true)
		require.Zero(t, waits(), "nobody reaches the store")
		owns(true, false)
		time.AfterFunc(4*time.Second+checkEvery/2, func() {
			if !s.HandingOver() {
				t.Error("what others forward is not served any more")
			}
			owns(false, false)
		})
		require.Equal(t, 4*time.Second+checkEvery, waits(), "until it has been taken")
		owns(true, false)
		require.Equal(t, 30*time.Second, waits(), "a process that starts now may admit after 20 s, if it could at all")
		s.deps.Leaving = func() bool { return false }
		require.Zero(t, waits(), "nobody was told that it leaves")
	})
}

func TestTheStoreSaysHowHighEpochsMayBe(t *testing.T) {
	for store, most := range map[string]int64{geo.OwnKubernetes: 1 << 30, geo.OwnEtcd: 1 << 62} {
		s, a := setOf(t, Groups, &lent{})
		s.leases = &leases{store: store, identity: "us-1_x"}
		s.openLease = func(string) (lease.Engine, error) { return &lent{}, nil }
		require.NoError(t, s.openClaim(a, 0))
		a.claim.ObserveEpoch(most + 1)
		require.Zero(t, a.claim.Seen(), store)
		a.claim.ObserveEpoch(most)
		require.Equal(t, most, a.claim.Seen(), store)
	}
}

// A group whose engines vanish and come back is claimed anew once the claim before has
// let go of it: the release of one must not be that of what the other admits to.
func TestAGroupThatComesBackHasOneClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &kept{rec: lease.Record{Epoch: 1, Stamp: "a"}}
		s, _ := setOf(t, Groups, store)
		ctx, stop := context.WithCancel(t.Context())
		s.ctx = ctx
		s.all.Store(&map[string]*Scope{})
		s.succession, s.leases = alwaysOurs{}, &leases{identity: "us-1_x"}
		s.openLease = func(string) (lease.Engine, error) { return store, nil }
		var gone atomic.Bool
		s.deps.Engines = func() map[string]EngineCounts {
			if gone.Load() {
				return nil
			}
			return map[string]EngineCounts{"g": {1, 1}}
		}
		s.deps.Load = func(context.Context, string, bool) (ours, all []geo.Resident, silent []string) { return nil, nil, nil }
		var running sync.WaitGroup
		running.Go(func() { s.Run(ctx) })
		sound := func(within time.Duration) {
			for range within / (100 * time.Millisecond) {
				time.Sleep(100 * time.Millisecond)
				store.mu.Lock()
				holder := store.rec.Holder
				store.mu.Unlock()
				require.False(t, s.Admits("g") && holder == "", "it was released, and another may admit")
			}
		}
		sound(time.Second)
		require.True(t, s.Admits("g"))
		store.set(true)
		gone.Store(true)
		sound(time.Second)
		gone.Store(false)
		sound(10 * time.Second)
		store.set(false)
		sound(10 * time.Second)
		require.True(t, s.Admits("g"))
		stop()
		running.Wait()
	})
}

func (k *kept) set(stuck bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stuck = stuck
}

// A group whose lease cannot be opened is tried less and less often, as long as nothing has
// happened that could change the answer.
func TestAGroupThatCannotBeClaimedIsTriedLessOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _ := setOf(t, Groups, &lent{})
		core, logs := observer.New(zap.ErrorLevel)
		ctx, stop := context.WithCancel(t.Context())
		s.ctx, s.log = ctx, zap.New(core)
		s.all.Store(&map[string]*Scope{})
		s.succession, s.leases = alwaysOurs{}, &leases{identity: "us-1_x"}
		s.deps.Load = func(context.Context, string, bool) (ours, all []geo.Resident, silent []string) { return nil, nil, nil }
		var mu sync.Mutex
		groups := map[string]EngineCounts{"g": {1, 1}}
		broken := true
		var tries []time.Time // of g
		s.deps.Engines = func() map[string]EngineCounts {
			mu.Lock()
			defer mu.Unlock()
			return maps.Clone(groups)
		}
		s.openLease = func(name string) (lease.Engine, error) {
			mu.Lock()
			defer mu.Unlock()
			if name == "g" {
				tries = append(tries, time.Now())
			}
			if broken {
				return nil, errors.New("no such file")
			}
			return &kept{rec: lease.Record{Epoch: 1, Stamp: "a"}}, nil
		}
		change := func(f func()) {
			mu.Lock()
			defer mu.Unlock()
			f()
		}
		pauses := func() (list []time.Duration) {
			change(func() {
				for i := range tries[1:] {
					list = append(list, tries[i+1].Sub(tries[i]))
				}
			})
			return list
		}
		var running sync.WaitGroup
		running.Go(func() { s.Run(ctx) })
		time.Sleep(50*time.Second + checkEvery/2) // between two looks
		most := s.times.Duration
		require.Equal(t,
			[]time.Duration{checkEvery, 2 * checkEvery, 4 * checkEvery, 8 * checkEvery, 16 * checkEvery, 32 * checkEvery, most, most}, pauses())
		require.Equal(t, 1, logs.Len(), "the same is said once")

		change(func() { delete(groups, "g") })
		time.Sleep(2 * checkEvery)
		change(func() { groups["g"], tries = EngineCounts{1, 1}, nil })
		time.Sleep(checkEvery)
		change(func() { require.Len(t, tries, 1, "its engines have come back") })

		time.Sleep(50 * time.Second) // the pauses are long again
		change(func() { groups["h"], broken, tries = EngineCounts{1, 1}, false, nil })
		time.Sleep(3 * checkEvery)
		change(func() { require.Len(t, tries, 1, "another group could be claimed") })
		require.NotNil(t, s.Scope("g"))
		stop()
		running.Wait()
	})
}
