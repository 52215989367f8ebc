// Package etcd keeps a lease as an etcd key that lives as long as an etcd lease.
//
// It grants and renews that lease itself. A Session of client/v3/concurrency
// renews in the background and tells nobody when: what an owner must know to
// stop in time is when it renewed last.
package etcd

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"evenkeel/lease"
)

// Connect makes a client; it dials when it is first used.
func Connect(endpoints []string, t *tls.Config, log *zap.Logger) (*clientv3.Client, error) {
	c, err := clientv3.New(clientv3.Config{
		Endpoints: endpoints, TLS: t, DialTimeout: 5 * time.Second,
		// it would warn of every call that fails, and a claim says so once
		Logger:            log.WithOptions(zap.IncreaseLevel(zapcore.ErrorLevel)),
		DialKeepAliveTime: 5 * time.Second, DialKeepAliveTimeout: 3 * time.Second, // a member that is gone is another's turn
	})
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	return c, nil
}

// Engine is one lease: the key owner, which goes when the holder's time is over,
// and beside it last, which stays and tells who held it last, or nobody when it
// was given back. The epoch is the revision of the acquisition, which both carry,
// and the base: a store that lost its data counts revisions from 1 again, and who
// acquires then raises the base by all epochs there were. The key terms has the
// base, and what the holder's lease is like. The version before knows no such key:
// its lease has no base, and nothing but its own key says how long it lasts.
// It implements lease.Engine.
type Engine struct {
	client             *clientv3.Client
	owner, last, extra string
	identity           string
	terms              terms // ours

	held  clientv3.LeaseID
	seen  int64 // revision of last's last write; 0: there is none
	now   int64 // revision of the store, as last looked
	base  int64 // as read or written last
	doubt bool  // a release may still be on its way
}

// terms is what the last acquisition noted beside the holder.
type terms struct {
	Base    int64    `json:"base,omitempty"`
	Seconds int64    `json:"seconds"`
	Members []string `json:"members,omitempty"`
}

var _ lease.Engine = (*Engine)(nil)

// New makes the engine of the lease with this name.
func New(client *clientv3.Client, name, identity string, duration time.Duration, members []string) *Engine {
	return &Engine{
		client: client, owner: name + "/owner", last: name + "/last", extra: name + "/terms", identity: identity,
		terms: terms{Seconds: int64(duration.Seconds()), Members: members},
	}
}

// Look reads all keys at one revision.
func (e *Engine) Look(ctx context.Context) (lease.Record, error) {
	r, err := e.client.Txn(ctx).Then(clientv3.OpGet(e.owner), clientv3.OpGet(e.last), clientv3.OpGet(e.extra)).Commit()
	if err != nil {
		return lease.Record{}, fmt.Errorf("read etcd key %s: %w", e.owner, err)
	}
	owner, last, extra := r.Responses[0].GetResponseRange().Kvs, r.Responses[1].GetResponseRange().Kvs, r.Responses[2].GetResponseRange().Kvs
	e.seen, e.now, e.base = 0, r.Header.Revision, 0
	var t terms
	if len(extra) > 0 {
		if err := json.Unmarshal(extra[0].Value, &t); err != nil {
			return lease.Record{}, fmt.Errorf("read etcd key %s: %w; delete it", e.extra, err)
		}
		e.base = t.Base
	}
	if len(last) == 0 {
		return lease.Record{Members: t.Members}, nil
	}
	e.seen = last[0].ModRevision
	rec := lease.Record{
		Holder: string(last[0].Value), Epoch: e.base + e.seen, Stamp: strconv.FormatInt(e.seen, 10),
		Duration: time.Duration(t.Seconds) * time.Second, Members: t.Members,
	}
	switch {
	case len(owner) > 0:
		rec.Holder, rec.Epoch, rec.Term = string(owner[0].Value), e.base+owner[0].CreateRevision, lease.Running
		if rec.Holder == e.identity { // of an acquisition, perhaps, whose answer was lost
			e.held = clientv3.LeaseID(owner[0].Lease)
		}
	case rec.Holder != "":
		rec.Term = lease.Over
	}
	return rec, nil
}

