// Package cluster finds the Kubernetes API server and the namespace that one
// means, for whoever talks to it: about leases, about pods.
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

// ownNamespace is where a pod reads which namespace it is in.
const ownNamespace = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// Find says how the API server is reached, by a kubeconfig or, without one, as a
// pod is told, and which namespace is meant: the one that is named, else that of
// the kubeconfig or of this pod.
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

// A connection whose other end has vanished is noticed within deadAfter once
// nothing has come for quietFor.
const (
	quietFor  = 5 * time.Second
	deadAfter = 5 * time.Second
)

// notice has connections to the API server fail when its other end is gone. A
// watch may be silent for minutes, so without it only the half minutes of
// client-go would tell.
func notice(cfg *rest.Config) {
	probes := net.KeepAliveConfig{Enable: true, Idle: quietFor, Interval: deadAfter / 5, Count: 5}
	cfg.Dial = (&net.Dialer{Timeout: deadAfter, KeepAliveConfig: probes}).DialContext
	// A device on the way may answer these probes in place of the server. HTTP/2 asks
	// the server itself; client-go reads how often only from these variables.
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
