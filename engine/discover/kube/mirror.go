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

// Source watches one namespace. It implements discover.Source.
type Source struct {
	cfg    Config
	pods   *mirror
	slices *mirror // nil: EndpointSlices are not used
	signal chan struct{}
	warned map[string]string // by pod UID: why the pod is not used, as it was logged
}

// Config of a Source.
type Config struct {
	Client    Client
	Namespace string
	Selector  string // of labels
	Role      string // prefill, decode, both or aggregated; empty: the pod's label RoleLabel has it
	RoleLabel string
	Port      string // numbers or names of container ports, separated by commas
	Scheme    string // empty: http
	Slices    bool   // use EndpointSlices
	Log       *zap.Logger
	discover.Attributes
}

// mirror holds the objects of one kind as the API server last sent them. The reflector that fills it does not report
// its failures, so the mirror records the calls' failures itself. From the first failed call on the mirror is stale,
// until a list has come. A watch that opens is no proof that the mirror is fresh, because it may go on from a version
// that is gone.
type mirror struct {
	cache.Store
	reflector *cache.Reflector
	kind      string
	namespace string
	wake      func()

	mu     sync.Mutex
	listed bool  // a list has come at least once
	failed error // last failure since the last list; nil: the mirror is fresh
}

// pauses are the times between two tries. They are short, so that the mirror asks for a list soon after the server
// answers again; client-go's own pauses go up to half a minute.
var pauses = wait.Backoff{Duration: 200 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 8, Cap: 2 * time.Second}

// listPatience bounds how long a list may take. Without it, a list over a connection that is dead but still open
// would never end.
const listPatience = 30 * time.Second

// run fills the mirror until ctx ends. It drops what the reflector would log at each try, because the mirror records
// failures itself.
func (m *mirror) run(ctx context.Context) {
	m.reflector.RunWithContext(klog.NewContext(ctx, logr.Discard()))
}

// state says whether a list has come, and returns the failure since then.
func (m *mirror) state() (listed bool, failed error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.listed, m.failed
}

// keepFailure records a failure of a call.
func (m *mirror) keepFailure(ctx context.Context, verb string, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	m.mu.Lock()
	m.failed = fmt.Errorf("%s %s in namespace %s: %w", verb, m.kind, m.namespace, err)
	m.mu.Unlock()
	m.wake()
}

// heard records a watch that ends with an error. If the error is that the version of the watch is gone, it is no
// failure: the list that the reflector asks for next has everything.
func (m *mirror) heard(ctx context.Context, e watch.Event) watch.Event {
	if e.Type != watch.Error {
		return e
	}
	err := apierrors.FromObject(e.Object)
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return e
	}
	m.keepFailure(ctx, "watch", err)
	// without the error's kind, as for a failed watch in Source.mirror
	return watch.Event{Type: watch.Error, Object: &metav1.Status{Status: metav1.StatusFailure, Message: err.Error()}}
}

// overheard is a watch whose events pass through a function. watch.Filter would do, but its goroutine stays for ever
// if it holds an event when the watch is stopped, such as the last event of a watch whose context has ended.
type overheard struct {
	watch.Interface
	events  chan watch.Event
	stop    sync.Once
	stopped chan struct{}
}

// overhear returns a watch whose events are those of w, passed through each.
func overhear(w watch.Interface, each func(watch.Event) watch.Event) *overheard {
	o := &overheard{Interface: w, events: make(chan watch.Event), stopped: make(chan struct{})}
	go func() {
		defer close(o.events)
		for e := range w.ResultChan() {
			select {
			case o.events <- each(e):
			case <-o.stopped:
				return
			}
		}
	}()
	return o
}

// ResultChan implements watch.Interface.
func (o *overheard) ResultChan() <-chan watch.Event { return o.events }

// Stop implements watch.Interface.
func (o *overheard) Stop() {
	o.stop.Do(func() { close(o.stopped) })
	o.Interface.Stop()
}

// Replace takes over the objects of a list.
func (m *mirror) Replace(all []any, version string) error {
	for _, o := range all {
		slim(o)
	}
	err := m.Store.Replace(all, version)
	m.mu.Lock()
	m.listed, m.failed = true, nil
	m.mu.Unlock()
	m.wake()
	return err
}

// Add keeps an object that is new on the API server, and wakes the Source, which then looks at the mirror again.
func (m *mirror) Add(o any) error {
	defer m.wake()
	return m.Store.Add(slim(o))
}

// Update keeps the new state of an object, and wakes the Source, which then looks at the mirror again.
func (m *mirror) Update(o any) error {
	defer m.wake()
	return m.Store.Update(slim(o))
}

// Delete removes an object that the API server has deleted, and wakes the Source, which then looks at the mirror again.
func (m *mirror) Delete(o any) error {
	defer m.wake()
	return m.Store.Delete(o)
}

// slim drops the managed fields, which are half of a pod's size and say nothing about an engine.
func slim(o any) any {
	if m, ok := o.(metav1.Object); ok {
		m.SetManagedFields(nil)
	}
	return o
}
