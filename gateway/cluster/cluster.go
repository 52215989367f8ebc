// Package cluster finds the Kubernetes API server and the namespace to use, for the lease store and for discovery.
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

// ownNamespace is the file that tells a pod its own namespace.
const ownNamespace = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// Find returns how to reach the API server, and the namespace to use. The server comes from the kubeconfig or, if that is empty, from this
// pod's service account. An empty namespace stands for that of the kubeconfig or of this pod.
func Find(kubeconfig, namespace string) (*rest.Config, string, error) {
	var cfg *rest.Config
	var err error
	where := "this pod's service account"
	own := func() (string, error) { return read(ownNamespace) }
	if kubeconfig == "" {
		cfg, err = rest.InClusterConfig()
	} else {
		where = "kubeconfig " + kubeconfig
		file := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(&clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig},
			&clientcmd.ConfigOverrides{})
		cfg, err = file.ClientConfig()
		own = func() (string, error) {
			namespace, _, err := file.Namespace()
			return namespace, err
		}
	}
	switch {
	case errors.Is(err, rest.ErrNotInCluster):
		return nil, "", errors.New("kubernetes: this is no pod of a cluster, so a kubeconfig is needed")
	case err != nil:
		return nil, "", fmt.Errorf("kubernetes: %s: %w", where, err)
	}
	notice(cfg)
	if namespace == "" {
		if namespace, err = own(); err != nil {
			return nil, "", fmt.Errorf("kubernetes: which namespace is ours is not known: %w; write it in the config", err)
		}
	}
	return cfg, namespace, nil
}

// If nothing has come over a connection for quietFor, it is probed, and it fails within deadAfter if the other end is gone.
const (
	quietFor  = 5 * time.Second
	deadAfter = 5 * time.Second
)

// notice makes connections to the API server fail soon after the server is gone. A watch may be silent for minutes, and client-go alone
// would need half a minute or more to find out.
func notice(cfg *rest.Config) {
	probes := net.KeepAliveConfig{Enable: true, Idle: quietFor, Interval: deadAfter / 5, Count: 5}
	cfg.Dial = (&net.Dialer{Timeout: deadAfter, KeepAliveConfig: probes}).DialContext
	// A device on the way may answer TCP probes in place of the server, so HTTP/2 pings ask the server itself. client-go takes their
	// intervals only from these variables.
	for name, d := range map[string]time.Duration{"HTTP2_READ_IDLE_TIMEOUT_SECONDS": quietFor, "HTTP2_PING_TIMEOUT_SECONDS": deadAfter} {
		if os.Getenv(name) == "" {
			_ = os.Setenv(name, strconv.Itoa(int(d.Seconds()))) // fails only for invalid names
		}
	}
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
