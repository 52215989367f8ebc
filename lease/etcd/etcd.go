// Package etcd keeps a lease as an etcd key that lives as long as an etcd lease.
//
// The package grants and renews the etcd lease itself. A Session of client/v3/concurrency would
// renew it in the background, without saying when. An owner must know when it last renewed, so that
// it stops in time.
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

// Connect makes a client, which connects only when it is first used.
func Connect(endpoints []string, t *tls.Config, log *zap.Logger) (*clientv3.Client, error) {
	c, err := clientv3.New(clientv3.Config{
		Endpoints: endpoints, TLS: t, DialTimeout: 5 * time.Second,
		// The client would log every failed call; a claim logs the first of them.
		Logger: log.WithOptions(zap.IncreaseLevel(zapcore.ErrorLevel)),
		// so that it soon notices a dead etcd member
		DialKeepAliveTime: 5 * time.Second, DialKeepAliveTimeout: 3 * time.Second,
	})
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	return c, nil
}

// Engine is one lease in three keys. It implements lease.Engine.
//
// The key owner exists while the holder's etcd lease lasts. The key last names the last holder; it
// is empty if the lease was given back. The epoch is the revision at which the acquisition wrote
// both keys, plus a base. A store that lost its data counts revisions from 1 again; the next
// acquisition then sets the base to the highest epoch that was seen. The key terms has the base,
// and the duration and the members of the holder's lease. A lease of an older evenkeel version has
// no key
// terms: its base is 0, and its duration is not known.
type Engine struct {
	client                      *clientv3.Client
	ownerKey, lastKey, termsKey string
	identity                    string
	terms                       terms // what this proxy's acquisitions write; Base is set at each acquisition

	held           clientv3.LeaseID // the etcd lease of this proxy's key owner
	lastKeyRev     int64            // revision of the last write to the key last; 0: the key does not exist
	storeRev       int64            // revision of the store at the last Look
	base           int64            // terms.Base, as last read or written
	releaseInDoubt bool             // a failed release may still take effect
}

// MaxEpoch is the highest epoch that other proxies and guards may name. It is far above the bound
// of a Kubernetes Lease, because an epoch grows with the revision of etcd, and other users of the
// same etcd may have raised its revision above that bound.
const MaxEpoch = 1 << 62

// terms is the value of the key terms, which an acquisition writes.
type terms struct {
	Base    int64    `json:"base,omitempty"` // an epoch is a revision of the store plus this number
	Seconds int64    `json:"seconds"`        // how long the holder's lease lasts after a renewal
	Members []string `json:"members,omitempty"`
}

var _ lease.Engine = (*Engine)(nil)

// New makes the engine of the lease with this name.
func New(client *clientv3.Client, name, identity string, duration time.Duration, members []string) *Engine {
	return &Engine{
		client: client, ownerKey: name + "/owner", lastKey: name + "/last", termsKey: name + "/terms", identity: identity,
		terms: terms{Seconds: int64(duration.Seconds()), Members: members},
		// an earlier claim of this process may have sent a release that got no answer
		releaseInDoubt: true,
	}
}

// Look reads all three keys at one revision of the store. Stamp is the revision of the last write
// to "last". Look also stores what the next calls need.
func (e *Engine) Look(ctx context.Context) (lease.Record, error) {
	response, err := e.client.Txn(ctx).Then(clientv3.OpGet(e.ownerKey), clientv3.OpGet(e.lastKey), clientv3.OpGet(e.termsKey)).Commit()
	if err != nil {
		return lease.Record{}, fmt.Errorf("read etcd key %s: %w", e.ownerKey, err)
	}
	owner := response.Responses[0].GetResponseRange().Kvs
	last := response.Responses[1].GetResponseRange().Kvs
	stored := response.Responses[2].GetResponseRange().Kvs
	e.storeRev = response.Header.Revision
	e.lastKeyRev, e.base = 0, 0 // as they are without the keys "last" and "terms"
	var terms terms
	if len(stored) > 0 {
		if err := json.Unmarshal(stored[0].Value, &terms); err != nil {
			return lease.Record{}, fmt.Errorf("read etcd key %s: %w; delete it", e.termsKey, err)
		}
		e.base = terms.Base
	}
	if len(last) == 0 { // the lease was never held, or was deleted
		return lease.Record{Members: terms.Members}, nil
	}
	e.lastKeyRev = last[0].ModRevision
	// Only acquisitions write "terms". A lease of an older evenkeel version has no such key; then the
	// last acquisition was at the revision of "last" or before, because other calls write "last", too.
	acquiredAt := e.lastKeyRev
	if len(stored) > 0 {
		acquiredAt = stored[0].ModRevision
	}
	rec := lease.Record{
		Holder: string(last[0].Value), Epoch: e.base + acquiredAt, Stamp: strconv.FormatInt(e.lastKeyRev, 10),
		Duration: time.Duration(terms.Seconds) * time.Second, Members: terms.Members,
	}
	switch {
	case len(owner) > 0:
		rec.Holder, rec.Epoch, rec.Expiry = string(owner[0].Value), e.base+owner[0].CreateRevision, lease.NotExpired
		if rec.Holder == e.identity { // the answer to the acquisition may have been lost
			e.held = clientv3.LeaseID(owner[0].Lease)
		}
	case rec.Holder != "": // it expired without a release
		rec.Expiry = lease.Expired
	}
	return rec, nil
}

