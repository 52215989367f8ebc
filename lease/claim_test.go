package lease

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest"
	"go.uber.org/zap/zaptest/observer"
)

var errLate = errors.New("no answer in time")

// shelf is a store of one lease in memory.
type shelf struct {
	mu    sync.Mutex
	rec   Record
	write int
}

// hand is the engine of one who shares a shelf.
type hand struct {
	*shelf
	self string
	seen string
	cut  bool
	late time.Duration // every answer
}

func (h *hand) do(ctx context.Context, f func() error) error {
	h.mu.Lock()
	cut, late := h.cut, h.late
	h.mu.Unlock()
	time.Sleep(late)
	if cut { // it hangs
		<-ctx.Done()
		return ctx.Err()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return f()
}

func (h *hand) put(holder string, epoch int64) {
	h.write++
	h.rec = Record{Holder: holder, Epoch: epoch, Stamp: string(rune('a' + h.write%26))}
	h.seen = h.rec.Stamp
}

func (h *hand) Look(ctx context.Context) (r Record, err error) {
	err = h.do(ctx, func() error {
		r, h.seen = h.rec, h.rec.Stamp
		return nil
	})
	return r, err
}

func (h *hand) Acquire(ctx context.Context, above int64) (r Record, err error) {
	err = h.do(ctx, func() error {
		if h.seen != h.rec.Stamp {
			return ErrTaken
		}
		h.put(h.self, max(h.rec.Epoch, above)+1)
		r = h.rec
		return nil
	})
	return r, err
}

func (h *hand) Renew(ctx context.Context, epoch int64) error {
	return h.keep(ctx, epoch, h.self)
}

func (h *hand) Release(ctx context.Context, epoch int64) error {
	return h.keep(ctx, epoch, "")
}

func (h *hand) keep(ctx context.Context, epoch int64, holder string) error {
	return h.do(ctx, func() error {
		if h.rec.Holder != h.self || h.rec.Epoch != epoch {
			return ErrLost
		}
		h.put(holder, epoch)
		return nil
	})
}

// desk is a proxy with a claim.
type desk struct {
	*Claim
	hand *hand
	mu   sync.Mutex
	view View
}

func (d *desk) admits() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.view.Admits
}

func (d *desk) cutOff(cut bool) {
	d.hand.mu.Lock()
	defer d.hand.mu.Unlock()
	d.hand.cut = cut
}

func (d *desk) slow(by time.Duration) {
	d.hand.mu.Lock()
	defer d.hand.mu.Unlock()
	d.hand.late = by
}

// Claims against one store: the owner is cut off, is fenced by its own timer
// though its call hangs, another takes over, gives back when asked, and the
// lease is released at the end.
func TestClaimsTakeOverAndGiveBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &shelf{rec: Record{Epoch: 6, Stamp: "z"}}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		desks := map[string]*desk{}
		var mu sync.Mutex
		both, admitting := false, map[string]bool{}
		var running sync.WaitGroup
		join := func(id string, home bool) *desk {
			d := &desk{hand: &hand{shelf: s, self: Identity(id, "x")}}
			d.Claim = NewClaim(Config{Self: d.hand.self, Home: home, Times: DefaultTimes}, d.hand, Hooks{
				OnChange: func(v View) {
					d.mu.Lock()
					d.view = v
					d.mu.Unlock()
					mu.Lock()
					defer mu.Unlock()
					delete(admitting, id)
					if v.Admits {
						admitting[id] = true
					}
					both = both || len(admitting) > 1
				},
				AskBack: func(_ context.Context, holder string, epoch int64) error {
					return desks[holder].GiveBack(epoch, func() { require.False(t, desks[holder].admits(), "it has stopped before it answers") })
				},
			}, zaptest.NewLogger(t))
			desks[id] = d
			running.Go(func() { d.Run(ctx) })
			return d
		}
		us := join("us-1", true)
		synctest.Wait()
		require.True(t, us.admits(), "it was given back to nobody: its home takes it at once")
		eu := join("eu-1", false)
		eu.SetRole(false, 0, true)
		time.Sleep(30 * time.Second)

		us.cutOff(true)
		time.Sleep(10*time.Second + time.Millisecond)
		require.False(t, us.admits())
		time.Sleep(13 * time.Second)
		require.True(t, eu.admits())
		require.EqualValues(t, 8, eu.View().Epoch)
		us.cutOff(false)
		time.Sleep(8 * time.Second)
		require.True(t, us.admits(), "handed back")
		require.EqualValues(t, 9, us.View().Epoch)
		us.ObserveRivalEpoch(12)
		time.Sleep(time.Second)
		require.True(t, us.admits())
		us.Leave(ctx)
		require.Empty(t, s.rec.Holder)
		require.False(t, both, "two admitted")
		stop()
		running.Wait()
	})
}