// Acquire writes all keys, if none was since Look.
func (e *Engine) Acquire(ctx context.Context, above int64) (lease.Record, error) {
	t := e.terms
	if t.Base = e.base; above > e.base+e.now { // revisions have begun anew, or something in front of an engine counted further
		t.Base = above
	}
	text, err := json.Marshal(t)
	if err != nil {
		return lease.Record{}, fmt.Errorf("acquire etcd key %s: %w", e.owner, err)
	}
	granted, err := e.client.Grant(ctx, t.Seconds)
	if err != nil {
		return lease.Record{}, fmt.Errorf("grant an etcd lease: %w", err)
	}
	r, err := e.client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(e.owner), "=", 0), clientv3.Compare(clientv3.ModRevision(e.last), "=", e.seen)).
		Then(clientv3.OpPut(e.owner, e.identity, clientv3.WithLease(granted.ID)), clientv3.OpPut(e.last, e.identity),
			clientv3.OpPut(e.extra, string(text))).
		Commit()
	if err != nil {
		return lease.Record{}, fmt.Errorf("acquire etcd key %s: %w", e.owner, err)
	}
	if !r.Succeeded {
		_, _ = e.client.Revoke(ctx, granted.ID) // it would expire
		return lease.Record{}, lease.ErrTaken
	}
	e.held, e.seen, e.base, e.doubt = granted.ID, r.Header.Revision, t.Base, false
	return lease.Record{
		Holder: e.identity, Epoch: e.base + e.seen, Stamp: strconv.FormatInt(e.seen, 10), Term: lease.Running,
		Duration: time.Duration(t.Seconds) * time.Second, Members: t.Members,
	}, nil
}

// Renew sees that the key is ours and then lengthens the life of its lease. In
// this order, for a client that reaches no member repeats the second without
// pause.
func (e *Engine) Renew(ctx context.Context, epoch int64) error {
	ours, then := []clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(e.owner), "=", epoch-e.base)}, []clientv3.Op(nil)
	if e.doubt { // a write that makes the release void
		ours, then = append(ours, clientv3.Compare(clientv3.ModRevision(e.last), "=", e.seen)), []clientv3.Op{clientv3.OpPut(e.last, e.identity)}
	}
	r, err := e.client.Txn(ctx).If(ours...).Then(then...).Commit()
	switch {
	case err != nil:
		return fmt.Errorf("renew etcd key %s: %w", e.owner, err)
	case !r.Succeeded:
		return e.changed(ctx, epoch)
	case e.doubt:
		e.seen, e.doubt = r.Header.Revision, false
	}
	if _, err := e.client.KeepAliveOnce(ctx, e.held); errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return lease.ErrLost
	} else if err != nil {
		return fmt.Errorf("renew etcd key %s: %w", e.owner, err)
	}
	return nil
}

// Release deletes the key and notes that its holder did so.
func (e *Engine) Release(ctx context.Context, epoch int64) error {
	e.doubt = true
	r, err := e.client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(e.owner), "=", epoch-e.base), clientv3.Compare(clientv3.ModRevision(e.last), "=", e.seen)).
		Then(clientv3.OpDelete(e.owner), clientv3.OpPut(e.last, "")).
		Commit()
	switch {
	case err != nil:
		return fmt.Errorf("release etcd key %s: %w", e.owner, err)
	case !r.Succeeded:
		return e.changed(ctx, epoch)
	}
	_, _ = e.client.Revoke(ctx, e.held) // nothing is bound to it any more; it would expire
	return nil
}

// changed looks whose the key is that was not as it should be.
func (e *Engine) changed(ctx context.Context, epoch int64) error {
	rec, err := e.Look(ctx)
	if err != nil {
		return err
	}
	if rec.Holder != e.identity || rec.Epoch != epoch || rec.Term != lease.Running {
		return lease.ErrLost
	}
	return fmt.Errorf("an earlier call of this proxy, whose answer was lost, has written etcd key %s; the next call will succeed", e.owner)
}
