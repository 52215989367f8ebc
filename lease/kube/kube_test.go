package kube

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	ktesting "k8s.io/client-go/testing"

	"evenkeel/lease"
)

// server is a clientset whose leases have resource versions that count, as an
// API server's do; client-go's fake has none.
func server(t *testing.T) (*fake.Clientset, *func(verb string) error) {
	c := fake.NewClientset()
	version := 0
	var fault func(string) error
	for _, verb := range []string{"create", "update"} {
		c.PrependReactor(verb, "leases", func(a ktesting.Action) (bool, runtime.Object, error) {
			l := a.(ktesting.UpdateAction).GetObject().(*coordinationv1.Lease)
			if verb == "update" {
				old, err := c.Tracker().Get(a.GetResource(), a.GetNamespace(), l.Name)
				if err != nil {
					return true, nil, err
				}
				if old.(*coordinationv1.Lease).ResourceVersion != l.ResourceVersion {
					return true, nil, errors.NewConflict(a.GetResource().GroupResource(), l.Name, nil)
				}
			}
			version++
			l.ResourceVersion = strconv.Itoa(version)
			if fault == nil {
				return false, nil, nil
			}
			err := fault(verb)
			if err != nil && verb == "update" { // written, and the answer lost
				require.NoError(t, c.Tracker().Update(a.GetResource(), l, a.GetNamespace()))
			}
			return err != nil, nil, err
		})
	}
	return c, &fault
}

func TestLeaseGoesFromHandToHand(t *testing.T) {
	c, _ := server(t)
	us := New(c.CoordinationV1().Leases("ek"), "evenkeel-owner-us", "us-1_a", 15*time.Second, nil)
	eu := New(c.CoordinationV1().Leases("ek"), "evenkeel-owner-us", "eu-1_a", 15*time.Second, nil)
	ctx := t.Context()

	r, err := us.Look(ctx)
	require.NoError(t, err)
	require.Zero(t, r, "there is none")
	_, err = eu.Look(ctx)
	require.NoError(t, err)
	r, err = us.Acquire(ctx, 0)
	require.NoError(t, err)
	require.Equal(t, "us-1_a", r.Holder)
	require.EqualValues(t, 1, r.Epoch)
	_, err = eu.Acquire(ctx, 0)
	require.ErrorIs(t, err, lease.ErrTaken, "it was made meanwhile")

	seen, err := eu.Look(ctx)
	require.NoError(t, err)
	require.NoError(t, us.Renew(ctx, 1))
	renewed, err := eu.Look(ctx)
	require.NoError(t, err)
	require.NotEqual(t, seen.Stamp, renewed.Stamp, "a renewal can be seen")
	require.NoError(t, us.Renew(ctx, 1))
	_, err = eu.Acquire(ctx, 0)
	require.ErrorIs(t, err, lease.ErrTaken, "it was renewed meanwhile")

	_, err = eu.Look(ctx)
	require.NoError(t, err)
	r, err = eu.Acquire(ctx, 0) // whether it may is the machine's to say
	require.NoError(t, err)
	require.EqualValues(t, 2, r.Epoch)
	require.ErrorIs(t, us.Renew(ctx, 1), lease.ErrLost)
	require.ErrorIs(t, us.Release(ctx, 1), lease.ErrLost)
	require.ErrorIs(t, eu.Renew(ctx, 1), lease.ErrLost, "another epoch of its own")

	require.NoError(t, eu.Release(ctx, 2))
	r, err = us.Look(ctx)
	require.NoError(t, err)
	require.Empty(t, r.Holder)
	require.EqualValues(t, 2, r.Epoch, "the epoch outlives its holder")
	require.ErrorIs(t, eu.Renew(ctx, 2), lease.ErrLost)
	r, err = us.Acquire(ctx, 0)
	require.NoError(t, err)
	require.EqualValues(t, 3, r.Epoch)
}

func TestWriteWhoseAnswerWasLostIsReadAgain(t *testing.T) {
	c, fault := server(t)
	us := New(c.CoordinationV1().Leases("ek"), "l", "us-1_a", 15*time.Second, nil)
	_, err := us.Acquire(t.Context(), 0)
	require.NoError(t, err)
	*fault = func(string) error { return errors.NewTimeoutError("slow", 1) }
	require.Error(t, us.Renew(t.Context(), 1))
	*fault = nil
	require.NoError(t, us.Renew(t.Context(), 1), "its resource version was another: read, still ours, written")
	require.NoError(t, c.Tracker().Delete(coordinationv1.SchemeGroupVersion.WithResource("leases"), "ek", "l"))
	require.ErrorIs(t, us.Renew(t.Context(), 1), lease.ErrLost, "an operator deleted it")
}

