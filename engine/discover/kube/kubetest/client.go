// Package kubetest makes client-go's fake clientset the API server of tests.
package kubetest

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
)

const slices = "endpointslices" // same as kube.Slices; that package's own tests use this package, so it is not imported

// Client is a kube.Client that asks a clientset.
type Client struct{ API kubernetes.Interface }

// List implements kube.Client.
func (c Client) List(ctx context.Context, kind, namespace string, o metav1.ListOptions) (runtime.Object, error) {
	if kind == slices {
		return c.API.DiscoveryV1().EndpointSlices(namespace).List(ctx, o)
	}
	return c.API.CoreV1().Pods(namespace).List(ctx, o)
}

// Watch implements kube.Client.
func (c Client) Watch(ctx context.Context, kind, namespace string, o metav1.ListOptions) (watch.Interface, error) {
	if kind == slices {
		return c.API.DiscoveryV1().EndpointSlices(namespace).Watch(ctx, o)
	}
	return c.API.CoreV1().Pods(namespace).Watch(ctx, o)
}

// IsWatchListSemanticsUnSupported says that the fake has no streamed lists.
func (Client) IsWatchListSemanticsUnSupported() bool { return true }
