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

// Source watches the pods of one namespace.
type Source struct {
	cfg    Config
	pods   *mirror
	slices *mirror           // nil: EndpointSlices are not used
	signal chan struct{}     // a mirror may have changed
	warned map[string]string // by pod UID: logged reason why it is not used
}

// Config says which pods run engines, and what these are like.
type Config struct {
	Client    Client
	Namespace string
	Selector  string // of the pods; empty: all of the namespace
	Role      string // prefill, decode, both or aggregated; empty: the pod's label RoleLabel
	RoleLabel string
	Port      string // numbers or names of container ports, separated by commas
	Scheme    string // empty: http
	Slices    bool   // they also decide which pods get requests; false: only the pods' status
	Log       *zap.Logger
	discover.Attributes
}

// mirror holds the objects of one kind as the API server last sent them. A reflector fills it, but
// does not report failures, so the mirror records those of its calls. After one it is stale until a
// new list: a new watch is not enough, because the server may lack the version from which it is to
// begin.
type mirror struct {
	cache.Store
	reflector *cache.Reflector
	kind      string
	namespace string
	wake      func() // after each change or failure

	mu     sync.Mutex
	listed bool
	failed error // since the last list; nil: the mirror is fresh
}

// retryBackoff is shorter than client-go's own, which goes up to half a minute, so that a list
// comes soon after the server answers again.
var retryBackoff = wait.Backoff{Duration: 200 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 8, Cap: 2 * time.Second}

// listTimeout: without it, a list over a dead connection that is still open would never end.
const listTimeout = 30 * time.Second

// run discards the reflector's log, because the mirror records failures itself.
func (m *mirror) run(ctx context.Context) {
	m.reflector.RunWithContext(klog.NewContext(ctx, logr.Discard()))
}

func (m *mirror) state() (listed bool, failed error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.listed, m.failed
}

// recordFailure ignores failures by the end of ctx.
func (m *mirror) recordFailure(ctx context.Context, verb string, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	m.mu.Lock()
	m.failed = fmt.Errorf("%s %s in namespace %s: %w", verb, m.kind, m.namespace, err)
	m.mu.Unlock()
	m.wake()
}

// onEvent records an error that ends the watch, unless the server no longer has the watch's
// version: then the reflector asks for a new list.
func (m *mirror) onEvent(ctx context.Context, e watch.Event) watch.Event {
	if e.Type != watch.Error {
		return e
	}
	err := apierrors.FromObject(e.Object)
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return e
	}
	m.recordFailure(ctx, "watch", err)
	// The copy hides the type of the error: after some the reflector would not list again.
	return watch.Event{Type: watch.Error, Object: &metav1.Status{Status: metav1.StatusFailure, Message: err.Error()}}
}

// mappedWatch replaces watch.Filter, whose goroutine never ends if it has an event to send when the
// watch is stopped, such as after the end of its context.
type mappedWatch struct {
	watch.Interface
	events  chan watch.Event
	stop    sync.Once
	stopped chan struct{}
}

// mapWatch passes each event through a function. Its goroutine ends after Stop, or with w.
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

func (o *mappedWatch) ResultChan() <-chan watch.Event { return o.events }

// Stop may be called more than once.
func (o *mappedWatch) Stop() {
	o.stop.Do(func() { close(o.stopped) })
	o.Interface.Stop()
}

// Replace makes the mirror fresh.
func (m *mirror) Replace(all []any, version string) error {
	for _, o := range all {
		dropManagedFields(o)
	}
	// This fails only for an object without metadata, which the API server never sends.
	err := m.Store.Replace(all, version)
	m.mu.Lock()
	m.listed, m.failed = true, nil
	m.mu.Unlock()
	m.wake()
	return err
}

func (m *mirror) Add(o any) error {
	defer m.wake()
	return m.Store.Add(dropManagedFields(o))
}

func (m *mirror) Update(o any) error {
	defer m.wake()
	return m.Store.Update(dropManagedFields(o))
}

func (m *mirror) Delete(o any) error {
	defer m.wake()
	return m.Store.Delete(o)
}

// dropManagedFields saves memory: they are half of a pod's size.
func dropManagedFields(o any) any {
	if m, ok := o.(metav1.Object); ok {
		m.SetManagedFields(nil)
	}
	return o
}
