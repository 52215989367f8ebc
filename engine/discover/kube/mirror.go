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
	slices *mirror // nil: not heeded
	signal chan struct{}
	warned map[string]string // by pod UID: why it is not used, as logged
}

// Config of a Source.
type Config struct {
	Client    Client
	Namespace string
	Selector  string // of labels
	Role      string // prefill, decode, both or aggregated; empty: as RoleLabel of the pod says
	RoleLabel string
	Port      string // numbers or names of container ports, with commas between them
	Scheme    string // empty: http
	Slices    bool   // heed EndpointSlices
	Log       *zap.Logger
	discover.Attributes
}

// mirror holds the objects of one kind as the API server last told them. The
// reflector that fills it does not report its failures, so its calls are noted: from
// the first call that fails the mirror is stale, until a list has come. A watch that
// opens proves nothing, for it may go on from a version that is gone.
type mirror struct {
	cache.Store
	reflector *cache.Reflector
	kind      string
	namespace string
	wake      func()

	mu     sync.Mutex
	listed bool  // once at least
	failed error // since the last list; nil: the mirror is fresh
}

// pauses between two tries: once the server answers again it is asked for a list
// at once, and not after the half minute of client-go's own.
var pauses = wait.Backoff{Duration: 200 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 8, Cap: 2 * time.Second}

// listPatience is how long a list may take. Over a connection that is dead but
// still open a list would never come.
const listPatience = 30 * time.Second

// run fills the mirror until ctx ends. It drops what the reflector would log at
// each try, because the mirror notes failures itself.
func (m *mirror) run(ctx context.Context) {
	m.reflector.RunWithContext(klog.NewContext(ctx, logr.Discard()))
}

// state says whether there is a list, and what failed since it came.
func (m *mirror) state() (listed bool, failed error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.listed, m.failed
}

// keepFailure keeps a failure.
func (m *mirror) keepFailure(ctx context.Context, verb string, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	m.mu.Lock()
	m.failed = fmt.Errorf("%s %s in namespace %s: %w", verb, m.kind, m.namespace, err)
	m.mu.Unlock()
	m.wake()
}

// heard notes a watch that ends with an error. It is no failure that the version
// of the watch is gone: the list that is asked for next tells everything.
func (m *mirror) heard(ctx context.Context, e watch.Event) watch.Event {
	if e.Type != watch.Error {
		return e
	}
	err := apierrors.FromObject(e.Object)
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return e
	}
	m.keepFailure(ctx, "watch", err)
	// without its reason, for the same reason
	return watch.Event{Type: watch.Error, Object: &metav1.Status{Status: metav1.StatusFailure, Message: err.Error()}}
}

// overheard is a watch whose events pass a function. watch.Filter would do, but its goroutine stays for ever if it holds an
// event when the watch is stopped, like the last one of a watch whose context has ended.
type overheard struct {
	watch.Interface
	events  chan watch.Event
	stop    sync.Once
	stopped chan struct{}
}

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

// Replace takes over a list.
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

// Add, Update and Delete take over one event of a watch.
func (m *mirror) Add(o any) error {
	defer m.wake()
	return m.Store.Add(slim(o))
}

// Update takes over a changed object.
func (m *mirror) Update(o any) error {
	defer m.wake()
	return m.Store.Update(slim(o))
}

// Delete takes an object out.
func (m *mirror) Delete(o any) error {
	defer m.wake()
	return m.Store.Delete(o)
}

// slim drops what makes half of a pod's weight and says nothing of an engine.
func slim(o any) any {
	if m, ok := o.(metav1.Object); ok {
		m.SetManagedFields(nil)
	}
	return o
}
