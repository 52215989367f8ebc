// Package ownertest makes scopes that the proxy under test owns.
package ownertest

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/gateway/owner"
	"evenkeel/lease"
)

// free is a lease that any caller acquires at once. Its value is the epoch that the caller gets.
type free int64

func (f free) Look(context.Context) (lease.Record, error) {
	return lease.Record{Epoch: int64(f) - 1, Stamp: "a"}, nil
}

func (f free) Acquire(context.Context, int64) (lease.Record, error) {
	return lease.Record{Holder: "us-1_x", Epoch: int64(f), Stamp: "b"}, nil
}
func (free) Renew(context.Context, int64) error   { return nil }
func (free) Release(context.Context, int64) error { return nil }

// Owned returns a scope that the proxy us-1 owns for an hour with this epoch, and the scope's
// claim, which does not run any more.
func Owned(t *testing.T, epoch int64) (*owner.Scope, *lease.Claim) {
	t.Helper()
	scope, times := owner.NewScope("main"), lease.DefaultTimes
	times.Duration, times.RenewDeadline = time.Hour, time.Hour/2
	claim := scope.Claim(lease.Config{Self: "us-1_x", Home: true, Times: times}, free(epoch), lease.Hooks{}, zap.NewNop())
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { claim.Run(ctx) })
	require.Eventually(t, scope.Admits, time.Minute, time.Millisecond)
	stop()
	running.Wait()
	return scope, claim
}