// apiServer keeps one Lease as an API server does, on the wire.
func apiServer(t *testing.T) *rest.Config {
	var held *coordinationv1.Lease
	version := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		refuse := func(e *errors.StatusError) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(int(e.ErrStatus.Code))
			_ = json.NewEncoder(w).Encode(e.ErrStatus)
		}
		var sent coordinationv1.Lease
		path := "/apis/coordination.k8s.io/v1/namespaces/ek/leases"
		if r.Method != http.MethodGet {
			if err := json.NewDecoder(r.Body).Decode(&sent); err != nil {
				refuse(errors.NewBadRequest(err.Error()))
				return
			}
		}
		leases := coordinationv1.Resource("leases")
		switch {
		case r.Method == http.MethodPost && r.URL.Path != path, r.Method != http.MethodPost && r.URL.Path != path+"/l":
			refuse(errors.NewBadRequest(r.Method + " " + r.URL.Path))
			return
		case r.Method == http.MethodPost && held != nil:
			refuse(errors.NewAlreadyExists(leases, sent.Name))
			return
		case r.Method != http.MethodPost && held == nil:
			refuse(errors.NewNotFound(leases, "l"))
			return
		case r.Method == http.MethodPut && sent.ResourceVersion != held.ResourceVersion:
			refuse(errors.NewConflict(leases, sent.Name, nil))
			return
		case r.Method != http.MethodGet:
			version++
			held = &sent
			held.ResourceVersion = strconv.Itoa(version)
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(held)
	}))
	t.Cleanup(server.Close)
	return &rest.Config{Host: server.URL}
}

func TestLeaseIsKeptOverTheWire(t *testing.T) {
	server := apiServer(t)
	engine := func(identity string) *Engine {
		c, err := NewClient(server, "ek", time.Second)
		require.NoError(t, err)
		return New(c, "l", identity, 15*time.Second, nil)
	}
	us, eu := engine("us-1_a"), engine("eu-1_a")
	ctx := t.Context()
	r, err := us.Look(ctx)
	require.NoError(t, err)
	require.Zero(t, r, "a 404 is no lease, no failure")
	r, err = us.Acquire(ctx, 0)
	require.NoError(t, err)
	require.Equal(t, lease.Record{Holder: "us-1_a", Epoch: 1, Stamp: "1", Duration: 15 * time.Second}, r)
	_, err = eu.Acquire(ctx, 0)
	require.ErrorIs(t, err, lease.ErrTaken, "made meanwhile: 409 AlreadyExists")
	_, err = eu.Look(ctx)
	require.NoError(t, err)
	require.NoError(t, us.Renew(ctx, 1))
	_, err = eu.Acquire(ctx, 0)
	require.ErrorIs(t, err, lease.ErrTaken, "written meanwhile: 409 Conflict")
	require.NoError(t, us.Release(ctx, 1))
	r, err = eu.Look(ctx)
	require.NoError(t, err)
	require.Equal(t, lease.Record{Epoch: 1, Stamp: "3"}, r)
	r, err = eu.Acquire(ctx, 0)
	require.NoError(t, err)
	require.Equal(t, lease.Record{Holder: "eu-1_a", Epoch: 2, Stamp: "4", Duration: 15 * time.Second}, r)
}

// A proxy that dies leaves its group to the next in less than two leases.
func TestADeadOwnersLeaseIsTakenOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := server(t)
		var running sync.WaitGroup
		claim := func(ctx context.Context, id string, home bool, rank int) *lease.Claim {
			self := lease.Identity(id, "x")
			one := lease.NewClaim(lease.Config{Self: self, Times: lease.DefaultTimes},
				New(c.CoordinationV1().Leases("ek"), "evenkeel-group-main", self, 15*time.Second, nil),
				lease.Hooks{OnChange: func(lease.View) {}, AskBack: func(context.Context, string, int64) error { return lease.ErrNotHolder }},
				zap.NewNop())
			one.SetRole(home, rank, true)
			running.Go(func() { one.Run(ctx) })
			return one
		}
		alive, kill := context.WithCancel(t.Context())
		others, stop := context.WithCancel(t.Context())
		dead := claim(alive, "a", true, 0)
		time.Sleep(21 * time.Second)
		next, last := claim(others, "b", false, 1), claim(others, "c", false, 2)
		time.Sleep(10 * time.Second)
		require.True(t, dead.View().Admits)
		kill()
		killed := time.Now()
		time.Sleep(1500 * time.Millisecond) // its probes are missed
		next.SetRole(true, 0, true)
		last.SetRole(false, 1, true)
		for !next.View().Admits && time.Since(killed) < time.Minute {
			time.Sleep(10 * time.Millisecond)
		}
		took := time.Since(killed)
		require.Less(t, took, 30*time.Second)
		require.Greater(t, took, 10*time.Second, "not before the one before must have stopped")
		require.False(t, last.View().Admits)
		require.EqualValues(t, 2, next.View().Epoch)
		stop()
		running.Wait()
	})
}

