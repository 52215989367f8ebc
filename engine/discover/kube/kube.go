// Package kube finds engines among the pods of a namespace, with client-go's
// informers: by label, with the role in a label. A pod is used while it is ready
// and not leaving, by its own word and by that of every EndpointSlice it is in.
//
// A pod is itself only by its UID: another with the same name, or at the same
// address, is another engine. While the API server is away nothing changes.
//
// It needs get, list and watch on pods and on discovery.k8s.io/endpointslices in
// that namespace, and nothing else.
package kube

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"evenkeel/engine/discover"
)

// Config of a Source.
type Config struct {
	Client    Client
	Namespace string
	Selector  string // of labels
	Role      string // prefill, decode or both; empty: as RoleLabel of the pod says
	RoleLabel string
	Port      string // numbers or names of container ports, with commas between them
	Scheme    string // empty: http
	Slices    bool   // heed EndpointSlices
	Log       *zap.Logger
	discover.Attributes
}

// Source watches one namespace. It implements discover.Source.
type Source struct {
	cfg    Config
	pods   cache.SharedIndexInformer
	slices cache.SharedIndexInformer // nil: not heeded
	signal chan struct{}
	warned map[string]string // by pod UID: why it is not used, as logged

	mu     sync.Mutex
	failed map[string]error // by kind: why the API server does not tell
}

var _ discover.Source = (*Source)(nil)

// New returns a source that watches nothing yet.
func New(cfg Config) *Source {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	s := &Source{cfg: cfg, signal: make(chan struct{}, 1), warned: map[string]string{}, failed: map[string]error{}}
	s.pods = s.informer(Pods, &corev1.Pod{}, cfg.Selector)
	if cfg.Slices {
		s.slices = s.informer(Slices, &discoveryv1.EndpointSlice{}, "")
	}
	return s
}

// informer mirrors one kind of object. What becomes of its calls is noted, for
// informers tell nobody when they work again.
func (s *Source) informer(kind string, object runtime.Object, selector string) cache.SharedIndexInformer {
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = selector
			all, err := s.cfg.Client.List(ctx, kind, s.cfg.Namespace, o)
			s.note(ctx, kind, "list", err)
			return all, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = selector
			w, err := s.cfg.Client.Watch(ctx, kind, s.cfg.Namespace, o)
			s.note(ctx, kind, "watch", err)
			return w, err
		},
	}
	i := cache.NewSharedIndexInformer(cache.ToListWatcherWithWatchListSemantics(lw, s.cfg.Client), object, 0, cache.Indexers{})
	// Both fail only on an informer that was started.
	_ = i.SetWatchErrorHandlerWithContext(func(context.Context, *cache.Reflector, error) {}) // noted already; the default one writes to stderr
	_ = i.SetTransform(func(o any) (any, error) {
		if m, ok := o.(metav1.Object); ok {
			m.SetManagedFields(nil) // half of what a pod weighs
		}
		return o, nil
	})
	_, _ = i.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { s.wake() }, UpdateFunc: func(any, any) { s.wake() }, DeleteFunc: func(any) { s.wake() },
	})
	return i
}

func (s *Source) wake() {
	select {
	case s.signal <- struct{}{}:
	default: // many changes are one look
	}
}

func (s *Source) note(ctx context.Context, kind, verb string, err error) {
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		err = fmt.Errorf("%s %s in namespace %s: %w", verb, kind, s.cfg.Namespace, err)
	}
	s.mu.Lock()
	s.failed[kind] = err
	s.mu.Unlock()
	s.wake()
}

func (s *Source) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(s.failed[Pods], s.failed[Slices])
}

// Name is kubernetes:, the namespace, the selector and, if it is fixed, the role.
func (s *Source) Name() string {
	name := "kubernetes:" + s.cfg.Namespace + "/" + s.cfg.Selector
	if s.cfg.Role != "" {
		name += " " + s.cfg.Role
	}
	return name
}

// Run mirrors pods and slices until ctx ends.
func (s *Source) Run(ctx context.Context, tell func([]discover.Engine, error)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	mirrors := []cache.SharedIndexInformer{s.pods}
	if s.slices != nil {
		mirrors = append(mirrors, s.slices)
	}
	for _, i := range mirrors {
		wg.Go(func() { i.RunWithContext(ctx) })
		wg.Go(func() { // the end of the first list may bring no event
			if cache.WaitForCacheSync(ctx.Done(), i.HasSynced) {
				s.wake()
			}
		})
	}
	var last []discover.Engine
	for {
		select {
		case <-s.signal:
		case <-ctx.Done():
			return
		}
		failure := s.failure()
		if synced := !slices.ContainsFunc(mirrors, func(i cache.SharedIndexInformer) bool { return !i.HasSynced() }); synced {
			// One mirror may tell of a pod that leaves while the other is behind.
			if list := s.list(); failure == nil || !slices.Equal(list, last) {
				tell(list, nil)
				last = list
			}
		}
		if failure != nil {
			tell(nil, failure)
		}
	}
}

// list is what the mirrors hold.
func (s *Source) list() (list []discover.Engine) {
	var seen []*discoveryv1.EndpointSlice
	if s.slices != nil {
		for _, o := range s.slices.GetStore().List() {
			if slice, ok := o.(*discoveryv1.EndpointSlice); ok {
				seen = append(seen, slice)
			}
		}
	}
	stands := standings(seen)
	warned := map[string]string{}
	for _, o := range s.pods.GetStore().List() {
		pod, ok := o.(*corev1.Pod)
		if !ok {
			continue
		}
		uid := string(pod.UID)
		engines, err := s.cfg.engines(pod, stands[uid])
		if err != nil {
			warned[uid] = err.Error()
			if s.warned[uid] != err.Error() {
				s.cfg.Log.Warn("discovery: a pod is not used", zap.String("pod", pod.Name), zap.String("namespace", pod.Namespace), zap.Error(err))
			}
		}
		list = append(list, engines...)
	}
	s.warned = warned
	slices.SortFunc(list, func(a, b discover.Engine) int { return strings.Compare(a.Key()+a.Incarnation, b.Key()+b.Incarnation) })
	return list
}
