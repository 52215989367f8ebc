// Package cluster finds the Kubernetes API server and the namespace that one
// means, for whoever talks to it: about leases, about pods.
package cluster

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// ownNamespace is where a pod reads which namespace it is in.
const ownNamespace = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// Find says how the API server is reached, by a kubeconfig or, without one, as a
// pod is told, and which namespace is meant: the one that is named, else that of
// the kubeconfig or of this pod.
func Find(kubeconfig, namespace string) (*rest.Config, string, error) {
	var cfg *rest.Config
	var err error
	own := func() (string, error) { return read(ownNamespace) }
	if kubeconfig == "" {
		cfg, err = rest.InClusterConfig()
	} else {
		file := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(&clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig}, &clientcmd.ConfigOverrides{})
		cfg, err = file.ClientConfig()
		own = func() (string, error) {
			namespace, _, err := file.Namespace()
			return namespace, err
		}
	}
	if err != nil {
		return nil, "", fmt.Errorf("kubernetes: %w; outside of a cluster a kubeconfig is needed", err)
	}
	if namespace == "" {
		if namespace, err = own(); err != nil {
			return nil, "", fmt.Errorf("kubernetes: which namespace is ours is not known: %w; write it in the config", err)
		}
	}
	return cfg, namespace, nil
}

// read reads a namespace from a file.
func read(file string) (string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	namespace := strings.TrimSpace(string(text))
	if namespace == "" {
		return "", errors.New(file + " is empty")
	}
	return namespace, nil
}
