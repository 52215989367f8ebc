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

// Kinds of objects that a Source reads.
const (
	Pods   = "pods"
	Slices = "endpointslices"
)

// Client lists and watches objects of one kind.
type Client interface {
	List(ctx context.Context, kind, namespace string, o metav1.ListOptions) (runtime.Object, error)
	Watch(ctx context.Context, kind, namespace string, o metav1.ListOptions) (watch.Interface, error)
}

// server asks an API server. It does without client-go's clientset, which registers every type of
// Kubernetes when the program starts: tens of megabytes, even for operators who do not use
// Kubernetes.
type server struct {
	core, discovery rest.Interface
	params          runtime.ParameterCodec
}

// NewClient asks the API server in cfg.
func NewClient(cfg *rest.Config) (Client, error) {
	s := &server{}
	types := runtime.NewScheme()
	// This adds the type Status, by which a server describes a failure.
	metav1.AddToGroupVersion(types, schema.GroupVersion{Version: "v1"})
	s.params = runtime.NewParameterCodec(types)
	for _, group := range []struct {
		path       string // of requests
		version    schema.GroupVersion
		addTypes   func(*runtime.Scheme) error
		restClient *rest.Interface // where to store the client
	}{
		{"/api", corev1.SchemeGroupVersion, corev1.AddToScheme, &s.core},
		{"/apis", discoveryv1.SchemeGroupVersion, discoveryv1.AddToScheme, &s.discovery},
	} {
		if err := group.addTypes(types); err != nil {
			return nil, fmt.Errorf("kubernetes: %w", err)
		}
		config := rest.CopyConfig(cfg)
		config.APIPath, config.GroupVersion = group.path, &group.version
		config.NegotiatedSerializer = serializer.NewCodecFactory(types).WithoutConversion()
		config.Wrap(func(rt http.RoundTripper) http.RoundTripper { return errorRecorder{rt} })
		var err error
		if *group.restClient, err = rest.RESTClientFor(config); err != nil {
			return nil, fmt.Errorf("kubernetes: %w", err)
		}
	}
	return s, nil
}

func (s *server) List(ctx context.Context, kind, namespace string, o metav1.ListOptions) (runtime.Object, error) {
	return s.get(kind, namespace, &o).Do(ctx).Get()
}

// Watch returns an error if no connection could be made. client-go would return an empty watch and
// no error, as if it had ended at once, and the caller would not notice.
func (s *server) Watch(ctx context.Context, kind, namespace string, o metav1.ListOptions) (watch.Interface, error) {
	o.Watch = true
	var failed error // errorRecorder stores it
	w, err := s.get(kind, namespace, &o).Watch(context.WithValue(ctx, failureKey{}, &failed))
	if err == nil && failed != nil {
		w.Stop()
		return nil, failed
	}
	return w, err
}

// get prepares a request that is sent only once. By default client-go repeats a refused one for up
// to 41 s, unseen by the caller. But a server whose data were restored from a backup refuses a
// resource version that it does not have yet, and the caller must then ask without one.
func (s *server) get(kind, namespace string, o *metav1.ListOptions) *rest.Request {
	client := s.core
	if kind == Slices {
		client = s.discovery
	}
	return client.Get().MaxRetries(0).Namespace(namespace).Resource(kind).VersionedParams(o, s.params)
}

// errorRecorder stores the error of a round trip for the caller (failureKey).
type errorRecorder struct{ http.RoundTripper }

// failureKey is a context key; the value is a pointer to an error variable.
type failureKey struct{}

func (t errorRecorder) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := t.RoundTripper.RoundTrip(r)
	if failed, ok := r.Context().Value(failureKey{}).(*error); ok {
		*failed = err
	}
	return answer, err
}
