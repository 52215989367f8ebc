package etcd

import (
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"evenkeel/lease"
)

// server runs etcd in this process.
func server(t *testing.T) *clientv3.Client {
	if testing.Short() {
		t.Skip("needs an etcd of a few seconds; run without -short")
	}
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel, cfg.LogOutputs = t.TempDir(), "error", []string{"/dev/null"}
	local := url.URL{Scheme: "http", Host: "127.0.0.1:0"}
	cfg.ListenClientUrls, cfg.ListenPeerUrls = []url.URL{local}, []url.URL{local}
	cfg.TickMs, cfg.ElectionMs = 10, 100
	cfg.UnsafeNoFsync = true
	e, err := embed.StartEtcd(cfg)
	require.NoError(t, err)
	t.Cleanup(e.Close)
	<-e.Server.ReadyNotify()
	c, err := Connect([]string{e.Clients[0].Addr().String()}, nil, zap.NewNop())
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func look(t *testing.T, e *Engine) lease.Record {
	r, err := e.Look(t.Context())
	require.NoError(t, err)
	return r
}

func acquire(t *testing.T, e *Engine) lease.Record {
	r, err := e.Acquire(t.Context(), 0)
	require.NoError(t, err)
	require.Equal(t, lease.NotExpired, r.Expiry)
	return r
}

func TestKeyGoesFromHandToHand(t *testing.T) {
	c := server(t)
	ctx := t.Context()
	us, eu := New(c, "evenkeel/us", "us-1_a", 2*time.Second, nil), New(c, "evenkeel/us", "eu-1_a", 2*time.Second, nil)
	require.Zero(t, look(t, us))
	first := acquire(t, us)
	_, err := eu.Acquire(ctx, 0)
	require.ErrorIs(t, err, lease.ErrTaken)
	require.Equal(t, first, look(t, eu), "etcd vouches for the holder")
	require.NoError(t, us.Renew(ctx, first.Epoch))
	require.ErrorIs(t, us.Renew(ctx, first.Epoch-1), lease.ErrLost)

	require.NoError(t, us.Release(ctx, first.Epoch))
	r := look(t, eu)
	require.Empty(t, r.Holder, "given back")
	require.Equal(t, first.Epoch, r.Epoch, "it tells which holder released it, so that promises to that one can end")
	require.Equal(t, lease.ExpiryUnknown, r.Expiry)
	require.ErrorIs(t, us.Renew(ctx, first.Epoch), lease.ErrLost)
	require.ErrorIs(t, us.Release(ctx, first.Epoch), lease.ErrLost)

	second := acquire(t, eu)
	require.Greater(t, second.Epoch, first.Epoch)
	require.Eventually(t, func() bool { return look(t, us).Expiry == lease.Expired }, time.Minute, 50*time.Millisecond, "nobody renewed")
	require.Equal(t, second.Epoch, look(t, us).Epoch)
	require.Equal(t, "eu-1_a", look(t, us).Holder, "who died is told from who gave it back")
	require.ErrorIs(t, eu.Renew(ctx, second.Epoch), lease.ErrLost)
	require.Greater(t, acquire(t, us).Epoch, second.Epoch)
}

func TestCallsWhoseAnswerWasLost(t *testing.T) {
	c := server(t)
	ctx := t.Context()
	us := New(c, "evenkeel/us", "us-1_a", 10*time.Second, nil)
	first := acquire(t, us)

	us.held = 0 // the answer of the acquisition never came
	require.Equal(t, first, look(t, us))
	require.NoError(t, us.Renew(ctx, first.Epoch))

	late := *us // a release is on its way
	us.releaseInDoubt = true
	require.NoError(t, us.Renew(ctx, first.Epoch))
	require.Error(t, late.Release(ctx, first.Epoch))
	require.Equal(t, "us-1_a", look(t, us).Holder, "a renewal after it makes it void")

	us.lastKeyRev = 1 // a write of ours came to pass unheard
	require.ErrorContains(t, us.Release(ctx, first.Epoch), "answer was lost")
	require.NoError(t, us.Release(ctx, first.Epoch), "it was read again")
}

// A proxy that gave a group up and claims it again finds the lease still its own, because its
// release got no answer. That release must not take effect once the proxy goes on with the lease.
func TestALateReleaseOfAnEarlierClaim(t *testing.T) {
	c := server(t)
	ctx := t.Context()
	earlier := New(c, "evenkeel/us", "us-1_a", 10*time.Second, nil)
	first := acquire(t, earlier)
	us := New(c, "evenkeel/us", "us-1_a", 10*time.Second, nil)
	require.Equal(t, first, look(t, us))
	require.NoError(t, us.Renew(ctx, first.Epoch))
	require.Error(t, earlier.Release(ctx, first.Epoch))
	require.Equal(t, "us-1_a", look(t, us).Holder)
	require.NoError(t, us.Renew(ctx, first.Epoch))
	require.NoError(t, us.Release(ctx, first.Epoch))
}

// A store that lost its data counts from 1 again, and epochs do not. What the holder's
// lease is like can be read by the others.
func TestEpochsDoNotGoBackWithTheStore(t *testing.T) {
	c := server(t)
	ctx := t.Context()
	us := New(c, "evenkeel/us", "us-1_a", 10*time.Second, []string{"us-1", "eu-1"})
	eu := New(c, "evenkeel/us", "eu-1_a", 20*time.Second, nil)
	look(t, us)
	first, err := us.Acquire(ctx, 5000) // seen before the store was lost
	require.NoError(t, err)
	require.Greater(t, first.Epoch, int64(5000))
	require.Equal(t, first, look(t, eu))
	require.Equal(t, 10*time.Second, first.Duration)
	require.Equal(t, []string{"us-1", "eu-1"}, first.Members)
	require.NoError(t, us.Renew(ctx, first.Epoch))
	require.ErrorIs(t, us.Renew(ctx, first.Epoch-1), lease.ErrLost)
	require.NoError(t, us.Release(ctx, first.Epoch))
	look(t, eu)
	second, err := eu.Acquire(ctx, first.Epoch)
	require.NoError(t, err)
	require.Greater(t, second.Epoch, first.Epoch)
	require.Empty(t, second.Members)
	require.NoError(t, eu.Renew(ctx, second.Epoch))
	require.Equal(t, second, look(t, us))
}