// A holder that is asked for the scope and hangs delays no look at the lease, so
// the scope is taken when the lease ends.
func TestAHolderThatHangsDelaysNoLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		s := &shelf{rec: Record{Holder: Identity("eu-1", "x"), Epoch: 6, Stamp: "z"}}
		d := &desk{hand: &hand{shelf: s, self: Identity("us-1", "x")}}
		var asked atomic.Int32
		d.Claim = NewClaim(Config{Self: d.hand.self, Home: true, Times: DefaultTimes}, d.hand, Hooks{
			OnChange: func(View) {},
			AskBack: func(ctx context.Context, _ string, _ int64) error {
				asked.Add(1)
				<-ctx.Done()
				return ctx.Err()
			},
		}, zap.NewNop())
		var running sync.WaitGroup
		running.Go(func() { d.Run(ctx) })
		time.Sleep(time.Second)
		require.EqualValues(t, 1, asked.Load(), "it is being asked")
		s.mu.Lock()
		(&hand{shelf: s}).put(Identity("eu-1", "x"), 6) // the holder renews once more, and then no more
		s.mu.Unlock()
		time.Sleep(DefaultTimes.Retry + time.Millisecond)
		synctest.Wait()
		d.Claim.mu.Lock()
		seen := d.machine.rec.Stamp
		d.Claim.mu.Unlock()
		s.mu.Lock()
		stamp := s.rec.Stamp
		s.mu.Unlock()
		require.Equal(t, stamp, seen, "the lease was looked at while the holder was asked")
		time.Sleep(DefaultTimes.Duration)
		s.mu.Lock()
		require.Equal(t, d.hand.self, s.rec.Holder)
		s.mu.Unlock()
		stop()
		running.Wait()
	})
}

// Who should own a scope may change: it is asked back at once, and Admits knows
// without being told when the time is over.
func TestAnAreaFollowsWhoShouldOwnIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &shelf{}
		ctx, stop := context.WithCancel(t.Context())
		desks := map[string]*desk{}
		var running sync.WaitGroup
		for _, id := range []string{"a", "b"} {
			d := &desk{hand: &hand{shelf: s, self: Identity(id, "x")}}
			d.Claim = NewClaim(Config{Self: d.hand.self, Times: DefaultTimes}, d.hand, Hooks{
				OnChange: func(v View) {
					d.mu.Lock()
					defer d.mu.Unlock()
					d.view = v
				},
				AskBack: func(_ context.Context, holder string, epoch int64) error {
					return desks[holder].GiveBack(epoch, func() {})
				},
			}, zaptest.NewLogger(t))
			desks[id] = d
			running.Go(func() { d.Run(ctx) })
		}
		a, b := desks["a"], desks["b"]
		a.SetRole(true, 0, true)
		b.SetRole(false, 1, true)
		time.Sleep(21 * time.Second)
		require.True(t, a.admits())
		require.True(t, a.Admits(time.Now()))
		require.False(t, a.Admits(time.Now().Add(10*time.Second)), "a process that stood still finds its time over")
		require.False(t, b.Admits(time.Now()))

		time.Sleep(time.Second)
		a.SetRole(false, 1, true)
		b.SetRole(true, 0, true)
		time.Sleep(time.Second)
		require.False(t, a.admits())
		require.True(t, b.admits(), "handed over, and nobody waited for an expiry")
		require.False(t, a.Admits(time.Now()))
		stop()
		running.Wait()
	})
}

func TestAStoreThatFailsIsWarnedOfOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		core, logs := observer.New(zapcore.InfoLevel)
		d := &desk{hand: &hand{shelf: &shelf{rec: Record{Epoch: 6, Stamp: "z"}}, self: Identity("us-1", "x")}}
		d.Claim = NewClaim(Config{Self: d.hand.self, Home: true, Times: DefaultTimes}, d.hand, Hooks{OnChange: func(View) {}}, zap.New(core))
		var running sync.WaitGroup
		running.Go(func() { d.Run(ctx) })
		for outage := range 2 {
			time.Sleep(10 * time.Second)
			d.cutOff(true)
			time.Sleep(5 * time.Minute)
			require.Equal(t, outage+1, logs.FilterLevelExact(zapcore.WarnLevel).Len(), "of a whole outage: %v", logs.All())
			d.cutOff(false)
			time.Sleep(10 * time.Second)
			require.Equal(t, outage+1, logs.FilterMessageSnippet("succeeds again").Len())
		}
		stop()
		running.Wait()
	})
}

// A machine that is suspended has a clock that stands, too, and the wall clock does
// not. The first admission after it woke sees that, before anybody renewed.
func TestASuspendedMachineAdmitsNothingBeforeItHasRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		core, logs := observer.New(zapcore.InfoLevel)
		d := &desk{hand: &hand{shelf: &shelf{rec: Record{Epoch: 6, Stamp: "z"}}, self: Identity("us-1", "x")}}
		d.Claim = NewClaim(Config{Self: d.hand.self, Home: true, Times: DefaultTimes}, d.hand, Hooks{OnChange: func(v View) {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.view = v
		}}, zap.New(core))
		var slept atomic.Int64
		d.wall = func(now time.Time) time.Time { return now.Round(0).Add(time.Duration(slept.Load())) }
		var running sync.WaitGroup
		running.Go(func() { d.Run(ctx) })
		time.Sleep(5 * time.Second)
		require.True(t, d.Admits(time.Now()))
		slept.Add(int64(time.Second))
		require.True(t, d.Admits(time.Now()), "a clock that is set a little is no suspension")
		d.cutOff(true)
		slept.Add(int64(time.Hour))
		require.False(t, d.Admits(time.Now()), "nothing ran yet since it woke")
		synctest.Wait()
		require.False(t, d.admits(), "and now everybody is told")
		require.Equal(t, 1, logs.FilterMessageSnippet("stood still").Len())
		d.cutOff(false)
		time.Sleep(8 * time.Second)
		require.True(t, d.Admits(time.Now()), "the lease is renewed")
		require.True(t, d.admits())
		stop()
		running.Wait()
	})
}

func TestASlowStoreIsSaidOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		core, logs := observer.New(zapcore.InfoLevel)
		d := &desk{hand: &hand{shelf: &shelf{rec: Record{Epoch: 6, Stamp: "z"}}, self: Identity("us-1", "x")}}
		d.Claim = NewClaim(Config{Self: d.hand.self, Home: true, Times: DefaultTimes}, d.hand, Hooks{OnChange: func(View) {}}, zap.New(core))
		var running sync.WaitGroup
		running.Go(func() { d.Run(ctx) })
		time.Sleep(10 * time.Second)
		require.False(t, d.View().StoreAway)
		d.slow(3 * time.Second)
		time.Sleep(time.Minute)
		require.True(t, d.View().StoreAway)
		require.True(t, d.View().Admits, "it renews soon enough, just so")
		require.Equal(t, 1, logs.FilterMessageSnippet("answers so slowly").Len())
		d.slow(0)
		time.Sleep(10 * time.Second)
		require.False(t, d.View().StoreAway)
		require.Equal(t, 1, logs.FilterMessageSnippet("store is fast enough").Len())
		stop()
		running.Wait()
	})
}

