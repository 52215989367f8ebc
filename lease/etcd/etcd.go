// Package etcd keeps a lease as an etcd key that lives as long as an etcd lease.
//
// The package grants and renews the etcd lease itself. A Session of client/v3/concurrency would renew it in the background,
// without saying when. An owner must know when it last renewed, so that it stops in time.
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

// Connect makes a client, which connects to etcd only when it is first used.
func Connect(endpoints []string, t *tls.Config, log *zap.Logger) (*clientv3.Client, error) {
	c, err := clientv3.New(clientv3.Config{
		Endpoints: endpoints, TLS: t, DialTimeout: 5 * time.Second,
		// The client would log a warning for every failed call; a claim logs the first of them.
		Logger:            log.WithOptions(zap.IncreaseLevel(zapcore.ErrorLevel)),
		DialKeepAliveTime: 5 * time.Second, DialKeepAliveTimeout: 3 * time.Second, // the client soon notices a dead etcd member
	})
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	return c, nil
}

// Engine is one lease in three keys. It implements lease.Engine.
//
// The key owner exists while the holder's etcd lease lasts. The key last names the last holder; it is empty if the lease was given
// back. The epoch is the revision at which the acquisition wrote both keys, plus a base. A store that lost its data
// counts revisions from 1 again; the next acquisition then sets the base to the highest epoch that was seen. The key terms
// has the base, and the duration and the members of the holder's lease. A lease of an older evenkeel version has no key
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

// MaxEpoch is the highest epoch that other proxies and guards may name. It is far above the bound of a Kubernetes Lease, because an
// epoch grows with the revision of etcd, and other users of the same etcd may have raised its revision above that bound.
const MaxEpoch = 1 << 62

// terms is the value of the key terms, which an acquisition writes.
type terms struct {
	Base    int64    `json:"base,omitempty"` // an epoch is a revision of the store plus this number
	Seconds int64    `json:"seconds"`        // how long the holder's lease lasts after a renewal
	Members []string `json:"members,omitempty"`
}

var _ lease.Engine = (*Engine)(nil)

// New makes the engine of the lease with this name. identity names this process, and duration is how long its leases last.
func New(client *clientv3.Client, name, identity string, duration time.Duration, members []string) *Engine {
	return &Engine{
		client: client, ownerKey: name + "/owner", lastKey: name + "/last", termsKey: name + "/terms", identity: identity,
		terms:          terms{Seconds: int64(duration.Seconds()), Members: members},
		releaseInDoubt: true, // an earlier claim of this process may have sent a release that got no answer
	}
}

// Look reads all three keys at one revision of the store: "owner" exists while the holder's etcd lease lasts, "last" names the last holder,
// and "terms" has the base, the duration and the members of its lease. An acquisition writes all three. A release deletes "owner" and
// empties "last".
//
// An epoch is the revision of the acquisition plus the base, which keeps epochs rising after the store has lost its data and counts
// revisions from 1 again. Stamp is the revision of the last write to "last". Look also stores what the next calls need: the revisions of
// the store and of "last", the base, and the etcd lease if this process is the holder.
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
	// Only acquisitions write "terms", so its revision is that of the last acquisition. A lease of an older evenkeel version has no
	// such key; then the last acquisition was at the revision of "last" or before, because other calls write "last", too.
	acquiredAt := e.lastKeyRev
	if len(stored) > 0 {
		acquiredAt = stored[0].ModRevision
	}
	rec := lease.Record{
		Holder: string(last[0].Value), Epoch: e.base + acquiredAt, Stamp: strconv.FormatInt(e.lastKeyRev, 10),
		Duration: time.Duration(terms.Seconds) * time.Second, Members: terms.Members,
	}
	switch {
	case len(owner) > 0: // the holder's etcd lease has not expired
		rec.Holder, rec.Epoch, rec.Expiry = string(owner[0].Value), e.base+owner[0].CreateRevision, lease.NotExpired
		if rec.Holder == e.identity { // the answer to the acquisition, with the id of the etcd lease, may have been lost
			e.held = clientv3.LeaseID(owner[0].Lease)
		}
	case rec.Holder != "": // the key owner has expired, and was not deleted by a release
		rec.Expiry = lease.Expired
	}
	return rec, nil
}

