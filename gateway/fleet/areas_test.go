package fleet

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/owner"
	"evenkeel/geo"
	"evenkeel/lease"
	"evenkeel/mooncake"
)

// free is a lease that whoever asks for it gets.
type free struct{}

func (free) Look(context.Context) (lease.Record, error) {
	return lease.Record{Epoch: 6, Stamp: "a"}, nil
}

func (free) Acquire(context.Context, int64) (lease.Record, error) {
	return lease.Record{Holder: "us-1_x", Epoch: 7, Stamp: "b"}, nil
}
func (free) Renew(context.Context, int64) error   { return nil }
func (free) Release(context.Context, int64) error { return nil }

// regional is a fleet with a decode engine in its own region, us, and one in the region eu, and the
// owners of these regions.
func regional(t *testing.T) (*Fleet, *owner.Set) {
	t.Helper()
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"a": {}}
	cfg.Engines.Decode = []config.Engine{{URL: "http://10.0.0.1:80", Profile: "a"}, {URL: "http://10.0.0.2:80", Profile: "a", Region: "eu"}}
	cfg.Geo.Mode, cfg.Geo.Self = geo.Distributed, geo.Self{ID: "us-1", Region: "us"}
	own := &cfg.Geo.Ownership
	own.Engine, own.Etcd.Endpoints = geo.OwnEtcd, []string{"http://127.0.0.1:1"} // which no claim asks
	set := NewSettings(cfg)
	f := empty(t, func() *Settings { return set })
	scopes, err := owner.New(cfg, owner.Deps{Context: t.Context(), Log: zap.NewNop(), Registerer: prometheus.NewRegistry(),
		KVHoldTimeout: func() time.Duration { return time.Minute }})
	require.NoError(t, err)
	t.Cleanup(scopes.Close)
	f.Admission = scopes
	return f, scopes
}

// The ranks of a region have the fence of the region's owner: what is written to them
// carries the epoch, and once the region is another's nothing is written any more. That
// holds for our own region and for one that we took over.
func TestTheRanksOfARegionStandBehindItsFence(t *testing.T) {
	f, scopes := regional(t)
	times := lease.DefaultTimes
	times.Duration, times.RenewDeadline = time.Hour, time.Hour/2 // the claims are stopped, and yet theirs is not over while this runs
	claims := map[string]*lease.Claim{}
	var running sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	for _, region := range []string{"us", "eu"} {
		a := scopes.Scope(region)
		claim := a.Claim(lease.Config{Self: "us-1_x", Home: true, Times: times}, free{}, lease.Hooks{}, zap.NewNop())
		running.Go(func() { claim.Run(ctx) })
		require.Eventually(t, a.Admits, time.Minute, time.Millisecond)
		claims[region] = claim
	}
	stop()
	running.Wait()
	enter, err := f.Load()
	require.NoError(t, err)
	enter()
	f.up("decode 10.0.0.1:80", "m")
	f.up("decode 10.0.0.2:80", "m")

	for id, region := range map[string]string{"10.0.0.1:80": "us", "10.0.0.2:80": "eu"} {
		worker, ok := f.Now().WorkerByName(id, "m", "m")
		require.True(t, ok, id)
		rank := f.Now().Rank(worker)
		written, ok := rank.Scope.Enter()
		require.True(t, ok, region)
		written()
		require.Equal(t, []engine.Header{{Name: owner.EpochHeader, Value: "7"}}, rank.Scope.AppendEpochHeader(nil), region)
		require.NoError(t, claims[region].GiveBack(7, func() {}))
		require.ErrorIs(t, rank.Scope.CheckOwned(), owner.ErrNotOwner, region)
		_, ok = rank.Scope.Enter()
		require.False(t, ok, region)
	}
}

// A rank that is moved to another board stays on the first one until its requests there have ended.
// Both count for its scope.
func TestTheLoadOfARankIsThatOnAllItsBoards(t *testing.T) {
	f, _ := regional(t)
	enter, err := f.Load()
	require.NoError(t, err)
	enter()
	const id = "10.0.0.1:80"
	f.up("decode "+id, "m")
	worker, ok := f.Now().WorkerByName(id, "m", "m")
	require.True(t, ok)
	f.deps.Dispatch = func(context.Context) board.Status {
		on := func(used int, kv int64) board.ModelStatus {
			return board.ModelStatus{Workers: []board.WorkerStatus{{ID: worker, Name: id, Used: used, KVTokens: kv}}}
		}
		return board.Status{Models: []board.ModelStatus{on(2, 30), on(1, 500)}}
	}
	ours, _, _ := f.LoadOf(t.Context(), "us", false)
	require.Equal(t, []geo.Resident{{ID: id, Requests: 3, KVTokens: 530}}, ours)
}