// If the list of members differs from the holder's, the log says so when it is seen, and not only
// when the store is away.
func TestOtherMembersThanTheHoldersAreSaidOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &shelf{rec: Record{Holder: "b_x", Epoch: 6, Stamp: "z", Expiry: NotExpired, Members: []string{"a", "b"}}}
		core, logs := observer.New(zapcore.InfoLevel)
		c := NewClaim(Config{Self: "a_x", Times: DefaultTimes, Members: []string{"a", "b", "c"}}, &hand{shelf: s, self: "a_x"},
			Hooks{OnChange: func(View) {}}, zap.New(core))
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { c.Run(ctx) })
		time.Sleep(10 * time.Second)
		require.True(t, c.View().MembersDiffer)
		warned := logs.FilterMessageSnippet("ha.members differ from ours")
		require.Equal(t, 1, warned.Len())
		require.Equal(t, []any{"a", "b"}, warned.All()[0].ContextMap()["holders"])
		s.mu.Lock()
		s.rec.Members, s.rec.Stamp = []string{"a", "b", "c"}, "y"
		s.mu.Unlock()
		time.Sleep(10 * time.Second)
		require.False(t, c.View().MembersDiffer)
		require.Equal(t, 1, logs.FilterMessageSnippet("ha.members are the same as ours again").Len())
		stop()
		running.Wait()
	})
}

// While the store hangs for all, the owner asks the other members, and they promise.
func TestClaimsPledgeWhileTheStoreHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &shelf{rec: Record{Epoch: 6, Stamp: "z"}}
		ctx, stop := context.WithCancel(t.Context())
		desks := map[string]*desk{}
		var deaf atomic.Bool
		var running sync.WaitGroup
		for k, id := range []string{"a", "b"} {
			d := &desk{hand: &hand{shelf: s, self: Identity(id, "x")}}
			d.Claim = NewClaim(Config{Self: d.hand.self, Home: k == 0, Times: DefaultTimes, Members: []string{"a", "b"}}, d.hand, Hooks{
				OnChange: func(v View) {
					d.mu.Lock()
					defer d.mu.Unlock()
					d.view = v
				},
				AskBack: func(context.Context, string, int64) error { return ErrNotHolder },
				Vote: func(ctx context.Context, member string, ask Vote) error {
					if deaf.Load() {
						<-ctx.Done()
						return ctx.Err()
					}
					return desks[member].GivePromise(ask)
				},
			}, zaptest.NewLogger(t))
			d.SetRole(k == 0, k, true)
			desks[id] = d
		}
		for _, id := range []string{"a", "b"} { // a takes the lease: it may first
			running.Go(func() { desks[id].Run(ctx) })
			time.Sleep(time.Second)
		}
		a, b := desks["a"], desks["b"]
		time.Sleep(40 * time.Second)
		require.True(t, a.admits())
		a.cutOff(true)
		b.cutOff(true)
		for range 100 {
			time.Sleep(time.Second)
			require.True(t, a.Admits(time.Now()))
		}
		require.True(t, a.View().Voted)
		b.cutOff(false)
		time.Sleep(time.Minute)
		require.True(t, a.Admits(time.Now()), "b reaches the store and keeps what it promised")
		deaf.Store(true)
		time.Sleep(11 * time.Second)
		require.False(t, a.admits())
		require.False(t, b.admits())
		time.Sleep(11 * time.Second)
		require.True(t, b.admits())
		stop()
		running.Wait()
	})
}