// Acquire takes the lease, if no proxy holds it and it was not written since Look. It writes all three keys at once (see Look).
//
// The new epoch is the revision of this write plus the base. The base stays as it is, unless the new epoch might then not be above
// seenEpoch, the highest epoch that this proxy knows of.
func (e *Engine) Acquire(ctx context.Context, seenEpoch int64) (lease.Record, error) {
	terms := e.terms
	terms.Base = e.base
	newEpochAbove := e.base + e.storeRev // storeRev is the store's revision at the last Look, and this write gets a higher one
	if seenEpoch > newEpochAbove {       // the store lost its data, or an engine's guard saw a higher epoch
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
	if !response.Succeeded { // a proxy holds the lease, or it was written since Look
		_, _ = e.client.Revoke(ctx, granted.ID) // if the call fails, the etcd lease expires by itself
		return lease.Record{}, lease.ErrTaken
	}
	e.held, e.lastKeyRev, e.base, e.releaseInDoubt = granted.ID, response.Header.Revision, terms.Base, false
	return lease.Record{
		Holder: e.identity, Epoch: e.base + e.lastKeyRev, Stamp: strconv.FormatInt(e.lastKeyRev, 10), Expiry: lease.NotExpired,
		Duration: time.Duration(terms.Seconds) * time.Second, Members: terms.Members,
	}, nil
}

// Renew checks that this proxy still has the key "owner", and then prolongs the key's etcd lease. The check is a call of its own, and comes
// first, because a client that reaches no etcd member repeats KeepAliveOnce without a pause.
//
// A release deletes the key "owner" and empties the key "last", if "last" was not written since this proxy read or wrote it (lastKeyRev). A
// release that got no answer may still do so later (releaseInDoubt). So the check then also writes "last" again: after this, the release
// finds another revision of "last", and changes nothing.
func (e *Engine) Renew(ctx context.Context, epoch int64) error {
	acquiredAt := epoch - e.base // the revision at which this proxy created the key "owner": an epoch is this revision plus the base
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
	case e.releaseInDoubt: // the write above has ended the doubt
		e.lastKeyRev, e.releaseInDoubt = response.Header.Revision, false
	}
	if _, err := e.client.KeepAliveOnce(ctx, e.held); errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return lease.ErrLost
	} else if err != nil {
		return fmt.Errorf("renew etcd key %s: %w", e.ownerKey, err)
	}
	return nil
}

// Release deletes the key "owner" and empties the key "last", which names the last holder. It does so only if this proxy still has the key
// "owner", and if the key "last" was not written since the engine last read or wrote it. Renew writes that key after a failed release, so
// that the release changes nothing if etcd carries it out only then.
func (e *Engine) Release(ctx context.Context, epoch int64) error {
	e.releaseInDoubt = true      // a failed release may still take effect until a later acquisition or renewal succeeds
	acquiredAt := epoch - e.base // the revision at which this proxy created the key "owner": an epoch is this revision plus the base
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
	_, _ = e.client.Revoke(ctx, e.held) // no key depends on this etcd lease any more; if the call fails, the etcd lease expires later
	return nil
}

// explainRefusal reads the lease after a write failed because a key had changed. It returns ErrLost if this proxy no longer holds the
// lease. Otherwise, an earlier call of this proxy has changed the key. Then it returns an error that says that the next call will succeed.
func (e *Engine) explainRefusal(ctx context.Context, epoch int64) error {
	rec, err := e.Look(ctx) // also stores lastKeyRev and base, so that the next write compares with them
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
