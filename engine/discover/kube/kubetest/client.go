// Package kubetest lets tests use client-go's fake clientset in place of an API server.
package kubetest

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
)

// It equals kube.Slices. The tests of kube import this package, so it cannot import kube.
const slices = "endpointslices"

// Client is a kube.Client that asks the clientset API, usually the fake one.
type Client struct{ API kubernetes.Interface }

// List lists the objects of a kind, as kube.Client demands. kind is pods or endpointslices.
func (c Client) List(ctx context.Context, kind, namespace string, o metav1.ListOptions) (runtime.Object, error) {
	if kind == slices {
		return c.API.DiscoveryV1().EndpointSlices(namespace).List(ctx, o)
	}
	return c.API.CoreV1().Pods(namespace).List(ctx, o)
}

// Watch watches the objects of a kind, as kube.Client demands. kind is pods or endpointslices.
func (c Client) Watch(ctx context.Context, kind, namespace string, o metav1.ListOptions) (watch.Interface, error) {
	if kind == slices {
		return c.API.DiscoveryV1().EndpointSlices(namespace).Watch(ctx, o)
	}
	return c.API.CoreV1().Pods(namespace).Watch(ctx, o)
}

// IsWatchListSemanticsUnSupported returns true, because the fake clientset has no streamed lists.
func (Client) IsWatchListSemanticsUnSupported() bool { return true }