// Acquire writes all three keys at once, if no proxy holds the lease and it was not written since
// Look. The base stays as it is, unless the new epoch might then not be above seenEpoch.
func (e *Engine) Acquire(ctx context.Context, seenEpoch int64) (lease.Record, error) {
	terms := e.terms
	terms.Base = e.base
	newEpochAbove := e.base + e.storeRev // this write gets a higher revision than storeRev
	if seenEpoch > newEpochAbove {       // the store lost its data, or a guard saw a higher epoch
		terms.Base = seenEpoch
	}
	text, err := json.Marshal(terms)
	if err != nil {
		return lease.Record{}, fmt.Errorf("acquire etcd key %s: %w", e.ownerKey, err)
	}
	granted, err := e.client.Grant(ctx, terms.Seconds)
	if err != nil {
		return lease.Record{}, fmt.Errorf("grant an etcd lease: %w", err)
	}
	noOwner := clientv3.Compare(clientv3.CreateRevision(e.ownerKey), "=", 0) // the key does not exist
	unchanged := clientv3.Compare(clientv3.ModRevision(e.lastKey), "=", e.lastKeyRev)
	response, err := e.client.Txn(ctx).If(noOwner, unchanged).
		Then(clientv3.OpPut(e.ownerKey, e.identity, clientv3.WithLease(granted.ID)), clientv3.OpPut(e.lastKey, e.identity),
			clientv3.OpPut(e.termsKey, string(text))).
		Commit()
	if err != nil {
		return lease.Record{}, fmt.Errorf("acquire etcd key %s: %w", e.ownerKey, err)
	}
	if !response.Succeeded {
		_, _ = e.client.Revoke(ctx, granted.ID) // else the etcd lease expires by itself
		return lease.Record{}, lease.ErrTaken
	}
	e.held, e.lastKeyRev, e.base, e.releaseInDoubt = granted.ID, response.Header.Revision, terms.Base, false
	return lease.Record{
		Holder: e.identity, Epoch: e.base + e.lastKeyRev, Stamp: strconv.FormatInt(e.lastKeyRev, 10), Expiry: lease.NotExpired,
		Duration: time.Duration(terms.Seconds) * time.Second, Members: terms.Members,
	}, nil
}

// Renew first checks that this proxy still has the key "owner", in a call of its own, because a
// client that reaches no etcd member repeats KeepAliveOnce without a pause.
//
// A release that got no answer may still take effect, unless "last" was written since
// (releaseInDoubt). So the check then also writes "last" again.
func (e *Engine) Renew(ctx context.Context, epoch int64) error {
	acquiredAt := epoch - e.base // the revision at which this proxy created "owner"
	conditions := []clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(e.ownerKey), "=", acquiredAt)}
	var writes []clientv3.Op
	if e.releaseInDoubt {
		conditions = append(conditions, clientv3.Compare(clientv3.ModRevision(e.lastKey), "=", e.lastKeyRev))
		writes = []clientv3.Op{clientv3.OpPut(e.lastKey, e.identity)}
	}
	response, err := e.client.Txn(ctx).If(conditions...).Then(writes...).Commit()
	switch {
	case err != nil:
		return fmt.Errorf("renew etcd key %s: %w", e.ownerKey, err)
	case !response.Succeeded:
		return e.explainRefusal(ctx, epoch)
	case e.releaseInDoubt:
		e.lastKeyRev, e.releaseInDoubt = response.Header.Revision, false
	}
	if _, err := e.client.KeepAliveOnce(ctx, e.held); errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return lease.ErrLost
	} else if err != nil {
		return fmt.Errorf("renew etcd key %s: %w", e.ownerKey, err)
	}
	return nil
}

// Release deletes the key "owner" and empties the key "last", only if this proxy still has "owner"
// and "last" was not written since it was last read or written.
func (e *Engine) Release(ctx context.Context, epoch int64) error {
	e.releaseInDoubt = true      // until a later acquisition or renewal succeeds
	acquiredAt := epoch - e.base // the revision at which this proxy created "owner"
	response, err := e.client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(e.ownerKey), "=", acquiredAt),
			clientv3.Compare(clientv3.ModRevision(e.lastKey), "=", e.lastKeyRev)).
		Then(clientv3.OpDelete(e.ownerKey), clientv3.OpPut(e.lastKey, "")).
		Commit()
	switch {
	case err != nil:
		return fmt.Errorf("release etcd key %s: %w", e.ownerKey, err)
	case !response.Succeeded:
		return e.explainRefusal(ctx, epoch)
	}
	_, _ = e.client.Revoke(ctx, e.held) // else the etcd lease expires later; no key depends on it
	return nil
}

// explainRefusal returns ErrLost, or says that an earlier call of this proxy has changed the key,
// so that the next call will succeed.
func (e *Engine) explainRefusal(ctx context.Context, epoch int64) error {
	rec, err := e.Look(ctx) // also stores lastKeyRev and base for the next write
	if err != nil {
		return err
	}
	stillHeld := rec.Holder == e.identity && rec.Epoch == epoch && rec.Expiry == lease.NotExpired
	if !stillHeld {
		return lease.ErrLost
	}
	return fmt.Errorf("an earlier call of this proxy, whose answer was lost, has written etcd key %s; the next call will succeed",
		e.ownerKey)
}
