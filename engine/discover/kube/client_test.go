package kube

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// TestOnTheWire asks an API server that is an HTTP server: the paths, the
// parameters and the forms are Kubernetes' own.
func TestOnTheWire(t *testing.T) {
	const pod = `{"kind":"Pod","apiVersion":"v1","metadata":{"name":"p-0","namespace":"llm","uid":"u1"},"status":{"podIP":"10.0.0.1"}}`
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		q := r.URL.Query()
		switch asked := r.URL.Path + "?" + q.Get("labelSelector") + "&" + q.Get("watch"); asked {
		case "/api/v1/namespaces/llm/pods?app=vllm&":
			_, _ = fmt.Fprintf(w, `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"7"},"items":[%s]}`, pod)
		case "/api/v1/namespaces/llm/pods?app=vllm&true":
			if q.Get("resourceVersion") != "7" {
				t.Errorf("watched from %q", q.Get("resourceVersion"))
			}
			_, _ = fmt.Fprintf(w, `{"type":"MODIFIED","object":%s}`+"\n", pod)
		case "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices?&":
			_, _ = fmt.Fprint(w, `{"kind":"EndpointSliceList","apiVersion":"discovery.k8s.io/v1","items":[{"metadata":{"name":"s"},"addressType":"IPv4","endpoints":[{"addresses":["10.0.0.1"],"conditions":{"terminating":true}}]}]}`)
		default:
			w.WriteHeader(http.StatusForbidden)
			_, _ = fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"message":"%s is not allowed"}`, asked)
		}
	}))
	defer api.Close()
	const namespace = "llm"
	client, err := NewClient(&rest.Config{Host: api.URL})
	require.NoError(t, err)
	list, err := client.List(t.Context(), Pods, namespace, metav1.ListOptions{LabelSelector: "app=vllm"})
	require.NoError(t, err)
	require.Equal(t, "10.0.0.1", list.(*corev1.PodList).Items[0].Status.PodIP)
	w, err := client.Watch(t.Context(), Pods, namespace, metav1.ListOptions{LabelSelector: "app=vllm", ResourceVersion: "7"})
	require.NoError(t, err)
	e := <-w.ResultChan()
	require.Equal(t, "p-0", e.Object.(*corev1.Pod).Name)
	w.Stop()
	list, err = client.List(t.Context(), Slices, namespace, metav1.ListOptions{})
	require.NoError(t, err)
	require.True(t, *list.(*discoveryv1.EndpointSliceList).Items[0].Endpoints[0].Conditions.Terminating)
	_, err = client.List(t.Context(), Pods, "other", metav1.ListOptions{})
	require.True(t, errors.IsForbidden(err), "%v", err)
	require.ErrorContains(t, err, "is not allowed")
}
