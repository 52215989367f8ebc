// Package cluster finds the Kubernetes API server and the namespace to use. The lease store and the
// discovery of engines use this package to connect.
package cluster

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// ownNamespace is the file in every pod that holds the name of its namespace.
const ownNamespace = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// Find returns the client config for the API server and the namespace to use. The config comes from
// a kubeconfig or, without one, from the pod's service account. An empty namespace is replaced by
// that of the kubeconfig or of this pod. Find also makes client-go notice soon that the server has
// vanished, partly by environment variables of this process.
func Find(kubeconfig, namespace string) (*rest.Config, string, error) {
	var cfg *rest.Config
	var err error
	source := "this pod's service account"
	defaultNamespace := func() (string, error) { return readNamespace(ownNamespace) } // called only if namespace is empty
	if kubeconfig == "" {
		cfg, err = rest.InClusterConfig()
	} else {
		source = "kubeconfig " + kubeconfig
		file := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(&clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig},
			&clientcmd.ConfigOverrides{})
		cfg, err = file.ClientConfig()
		defaultNamespace = func() (string, error) {
			namespace, _, err := file.Namespace()
			return namespace, err
		}
	}
	switch {
	case errors.Is(err, rest.ErrNotInCluster):
		return nil, "", errors.New("kubernetes: this is no pod of a cluster, so a kubeconfig is needed")
	case err != nil:
		return nil, "", fmt.Errorf("kubernetes: %s: %w", source, err)
	}
	detectDeadServer(cfg)
	if namespace == "" {
		if namespace, err = defaultNamespace(); err != nil {
			return nil, "", fmt.Errorf("kubernetes: which namespace is ours is not known: %w; write it in the config", err)
		}
	}
	return cfg, namespace, nil
}

// After quietFor without data, a connection is probed. If no probe is answered for deadAfter,
// the connection counts as dead.
const (
	quietFor  = 5 * time.Second
	deadAfter = 5 * time.Second
)

// detectDeadServer makes connections to the API server fail soon after the server has vanished. A
// watch may be silent for minutes, and the defaults of client-go
// detect a dead connection only after half a minute or more.
func detectDeadServer(cfg *rest.Config) {
	probes := net.KeepAliveConfig{Enable: true, Idle: quietFor, Interval: deadAfter / 5, Count: 5}
	cfg.Dial = (&net.Dialer{Timeout: deadAfter, KeepAliveConfig: probes}).DialContext
	// A load balancer may answer TCP probes in place of the server, but HTTP/2 pings reach
	// the server itself. client-go reads their interval only from these environment variables.
	for name, d := range map[string]time.Duration{"HTTP2_READ_IDLE_TIMEOUT_SECONDS": quietFor, "HTTP2_PING_TIMEOUT_SECONDS": deadAfter} {
		if os.Getenv(name) == "" {
			_ = os.Setenv(name, strconv.Itoa(int(d.Seconds()))) // fails only for invalid names
		}
	}
}

// readNamespace returns the namespace in a file. An empty file is an error.
func readNamespace(file string) (string, error) {
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
