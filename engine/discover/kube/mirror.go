package kube

import (
	"context"
	"fmt"
	"sync"
	"time"

	"evenkeel/engine/discover"

	"github.com/go-logr/logr"
	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// Source watches the pods of one namespace. It implements discover.Source.
type Source struct {
	cfg    Config
	pods   *mirror
	slices *mirror           // the mirror of the EndpointSlices; nil: they are not used
	signal chan struct{}     // holds a token while a mirror may have changed
	warned map[string]string // for each pod UID, the logged reason why the pod is not used
}

// Config says which pods of a namespace run engines, and what these engines are like.
type Config struct {
	Client    Client
	Namespace string
	Selector  string // label selector of the pods; empty: all pods of the namespace
	Role      string // prefill, decode, both or aggregated; empty: the value of the pod's label RoleLabel
	RoleLabel string
	Port      string // the engines' ports: numbers or names of container ports, separated by commas
	Scheme    string // scheme of the engines' URLs; empty: http
	Slices    bool   // EndpointSlices also decide which pods get requests; false: only the pods' own status does
	Log       *zap.Logger
	discover.Attributes
}

// mirror holds the objects of one kind as the API server last sent them. A reflector fills it. The reflector does not report
// failures, so the mirror records the failures of its calls itself. After a failed call, the mirror is stale until a new list has
// come. A new watch is not enough, because the server may not have the version any more from which the watch is to begin.
type mirror struct {
	cache.Store
	reflector *cache.Reflector
	kind      string
	namespace string
	wake      func() // called after each change or failure

	mu     sync.Mutex
	listed bool  // at least one list has come from the API server
	failed error // last failure since the last list; nil: the mirror is fresh
}

// retryBackoff are the times between two tries after a failure. They are shorter than client-go's own, which go up to half a minute, so
// that a list comes soon after the server answers again.
var retryBackoff = wait.Backoff{Duration: 200 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 8, Cap: 2 * time.Second}

// listTimeout bounds how long a list may take. Without it, a list over a dead connection that is still open
// would never end.
const listTimeout = 30 * time.Second

// run fills the mirror until ctx ends. It discards the log of the reflector, because the mirror records failures itself.
func (m *mirror) run(ctx context.Context) {
	m.reflector.RunWithContext(klog.NewContext(ctx, logr.Discard()))
}

// state says whether a list has ever come, and returns the last failure since the last list.
func (m *mirror) state() (listed bool, failed error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.listed, m.failed
}

// recordFailure records that a call failed, unless the end of ctx was the cause.
func (m *mirror) recordFailure(ctx context.Context, verb string, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	m.mu.Lock()
	m.failed = fmt.Errorf("%s %s in namespace %s: %w", verb, m.kind, m.namespace, err)
	m.mu.Unlock()
	m.wake()
}

// onEvent passes an event of a watch on, and records it as a failure if it ends the watch with an error. It is no failure if the server
// does not have the version of the watch any more, because the reflector then asks for a new list.
func (m *mirror) onEvent(ctx context.Context, e watch.Event) watch.Event {
	if e.Type != watch.Error {
		return e
	}
	err := apierrors.FromObject(e.Object)
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return e
	}
	m.recordFailure(ctx, "watch", err)
	// This copy has no type: after errors of some types the reflector would not list again.
	return watch.Event{Type: watch.Error, Object: &metav1.Status{Status: metav1.StatusFailure, Message: err.Error()}}
}

// mappedWatch is a watch whose events pass through a function. It replaces watch.Filter, whose goroutine never ends
// if it has an event to send when the watch is stopped, for example after the context of the watch has ended.
type mappedWatch struct {
	watch.Interface
	events  chan watch.Event
	stop    sync.Once
	stopped chan struct{}
}

// mapWatch returns a watch with the events of w, each passed through the function each. It starts a goroutine, which ends after Stop, or
// with w.
func mapWatch(w watch.Interface, each func(watch.Event) watch.Event) *mappedWatch {
	mapped := &mappedWatch{Interface: w, events: make(chan watch.Event), stopped: make(chan struct{})}
	go func() {
		defer close(mapped.events)
		for e := range w.ResultChan() {
			select {
			case mapped.events <- each(e):
			case <-mapped.stopped:
				return
			}
		}
	}()
	return mapped
}

// ResultChan returns the channel of the mapped events. It is closed after Stop, or once the original watch has ended.
func (o *mappedWatch) ResultChan() <-chan watch.Event { return o.events }

// Stop ends the goroutine and the original watch. It may be called more than once.
func (o *mappedWatch) Stop() {
	o.stop.Do(func() { close(o.stopped) })
	o.Interface.Stop()
}

// Replace stores the objects of a new list instead of the old ones. From now on the mirror is fresh.
func (m *mirror) Replace(all []any, version string) error {
	for _, o := range all {
		dropManagedFields(o)
	}
	err := m.Store.Replace(all, version) // fails only for an object without metadata, which the API server never sends
	m.mu.Lock()
	m.listed, m.failed = true, nil
	m.mu.Unlock()
	m.wake()
	return err
}

// Add stores an object that is new on the API server, and wakes the Source.
func (m *mirror) Add(o any) error {
	defer m.wake()
	return m.Store.Add(dropManagedFields(o))
}

// Update stores the new state of an object, and wakes the Source.
func (m *mirror) Update(o any) error {
	defer m.wake()
	return m.Store.Update(dropManagedFields(o))
}

// Delete removes an object that was deleted on the API server, and wakes the Source.
func (m *mirror) Delete(o any) error {
	defer m.wake()
	return m.Store.Delete(o)
}

// dropManagedFields removes the managed fields from an object to save memory: they are half of a pod's size, and discovery does not need
// them.
func dropManagedFields(o any) any {
	if m, ok := o.(metav1.Object); ok {
		m.SetManagedFields(nil)
	}
	return o
}
