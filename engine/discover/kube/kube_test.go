package kube

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
	"k8s.io/utils/clock"

	"evenkeel/engine/discover"
	"evenkeel/engine/discover/kube/kubetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 30 * time.Second

// site is an API server and a source that watches it.
type site struct {
	*testing.T
	api  *fake.Clientset
	logs *observer.ObservedLogs
	away atomic.Bool

	mu      sync.Mutex
	watches map[string]watch.Interface // by resource, as they run
	list    []discover.Engine
	err     error
	good    int // lists told
}

var errAway = errors.New("connection refused")

func open(t *testing.T, cfg Config, away bool, objects ...runtime.Object) *site {
	t.Helper()
	s := &site{T: t, api: fake.NewClientset(objects...), watches: map[string]watch.Interface{}}
	s.away.Store(away)
	s.api.PrependReactor("list", "*", func(ktesting.Action) (bool, runtime.Object, error) {
		return s.away.Load(), nil, errAway
	})
	s.api.PrependWatchReactor("*", func(a ktesting.Action) (bool, watch.Interface, error) {
		if s.away.Load() {
			return true, nil, errAway
		}
		w, err := s.api.Tracker().Watch(a.GetResource(), a.GetNamespace())
		s.mu.Lock()
		defer s.mu.Unlock()
		s.watches[a.GetResource().Resource] = w
		return true, w, err
	})
	core, logs := observer.New(zap.WarnLevel)
	s.logs = logs
	cfg.Client, cfg.Namespace, cfg.Selector, cfg.Slices, cfg.Log = kubetest.Client{API: s.api}, "llm", "app=vllm", true, zap.New(core)
	if cfg.Port == "" {
		cfg.Port = "http"
	}
	if cfg.Role == "" {
		cfg.RoleLabel = "evenkeel.io/role"
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		New(cfg).Run(ctx, func(list []discover.Engine, err error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.err = err; err == nil || list != nil {
				s.list = list
				s.good++
			}
		})
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	if !away {
		s.until("both are watched", func() bool { return len(s.watches) == 2 })
	}
	return s
}

func (s *site) until(what string, ok func() bool) {
	s.Helper()
	require.Eventually(s, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return ok()
	}, patience, time.Millisecond, what)
}

// becomes waits for a list: role, URL, UID and why it is away, by engine.
func (s *site) becomes(want ...string) {
	s.Helper()
	if want == nil {
		want = []string{}
	}
	require.EventuallyWithT(s, func(t *assert.CollectT) {
		s.mu.Lock()
		defer s.mu.Unlock()
		got := []string{}
		for _, e := range s.list {
			line := e.Role + " " + e.URL + " " + e.Incarnation
			if e.Away != "" {
				line += " " + e.Away
			}
			got = append(got, line)
		}
		require.Equal(t, want, got)
	}, patience, time.Millisecond)
}

func (s *site) do(err error) {
	s.Helper()
	require.NoError(s, err)
}

func (s *site) create(p *corev1.Pod) {
	s.Helper()
	_, err := s.api.CoreV1().Pods("llm").Create(s.Context(), p, metav1.CreateOptions{})
	s.do(err)
}

func (s *site) update(p *corev1.Pod) {
	s.Helper()
	_, err := s.api.CoreV1().Pods("llm").Update(s.Context(), p, metav1.UpdateOptions{})
	s.do(err)
}

func (s *site) remove(p *corev1.Pod) {
	s.Helper()
	s.do(s.api.CoreV1().Pods("llm").Delete(s.Context(), p.Name, metav1.DeleteOptions{}))
}

func pod(name, uid, ip, role string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "llm", UID: types.UID(uid),
			Labels: map[string]string{"app": "vllm", "evenkeel.io/role": role}, Annotations: map[string]string{}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "engine",
			Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8000}}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip,
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
}

func with(p *corev1.Pod, change func(*corev1.Pod)) *corev1.Pod {
	p = p.DeepCopy()
	change(p)
	return p
}

func unready(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }

