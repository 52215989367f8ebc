// Package kube keeps a lease as a Kubernetes Lease object, with client-go.
//
// The package does not use client-go's LeaderElector, which cannot guarantee that an owner stops in
// time, and whose documentation promises no fencing. The LeaderElector counts the renew deadline
// from the end of its wait, so that an owner stops up to one wait late. A new leader starts as soon
// as it has acquired the lease. A holder that acquires again under the same name does not increase
// leaseTransitions. The callbacks get neither the epoch nor whether the lease was released.
//
// The object's fields keep their usual meaning, so that kubectl and other tools can read them.
package kube

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"evenkeel/lease"
)

// Engine is one Lease object. It implements lease.Engine.
type Engine struct {
	client   Client
	name     string
	identity string
	duration time.Duration
	members  []string              // the only proxies that may ever take the lease; empty: any proxy may
	last     *coordinationv1.Lease // the object, as last read or written; nil: it does not exist
}

var _ lease.Engine = (*Engine)(nil)

// New makes the engine of a lease.
func New(client Client, name, identity string, duration time.Duration, members []string) *Engine {
	return &Engine{client: client, name: name, identity: identity, duration: duration, members: members}
}

// the ids of the proxies that may take the lease, separated by commas
const membersKey = "evenkeel/members"

// Look keeps the object in e.last, because a later write must have the same resourceVersion: the
// API server then refuses it if the object has changed since.
func (e *Engine) Look(ctx context.Context) (lease.Record, error) {
	l, err := e.client.Get(ctx, e.name, metav1.GetOptions{})
	switch {
	case errors.IsNotFound(err):
		e.last = nil
		return lease.Record{}, nil
	case err != nil:
		return lease.Record{}, fmt.Errorf("read Lease %s: %w", e.name, err)
	}
	e.last = l
	return e.record(), nil
}

func (e *Engine) record() lease.Record {
	s := e.last.Spec
	r := lease.Record{Stamp: e.last.ResourceVersion}
	if s.HolderIdentity != nil {
		r.Holder = *s.HolderIdentity
	}
	if s.LeaseTransitions != nil {
		r.Epoch = int64(*s.LeaseTransitions)
	}
	if s.LeaseDurationSeconds != nil && r.Holder != "" { // a release sets 1 s, which means nothing
		r.Duration = time.Duration(*s.LeaseDurationSeconds) * time.Second
	}
	if list := e.last.Annotations[membersKey]; list != "" {
		r.Members = strings.Split(list, ",")
	}
	return r
}

// Acquire writes this proxy into the object that was last read, or creates the object. The API
// server refuses this if it was written, created or deleted since.
func (e *Engine) Acquire(ctx context.Context, seenEpoch int64) (lease.Record, error) {
	highest := seenEpoch
	next := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: e.name,
		Labels: map[string]string{"app.kubernetes.io/managed-by": "evenkeel"}}}
	if e.last != nil {
		next = e.last.DeepCopy()
		highest = max(highest, e.record().Epoch)
	}
	epoch := highest + 1
	if epoch > math.MaxInt32 {
		return lease.Record{}, fmt.Errorf("acquire Lease %s: its leaseTransitions cannot count beyond %d", e.name, highest)
	}
	delete(next.Annotations, membersKey)
	if len(e.members) > 0 {
		metav1.SetMetaDataAnnotation(&next.ObjectMeta, membersKey, strings.Join(e.members, ","))
	}
	now := metav1.NowMicro()
	next.Spec = coordinationv1.LeaseSpec{
		HolderIdentity: &e.identity, AcquireTime: &now, RenewTime: &now,
		LeaseDurationSeconds: new(int32(e.duration.Seconds())), LeaseTransitions: new(int32(epoch)),
	}
	var err error
	if e.last != nil {
		next, err = e.client.Update(ctx, next, metav1.UpdateOptions{})
	} else {
		next, err = e.client.Create(ctx, next, metav1.CreateOptions{})
	}
	switch {
	case errors.IsConflict(err), errors.IsAlreadyExists(err), errors.IsNotFound(err):
		return lease.Record{}, lease.ErrTaken
	case err != nil:
		return lease.Record{}, fmt.Errorf("acquire Lease %s: %w", e.name, err)
	}
	e.last = next
	return e.record(), nil
}

// Renew also writes the duration again, in case a person edited the object.
func (e *Engine) Renew(ctx context.Context, epoch int64) error {
	return e.update(ctx, "renew", epoch, func(s *coordinationv1.LeaseSpec) {
		s.RenewTime, s.LeaseDurationSeconds = new(metav1.NowMicro()), new(int32(e.duration.Seconds()))
	})
}

// Release clears the holder, and sets the duration to one second, as client-go does.
func (e *Engine) Release(ctx context.Context, epoch int64) error {
	return e.update(ctx, "release", epoch, func(s *coordinationv1.LeaseSpec) {
		s.HolderIdentity, s.RenewTime, s.LeaseDurationSeconds = new(""), new(metav1.NowMicro()), new(int32(1))
	})
}

// update retries once after a conflict: a call whose answer was lost may have written the object.
func (e *Engine) update(ctx context.Context, callName string, epoch int64, change func(*coordinationv1.LeaseSpec)) error {
	for range 2 {
		isHeld := e.last != nil && e.record().Holder == e.identity && e.record().Epoch == epoch
		if !isHeld {
			return lease.ErrLost
		}
		next := e.last.DeepCopy()
		change(&next.Spec)
		next, err := e.client.Update(ctx, next, metav1.UpdateOptions{})
		switch {
		case err == nil:
			e.last = next
			return nil
		case errors.IsNotFound(err):
			e.last = nil
			return lease.ErrLost
		case !errors.IsConflict(err):
			return fmt.Errorf("%s Lease %s: %w", callName, e.name, err)
		}
		if _, err := e.Look(ctx); err != nil {
			return err
		}
	}
	return fmt.Errorf("%s Lease %s: another writer keeps changing it", callName, e.name)
}
