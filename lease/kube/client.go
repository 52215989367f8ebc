package kube

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
)

// Client reads and writes the Lease objects of a namespace.
type Client interface {
	Get(ctx context.Context, name string, _ metav1.GetOptions) (*coordinationv1.Lease, error)
	Create(ctx context.Context, l *coordinationv1.Lease, _ metav1.CreateOptions) (*coordinationv1.Lease, error)
	Update(ctx context.Context, l *coordinationv1.Lease, _ metav1.UpdateOptions) (*coordinationv1.Lease, error)
}

// leases is the Client of an API server. It replaces client-go's clientset, which registers every
// type of Kubernetes when the program starts. This would cost 27 MiB of program size and 19 MiB of
// memory, even for users without leases.
type leases struct {
	server    rest.Interface
	namespace string
}

// NewClient returns the Client of an API server. timeout limits each request.
func NewClient(server *rest.Config, namespace string, timeout time.Duration) (Client, error) {
	cfg := rest.CopyConfig(server)
	types := runtime.NewScheme()
	// for metav1.Status, by which a server describes a failure
	metav1.AddToGroupVersion(types, schema.GroupVersion{Version: "v1"})
	if err := coordinationv1.AddToScheme(types); err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	cfg.Timeout = timeout
	cfg.APIPath, cfg.GroupVersion = "/apis", &coordinationv1.SchemeGroupVersion
	cfg.NegotiatedSerializer = serializer.NewCodecFactory(types).WithoutConversion()
	api, err := rest.RESTClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	return &leases{api, namespace}, nil
}

func (c *leases) Get(ctx context.Context, name string, _ metav1.GetOptions) (*coordinationv1.Lease, error) {
	return c.do(ctx, c.server.Get().Name(name))
}

func (c *leases) Create(ctx context.Context, l *coordinationv1.Lease, _ metav1.CreateOptions) (*coordinationv1.Lease, error) {
	return c.do(ctx, c.server.Post().Body(l))
}

func (c *leases) Update(ctx context.Context, l *coordinationv1.Lease, _ metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	return c.do(ctx, c.server.Put().Name(l.Name).Body(l))
}

// do returns the API server's errors unchanged, because callers distinguish them by their reason.
func (c *leases) do(ctx context.Context, r *rest.Request) (*coordinationv1.Lease, error) {
	var l coordinationv1.Lease
	if err := r.Namespace(c.namespace).Resource("leases").Do(ctx).Into(&l); err != nil {
		return nil, err
	}
	return &l, nil
}