func terminating(p *corev1.Pod) { p.DeletionTimestamp = new(metav1.Now()) }

func slice(name string, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "llm"}, Endpoints: endpoints}
}

func endpoint(uid string, c discoveryv1.EndpointConditions) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{TargetRef: &corev1.ObjectReference{Kind: "Pod", UID: types.UID(uid)}, Conditions: c}
}

func TestTheLifeOfAPod(t *testing.T) {
	s := open(t, Config{}, false)
	starting := with(pod("d-0", "u1", "", "decode"), func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending })
	s.create(starting)
	s.becomes()
	one := pod("d-0", "u1", "10.0.0.1", "decode")
	s.update(with(one, unready))
	s.becomes("decode http://10.0.0.1:8000 u1 not ready")
	s.update(one)
	s.becomes("decode http://10.0.0.1:8000 u1")
	s.update(with(one, unready))
	s.becomes("decode http://10.0.0.1:8000 u1 not ready")
	s.update(one)
	s.becomes("decode http://10.0.0.1:8000 u1")
	s.update(with(one, terminating))
	s.becomes("decode http://10.0.0.1:8000 u1 leaving")
	s.update(with(one, func(p *corev1.Pod) { terminating(p); p.Status.Phase = corev1.PodSucceeded }))
	s.becomes()
	s.remove(one)
	s.create(pod("d-0", "u2", "10.0.0.1", "decode"))
	s.becomes("decode http://10.0.0.1:8000 u2")
}

func TestASliceMayTellFirst(t *testing.T) {
	yes, no := new(true), new(false)
	s := open(t, Config{}, false, pod("d-0", "u1", "10.0.0.1", "decode"), pod("p-0", "u2", "fd00::1", "prefill"))
	s.becomes("decode http://10.0.0.1:8000 u1", "prefill http://[fd00::1]:8000 u2")
	slices := s.api.DiscoveryV1().EndpointSlices("llm")
	first := slice("a",
		endpoint("u1", discoveryv1.EndpointConditions{Ready: no, Serving: yes, Terminating: yes}),
		endpoint("u2", discoveryv1.EndpointConditions{}),
		discoveryv1.Endpoint{})
	_, err := slices.Create(t.Context(), first, metav1.CreateOptions{})
	s.do(err)
	s.becomes("decode http://10.0.0.1:8000 u1 leaving", "prefill http://[fd00::1]:8000 u2")
	_, err = slices.Create(t.Context(), slice("b", endpoint("u2", discoveryv1.EndpointConditions{Ready: no})), metav1.CreateOptions{})
	s.do(err)
	s.becomes("decode http://10.0.0.1:8000 u1 leaving", "prefill http://[fd00::1]:8000 u2 not ready")
	first.Endpoints[0].Conditions = discoveryv1.EndpointConditions{Ready: yes, Serving: yes, Terminating: no}
	_, err = slices.Update(t.Context(), first, metav1.UpdateOptions{})
	s.do(err)
	s.becomes("decode http://10.0.0.1:8000 u1", "prefill http://[fd00::1]:8000 u2 not ready")
	s.do(slices.Delete(t.Context(), "b", metav1.DeleteOptions{}))
	s.becomes("decode http://10.0.0.1:8000 u1", "prefill http://[fd00::1]:8000 u2")
}

func TestWhileTheAPIServerIsAwayNothingChanges(t *testing.T) {
	one := pod("d-0", "u1", "10.0.0.1", "decode")
	s := open(t, Config{}, true, one)
	s.until("it says so", func() bool { return errors.Is(s.err, errAway) && s.list == nil })
	s.away.Store(false)
	s.becomes("decode http://10.0.0.1:8000 u1")
	s.until("it works", func() bool { return s.err == nil && len(s.watches) == 2 })

	s.away.Store(true)
	s.remove(one)
	s.becomes()
	s.mu.Lock()
	for resource, w := range s.watches {
		w.Stop()
		delete(s.watches, resource)
	}
	s.mu.Unlock()
	s.until("it says so again", func() bool { return errors.Is(s.err, errAway) })
	s.create(pod("d-1", "u2", "10.0.0.2", "decode"))
	s.until("the last list stays", func() bool { return len(s.list) == 0 })
	s.away.Store(false)
	s.becomes("decode http://10.0.0.2:8000 u2")
	s.until("it works again", func() bool { return s.err == nil })
}

