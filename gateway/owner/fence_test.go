package owner

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/lease"
)

// free is a lease that whoever asks for it gets.
type free struct{}

func (free) Look(context.Context) (lease.Record, error) {
	return lease.Record{Epoch: 1, Stamp: "a"}, nil
}

func (free) Acquire(context.Context, int64) (lease.Record, error) {
	return lease.Record{Holder: "us-1_x", Epoch: 2, Stamp: "b"}, nil
}
func (free) Renew(context.Context, int64) error   { return nil }
func (free) Release(context.Context, int64) error { return nil }

// Every admission is looked at again against the clock before it is written, for
// nobody may have been awake to tell that the time is over.
func TestARequestIsNotWrittenOnceItsOwnersTimeIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := NewScope("main")
		a.Claim(lease.Config{Self: "us-1_x", Home: true, Times: lease.DefaultTimes}, free{}, lease.Hooks{}, zap.NewNop())
		_, ok := a.Enter()
		require.False(t, ok, "it is not ours yet")

		ctx, freeze := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { a.claim.Run(ctx) })
		synctest.Wait()
		freeze()
		running.Wait()
		written, ok := a.Enter()
		require.True(t, ok)
		require.NoError(t, a.CheckOwned())
		time.Sleep(10 * time.Second)
		require.True(t, a.view.Load().Admits, "nobody could tell")
		require.ErrorIs(t, a.CheckOwned(), ErrNotOwner, "a connection took that long")
		_, ok = a.Enter()
		require.False(t, ok)

		flushed := make(chan time.Duration)
		begin := time.Now()
		go func() {
			a.waitForWrites(t.Context())
			flushed <- time.Since(begin)
		}()
		time.Sleep(writeTimeout / 2)
		written()
		written()
		require.Less(t, <-flushed, writeTimeout, "the last that was admitted is written")
		require.Zero(t, a.sending.Load())
	})
	var alone *Scope
	_, ok := alone.Enter()
	require.True(t, ok, "a proxy without others owns all")
	require.False(t, errors.Is(alone.CheckOwned(), ErrNotOwner))
}

// A lease that the store had lost is taken again with a later epoch, and without a pause. What was
// marked with the epoch before is not written any more: an engine may have seen the later one.
func TestARequestIsNotWrittenUnderAnEarlierEpoch(t *testing.T) {
	s, a := &Set{log: zap.NewNop(), checkNow: make(chan struct{}, 1)}, NewScope("main")
	a.view.Store(&lease.View{Phase: lease.Owner, Admits: true, Epoch: 4})
	epoch := a.Epoch()
	require.NoError(t, a.CheckEpoch(epoch))
	s.applyView(a, lease.View{Phase: lease.Owner, Admits: true, Epoch: 5})
	require.NoError(t, a.CheckOwned())
	require.ErrorIs(t, a.CheckEpoch(epoch), ErrNotOwner)
	require.NoError(t, a.CheckEpoch(a.Epoch()))
}
