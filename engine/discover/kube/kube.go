// Package kube finds engines among the pods of a namespace, with client-go's reflectors. A label
// selector selects the pods. Their role is configured, or is a label. A pod gets requests while its
// own status and every EndpointSlice that lists it say that it is ready and not terminating.
//
// Only the UID identifies a pod. While the API server cannot be reached, nothing changes.
//
// The package needs only the permissions get, list and watch on pods and on
// discovery.k8s.io/endpointslices in the namespace.
package kube

import (
	"context"
	"errors"
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

var _ discover.Source = (*Source)(nil)

// New makes no request; Run does.
func New(cfg Config) *Source {
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	s := &Source{cfg: cfg, signal: make(chan struct{}, 1), warned: map[string]string{}}
	s.pods = s.mirror(Pods, &corev1.Pod{}, cfg.Selector)
	if cfg.Slices {
		s.slices = s.mirror(Slices, &discoveryv1.EndpointSlice{}, "")
	}
	return s
}

func (s *Source) wake() {
	select {
	case s.signal <- struct{}{}:
	default: // Run will read the mirrors anyway
	}
}

// Name returns "kubernetes:", the namespace, the selector and a configured role.
func (s *Source) Name() string {
	name := "kubernetes:" + s.cfg.Namespace + "/" + s.cfg.Selector
	if s.cfg.Role != "" {
		name += " " + s.cfg.Role
	}
	return name
}

// Run reports the engines after each change, once each mirror has a list.
func (s *Source) Run(ctx context.Context, report func([]discover.Engine, error)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	mirrors := []*mirror{s.pods}
	if s.slices != nil {
		mirrors = append(mirrors, s.slices)
	}
	for _, m := range mirrors {
		wg.Go(func() { m.run(ctx) })
	}
	var lastList []discover.Engine
	for {
		select {
		case <-s.signal:
		case <-ctx.Done():
			return
		}
		complete, failure := true, error(nil)
		for _, m := range mirrors {
			listed, err := m.state()
			complete, failure = complete && listed, errors.Join(failure, err)
		}
		var newList []discover.Engine // nil: the last list stays
		if complete {
			// A changed list counts even with a failure: one mirror may show that a pod leaves while the
			// other is stale.
			if list := s.list(); failure == nil || !slices.Equal(list, lastList) {
				newList, lastList = append([]discover.Engine{}, list...), list // not nil, even if empty
			}
		}
		if complete || failure != nil { // otherwise a mirror waits for its first list
			report(newList, failure)
		}
	}
}

// list is sorted by key. It logs each new reason why a pod is not used.
func (s *Source) list() (list []discover.Engine) {
	var endpointSlices []*discoveryv1.EndpointSlice
	if s.slices != nil {
		for _, o := range s.slices.List() {
			if slice, ok := o.(*discoveryv1.EndpointSlice); ok {
				endpointSlices = append(endpointSlices, slice)
			}
		}
	}
	states := statesBySlices(endpointSlices)
	warned := map[string]string{}
	for _, o := range s.pods.List() {
		pod, ok := o.(*corev1.Pod)
		if !ok {
			continue
		}
		uid := string(pod.UID)
		engines, err := s.cfg.engines(pod, states[uid])
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

func (s *Source) mirror(kind string, object runtime.Object, selector string) *mirror {
	m := &mirror{Store: cache.NewStore(cache.MetaNamespaceKeyFunc), kind: kind, namespace: s.cfg.Namespace, wake: s.wake}
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = selector
			limited, cancel := context.WithTimeout(ctx, listTimeout)
			defer cancel()
			all, err := s.cfg.Client.List(limited, kind, m.namespace, o)
			m.recordFailure(ctx, "list", err)
			return all, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = selector
			w, err := s.cfg.Client.Watch(ctx, kind, m.namespace, o)
			if err != nil {
				// With SendInitialEvents this was a streamed list; the reflector tries a plain one next.
				if o.SendInitialEvents == nil {
					m.recordFailure(ctx, "watch", err)
				}
				// The copy hides the type of the error: after some the reflector would not list again.
				return nil, errors.New(err.Error())
			}
			return mapWatch(w, func(e watch.Event) watch.Event { return m.onEvent(ctx, e) }), nil
		},
	}
	backoff := retryBackoff
	watched := cache.ToListWatcherWithWatchListSemantics(lw, s.cfg.Client)
	m.reflector = cache.NewReflectorWithOptions(watched, object, m, cache.ReflectorOptions{Name: kind, Backoff: &backoff})
	return m
}