// While the server is away a watch is tried again and again from where the last
// one ended. Once it is back such a watch opens, to be ended because its version
// is gone: that is no list, and what happened meanwhile is not known.
func TestAWatchThatOpensIsNoList(t *testing.T) {
	one := pod("d-0", "u1", "10.0.0.1", "decode")
	s := open(t, Config{}, false, one)
	s.becomes("decode http://10.0.0.1:8000 u1")
	// A watch that told nothing would be followed by a list.
	s.update(with(one, unready))
	s.becomes("decode http://10.0.0.1:8000 u1 not ready")
	_, err := s.api.DiscoveryV1().EndpointSlices("llm").Create(t.Context(),
		slice("a", endpoint("u1", discoveryv1.EndpointConditions{Terminating: new(true)})), metav1.CreateOptions{})
	require.NoError(t, err)
	s.becomes("decode http://10.0.0.1:8000 u1 leaving")

	var lists atomic.Int32
	var listing, gone atomic.Bool
	s.api.PrependReactor("list", "*", func(ktesting.Action) (bool, runtime.Object, error) {
		lists.Add(1)
		return !listing.Load(), nil, errRefused
	})
	s.api.PrependWatchReactor("*", func(ktesting.Action) (bool, watch.Interface, error) {
		if listing.Load() {
			return false, nil, nil
		}
		if !gone.Load() {
			return true, nil, errRefused
		}
		w := watch.NewFakeWithChanSize(1, false)
		w.Error(&metav1.Status{Status: metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired})
		return true, w, nil
	})
	s.mu.Lock()
	for _, w := range s.watches {
		w.Stop()
	}
	s.mu.Unlock()
	s.until("it says so", func() bool { return errors.Is(s.err, syscall.ECONNREFUSED) })
	s.mu.Lock()
	s.good = 0
	s.mu.Unlock()
	gone.Store(true)
	before := lists.Load()
	s.until("lists fail", func() bool { return lists.Load() >= before+4 })
	s.until("it never said that it works", func() bool { return s.good == 0 })
	s.create(pod("d-1", "u2", "10.0.0.2", "decode"))
	listing.Store(true)
	s.becomes("decode http://10.0.0.1:8000 u1 leaving", "decode http://10.0.0.2:8000 u2")
	s.until("it works", func() bool { return s.err == nil })
}

var errRefused error = &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}

// However long the server was away, it is asked again soon.
func TestPausesStayShort(t *testing.T) {
	backoff := retryBackoff
	pause := backoff.DelayWithReset(clock.RealClock{}, time.Hour)
	for range 100 {
		require.LessOrEqual(t, pause(), 3*time.Second)
	}
}

