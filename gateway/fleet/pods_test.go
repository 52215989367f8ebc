package fleet_test

import (
	"fmt"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/engine/discover"
	"evenkeel/engine/discover/kube"
	"evenkeel/engine/discover/kube/kubetest"
	"evenkeel/gateway/config"
)

// podOf is a pod that runs a reference engine.
func podOf(t *testing.T, e *refengine.Engine, name, role string) *corev1.Pod {
	t.Helper()
	host, port, err := net.SplitHostPort(refclient.AddressOf(e))
	require.NoError(t, err)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: "llm", UID: types.UID("uid-" + name), Labels: map[string]string{"app": "vllm", "evenkeel.io/role": role},
			Annotations: map[string]string{"evenkeel.io/port": port, "evenkeel.io/slots": fmt.Sprint(e.Config().Slots)},
		},
		Status: corev1.PodStatus{PodIP: host, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
}

// A pod that an EndpointSlice calls terminating gets no traffic, and what runs
// there goes on; the pod that comes in its place takes the rest.
func TestATerminatingPodGetsNoTraffic(t *testing.T) {
	t.Parallel()
	var api *fake.Clientset
	b := start(t, options{dirty: true, decode: []refengine.Config{{}}, discover: func(b *bed) []discover.Source {
		api = fake.NewClientset(podOf(t, b.Prefill[0], "p-0", "prefill"), podOf(t, b.Decode[0], "d-0", "decode"))
		return []discover.Source{kube.New(kube.Config{
			Client: kubetest.Client{API: api}, Namespace: "llm", Selector: "app=vllm", RoleLabel: "evenkeel.io/role", Port: "8000", Slices: true,
		})}
	}})
	leave := b.Endless()
	stop := b.KeepAsking(4)
	next := b.Engine(refengine.Config{Role: refengine.Decode})
	b.Decode = append(b.Decode, next)
	_, err := api.CoreV1().Pods("llm").Create(t.Context(), podOf(t, next, "d-1", "decode"), metav1.CreateOptions{})
	require.NoError(t, err)
	b.Eventually("the new pod is in use", b.inUse(next))

	_, err = api.DiscoveryV1().EndpointSlices("llm").Create(t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "decode-x", Namespace: "llm"},
		Endpoints: []discoveryv1.Endpoint{{
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", UID: "uid-d-0"},
			Conditions: discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)},
		}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	old := refclient.AddressOf(b.Decode[0])
	b.Eventually("only the endless answer is left on the old one", func() bool {
		used, _, up := b.used(old)
		return b.status(old).Away == discover.Leaving && !up && used == 1
	})
	before := b.Decode[0].Stats().Decodes
	sofar := next.Stats().Decodes
	b.Eventually("others go on", func() bool { return next.Stats().Decodes > sofar+10 })
	require.Equal(t, before, b.Decode[0].Stats().Decodes)
	used, _, _ := b.used(old)
	require.Equal(t, 1, used, "what ran there runs on")
	leave()
	b.Eventually("it has nothing left", func() bool { return b.released(old) })
	require.NoError(t, api.CoreV1().Pods("llm").Delete(t.Context(), "d-0", metav1.DeleteOptions{}))
	b.Eventually("it is gone", func() bool { return b.status(old).ID == "" })
	require.Positive(t, stop())
}

// Pods whose label, or whose source, says that they are aggregated serve requests alone, and so
// does one that comes later. They are never half of a pair.
func TestAggregatedPodsServeAlone(t *testing.T) {
	t.Parallel()
	for name, source := range map[string]kube.Config{
		"their labels say so":  {RoleLabel: "evenkeel.io/role"},
		"their source says so": {Role: discover.Aggregated},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			label := ""
			if source.Role == "" {
				label = discover.Aggregated
			}
			pod := func(e *refengine.Engine, name string) *corev1.Pod {
				p := podOf(t, e, name, label)
				p.Annotations["evenkeel.io/token-budget"] = "4096"
				return p
			}
			var api *fake.Clientset
			b := start(t, options{
				mixed:     []refengine.Config{{}},
				configure: func(cfg *config.Config) { cfg.ExposeRoute = true },
				discover: func(b *bed) []discover.Source {
					api = fake.NewClientset(pod(b.Decode[0], "a-0"))
					source.Client, source.Namespace, source.Selector, source.Port = kubetest.Client{API: api}, "llm", "app=vllm", "8000"
					return []discover.Source{kube.New(source)}
				},
			})
			require.Equal(t, discover.Aggregated, b.status(refclient.AddressOf(b.Decode[0])).Role)
			serves := func(e *refengine.Engine) bool {
				before := e.Stats().Requests
				_, route := b.Say(talk(`"stream":true,`, reftext.MakePrompt(1, 30)))
				require.Equal(t, "aggregated", route)
				return e.Stats().Requests > before
			}
			require.True(t, serves(b.Decode[0]))

			next := b.Engine(refengine.Config{Role: refengine.Aggregated})
			b.Decode = append(b.Decode, next)
			_, err := api.CoreV1().Pods("llm").Create(t.Context(), pod(next, "a-1"), metav1.CreateOptions{})
			require.NoError(t, err)
			b.Eventually("the new pod is in use", b.inUse(next))
			require.NoError(t, api.CoreV1().Pods("llm").Delete(t.Context(), "a-0", metav1.DeleteOptions{}))
			old := refclient.AddressOf(b.Decode[0])
			b.Eventually("the first one is gone", func() bool { return b.status(old).ID == "" })
			for range 5 {
				require.True(t, serves(next))
			}
			for _, e := range b.now().Engines {
				require.Equal(t, discover.Aggregated, e.Role)
			}
			require.Zero(t, next.Stats().Probes)
		})
	}
}