// A Lease that somebody deletes starts above every epoch that was seen, and carries
// what the others must know of its holder.
func TestADeletedLeaseStartsAboveWhatWasSeen(t *testing.T) {
	c, _ := server(t)
	ctx := t.Context()
	us := New(c.CoordinationV1().Leases("ek"), "l", "us-1_a", 15*time.Second, []string{"us-1", "us-2"})
	eu := New(c.CoordinationV1().Leases("ek"), "l", "eu-1_a", 30*time.Second, nil)
	r, err := us.Acquire(ctx, 0)
	require.NoError(t, err)
	require.EqualValues(t, 1, r.Epoch)
	r, err = eu.Look(ctx)
	require.NoError(t, err)
	require.Equal(t, lease.Record{Holder: "us-1_a", Epoch: 1, Stamp: "1", Duration: 15 * time.Second, Members: []string{"us-1", "us-2"}}, r)
	require.NoError(t, c.Tracker().Delete(coordinationv1.SchemeGroupVersion.WithResource("leases"), "ek", "l"))
	_, err = eu.Look(ctx)
	require.NoError(t, err)
	r, err = eu.Acquire(ctx, 5)
	require.NoError(t, err)
	require.EqualValues(t, 6, r.Epoch)
	require.Equal(t, 30*time.Second, r.Duration)
	require.Empty(t, r.Members)
	_, err = us.Look(ctx)
	require.NoError(t, err)
	r, err = us.Acquire(ctx, 2)
	require.NoError(t, err)
	require.EqualValues(t, 7, r.Epoch, "the lease's own is higher")
	_, err = us.Acquire(ctx, 1<<31)
	require.ErrorContains(t, err, "cannot count beyond")
}

// A proxy that lost its group while its Lease was deleted gets it back: it asks for
// the epoch that the Lease has, and not for the one that it had itself.
func TestAFormerHolderAsksForTheEpochOfTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := server(t)
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		claims := map[string]*lease.Claim{}
		for k, id := range []string{"a", "b"} {
			self := lease.Identity(id, "x")
			one := lease.NewClaim(lease.Config{Self: self, Times: lease.DefaultTimes},
				New(c.CoordinationV1().Leases("ek"), "l", self, 15*time.Second, nil), lease.Hooks{
					OnChange: func(lease.View) {},
					AskBack: func(_ context.Context, holder string, epoch int64) error {
						return claims[holder].GiveBack(epoch, func() {})
					},
				}, zap.NewNop())
			one.SetRole(k == 0, k, true)
			claims[id] = one
		}
		a, b := claims["a"], claims["b"]
		running.Go(func() { a.Run(ctx) })
		time.Sleep(time.Minute)
		require.True(t, a.View().Admits)
		a.SetRole(false, 1, true) // b comes, and a hands over
		b.SetRole(true, 0, true)
		running.Go(func() { b.Run(ctx) })
		time.Sleep(time.Minute)
		require.True(t, b.View().Admits)
		require.EqualValues(t, 2, b.View().Epoch)
		leases := coordinationv1.SchemeGroupVersion.WithResource("leases")
		old, err := c.Tracker().Get(leases, "ek", "l")
		require.NoError(t, err)
		edited := old.(*coordinationv1.Lease).DeepCopy()
		edited.Spec.LeaseTransitions = new(int32(0)) // somebody edits it
		require.NoError(t, c.Tracker().Update(leases, edited, "ek"))
		b.SetRole(false, 1, true)
		a.SetRole(false, 1, false)
		time.Sleep(time.Minute)
		require.NoError(t, c.Tracker().Delete(leases, "ek", "l"))
		time.Sleep(2 * time.Minute)
		require.True(t, b.View().Admits)
		require.Greater(t, b.View().Epoch, int64(2), "it never goes back")
		a.SetRole(true, 0, true)
		time.Sleep(time.Minute)
		require.True(t, a.View().Admits)
		require.Greater(t, a.View().Epoch, int64(3))
		stop()
		running.Wait()
	})
}