func TestWhatAPodSaysOfItself(t *testing.T) {
	yes := pod("x", "u", "10.0.0.1", "decode")
	note := func(key, value string) *corev1.Pod {
		return with(yes, func(p *corev1.Pod) { p.Annotations["evenkeel.io/"+key] = value })
	}
	cfg := Config{RoleLabel: "evenkeel.io/role", Port: "http", Attributes: discover.Attributes{Profile: "base", Group: "main", Slots: 8}}
	for _, row := range []struct {
		name string
		pod  *corev1.Pod
		want func(*discover.Engine)
		fail string
	}{
		{"the source's attributes", yes, func(*discover.Engine) {}, ""},
		{"a profile of its own", note("profile", "other"), func(e *discover.Engine) { e.Profile = "other" }, ""},
		{"a group", note("group", "g2"), func(e *discover.Engine) { e.Group = "g2" }, ""},
		{"slots", note("slots", "64"), func(e *discover.Engine) { e.Slots = 64 }, ""},
		{"ranks behind one port", note("ranks", "4"), func(e *discover.Engine) { e.Ranks = 4 }, ""},
		{"ranks that begin above 0", note("first-rank", "4"), func(e *discover.Engine) { e.FirstRank = 4 }, ""},
		{"KV tokens", note("kv-tokens", "1000"), func(e *discover.Engine) { e.KVTokens = 1000 }, ""},
		{"a cost", note("cost", "2"), func(e *discover.Engine) { e.Cost = 2 }, ""},
		{"a port of its own", note("port", "9000"), func(e *discover.Engine) { e.Address, e.URL = "10.0.0.1:9000", "http://10.0.0.1:9000" }, ""},
		{"what only prefill engines have is left out", note("kv-events-port", "5557"), func(*discover.Engine) {}, ""},
		{"what only aggregated engines have is left out", note("token-budget", "8192"), func(*discover.Engine) {}, ""},
		{"an engine that prefills and decodes", with(note("token-budget", "8192"), func(p *corev1.Pod) {
			p.Labels["evenkeel.io/role"], p.Annotations["evenkeel.io/prefill-schedule-interval"] = "aggregated", "2"
		}), func(e *discover.Engine) { e.Role, e.Budget, e.Interval = "aggregated", 8192, 2 }, ""},
		{"a budget that is no number", with(note("token-budget", "8k"), func(p *corev1.Pod) { p.Labels["evenkeel.io/role"] = "aggregated" }), nil, `evenkeel.io/token-budget is "8k"`},
		{"slots that are no number", note("slots", "many"), nil, `evenkeel.io/slots is "many"`},
		{"a cost below nothing", note("cost", "-1"), nil, `evenkeel.io/cost is "-1"`},
		{"a port that nothing has", note("port", "grpc"), nil, `port "grpc" is neither`},
		{"a port out of range", note("port", "70000"), nil, `port "70000" is neither`},
		{"no role", with(yes, func(p *corev1.Pod) { delete(p.Labels, "evenkeel.io/role") }), nil, `evenkeel.io/role is ""; write prefill, decode, both or aggregated`},
	} {
		t.Run(row.name, func(t *testing.T) {
			got, err := cfg.engines(row.pod, slicesState{})
			if row.fail != "" {
				require.ErrorContains(t, err, row.fail)
				require.Empty(t, got)
				return
			}
			require.NoError(t, err)
			want := discover.Engine{Role: "decode", Address: "10.0.0.1:8000", URL: "http://10.0.0.1:8000", Incarnation: "u",
				Attributes: cfg.Attributes}
			row.want(&want)
			require.Equal(t, []discover.Engine{want}, got)
		})
	}

	t.Run("both roles on several ports are an engine each", func(t *testing.T) {
		cfg := cfg
		cfg.Role, cfg.Port, cfg.Scheme = "both", "http, 8001", "https"
		got, err := cfg.engines(yes, slicesState{})
		require.NoError(t, err)
		keys := []string{}
		for _, e := range got {
			keys = append(keys, e.Role+" "+e.URL)
			require.Equal(t, e.Role == "decode", e.Group == "main")
		}
		require.Equal(t, []string{"prefill https://10.0.0.1:8000", "decode https://10.0.0.1:8000", "prefill https://10.0.0.1:8001",
			"decode https://10.0.0.1:8001"}, keys)
	})
}

func TestAPodThatCannotBeUsedIsToldOfOnce(t *testing.T) {
	bad := pod("x", "u1", "10.0.0.1", "router")
	s := open(t, Config{}, false, bad, pod("d", "u2", "10.0.0.2", "decode"))
	s.becomes("decode http://10.0.0.2:8000 u2")
	s.update(with(bad, unready))
	s.create(pod("e", "u3", "10.0.0.3", "decode"))
	s.becomes("decode http://10.0.0.2:8000 u2", "decode http://10.0.0.3:8000 u3")
	require.Equal(t, 1, s.logs.FilterMessage("discovery: a pod is not used").Len())
}
