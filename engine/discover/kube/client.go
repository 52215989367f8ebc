package kube

import (
	"context"
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
)

// Kinds of objects that a Source asks for.
const (
	Pods   = "pods"
	Slices = "endpointslices"
)

// Client lists and watches the objects of a kind in a namespace.
type Client interface {
	List(ctx context.Context, kind, namespace string, o metav1.ListOptions) (runtime.Object, error)
	Watch(ctx context.Context, kind, namespace string, o metav1.ListOptions) (watch.Interface, error)
}

// server is the Client of an API server. client-go's clientset would do, but it registers every type of Kubernetes
// when the program starts. That takes tens of megabytes, also for operators who do not use Kubernetes.
type server struct {
	core, discovery rest.Interface
	params          runtime.ParameterCodec
}

// NewClient returns a client of an API server.
func NewClient(cfg *rest.Config) (Client, error) {
	s := &server{}
	types := runtime.NewScheme()
	metav1.AddToGroupVersion(types, schema.GroupVersion{Version: "v1"}) // for Status, with which a server describes a failure
	s.params = runtime.NewParameterCodec(types)
	for _, group := range []struct {
		path string
		of   schema.GroupVersion
		add  func(*runtime.Scheme) error
		into *rest.Interface
	}{
		{"/api", corev1.SchemeGroupVersion, corev1.AddToScheme, &s.core},
		{"/apis", discoveryv1.SchemeGroupVersion, discoveryv1.AddToScheme, &s.discovery},
	} {
		if err := group.add(types); err != nil {
			return nil, fmt.Errorf("kubernetes: %w", err)
		}
		config := rest.CopyConfig(cfg)
		config.APIPath, config.GroupVersion,
			config.NegotiatedSerializer = group.path, &group.of, serializer.NewCodecFactory(types).WithoutConversion()
		config.Wrap(func(rt http.RoundTripper) http.RoundTripper { return telltale{rt} })
		var err error
		if *group.into, err = rest.RESTClientFor(config); err != nil {
			return nil, fmt.Errorf("kubernetes: %w", err)
		}
	}
	return s, nil
}

func (s *server) List(ctx context.Context, kind, namespace string, o metav1.ListOptions) (runtime.Object, error) {
	return s.get(kind, namespace, &o).Do(ctx).Get()
}

// Watch returns an error if no connection could be made. client-go treats this like a watch that ended at once
// without an error, and returns an empty watch and no error. The caller would then see no more changes, and no
// failure.
func (s *server) Watch(ctx context.Context, kind, namespace string, o metav1.ListOptions) (watch.Interface, error) {
	o.Watch = true
	var failed error
	w, err := s.get(kind, namespace, &o).Watch(context.WithValue(ctx, failureKey{}, &failed))
	if err == nil && failed != nil {
		w.Stop()
		return nil, failed
	}
	return w, err
}

// get makes a request that is sent only once. client-go would repeat it for up to 41 s if the server allows it. A
// list may not take so long. Also, the caller would not see the first answer meanwhile, although it knows better what
// to ask next: a server whose data were restored refuses every version that it does not have yet.
func (s *server) get(kind, namespace string, o *metav1.ListOptions) *rest.Request {
	client := s.core
	if kind == Slices {
		client = s.discovery
	}
	return client.Get().MaxRetries(0).Namespace(namespace).Resource(kind).VersionedParams(o, s.params)
}

// telltale is a transport that passes the error of a round trip to a caller that asked for it.
type telltale struct{ http.RoundTripper }

// failureKey is the key of the context value with which a caller asks for the error. The value is a pointer, to which
// telltale writes the error.
type failureKey struct{}

// RoundTrip implements http.RoundTripper.
func (t telltale) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := t.RoundTripper.RoundTrip(r)
	if failed, ok := r.Context().Value(failureKey{}).(*error); ok {
		*failed = err
	}
	return answer, err
}
