package owner

import (
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"net"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"evenkeel/gateway/certs"
	"evenkeel/gateway/cluster"
	"evenkeel/geo"
	"evenkeel/lease"
	"evenkeel/lease/etcd"
	"evenkeel/lease/kube"
)

type leases struct {
	store     string
	duration  time.Duration
	namespace string // namespace of Lease objects; empty: the proxy's own
	etcd      geo.Etcd
	identity  string   // name of this process as a holder of leases
	members   []string // the only proxies that may own scopes; empty: every proxy may
	log       *zap.Logger

	client *clientv3.Client // client of etcd; nil: not connected yet
}

// newLeases does not connect yet. Each process has a new identity.
func newLeases(store string, duration time.Duration, namespace string, e geo.Etcd, self string, members []string,
	log *zap.Logger) *leases {
	var boot [6]byte
	_, _ = rand.Read(boot[:]) // never fails
	return &leases{
		store: store, duration: duration, namespace: namespace, etcd: e, log: log,
		identity: lease.Identity(self, hex.EncodeToString(boot[:])), members: members,
	}
}

// open returns a scope's lease: in Kubernetes the object in the kubeconfig's cluster, in etcd the
// key below the prefix. All leases share one etcd client.
func (l *leases) open(object, kubeconfig, key string) (lease.Engine, error) {
	if l.store == geo.OwnKubernetes {
		server, namespace, err := cluster.Find(kubeconfig, l.namespace)
		if err != nil {
			return nil, err
		}
		callTimeout := l.duration / 3 // when the claim gives up, too
		client, err := kube.NewClient(server, namespace, callTimeout)
		if err != nil {
			return nil, err
		}
		return kube.New(client, object, l.identity, l.duration, l.members), nil
	}
	if l.client == nil {
		t, err := l.etcdTLS()
		if err != nil {
			return nil, err
		}
		if l.client, err = etcd.Connect(l.etcd.Endpoints, t, l.log); err != nil {
			return nil, err
		}
	}
	return etcd.New(l.client, l.etcd.Prefix+"/"+key, l.identity, l.duration, l.members), nil
}

// The CA file is read again for every handshake.
func (l *leases) etcdTLS() (*tls.Config, error) {
	f := &l.etcd.TLS
	if f.CA == "" && f.Cert == "" {
		return nil, nil
	}
	// Each endpoint has its own name, and Follow sets the authorities.
	const serverName, caFile = "", ""
	t, err := certs.Client(serverName, caFile, f.Cert, f.Key)
	if err != nil {
		return nil, err
	}
	if f.CA != "" {
		if err := certs.Follow(t, f.CA, hostsOf(l.etcd.Endpoints)...); err != nil {
			return nil, err
		}
	}
	return t, nil
}

func hostsOf(endpoints []string) (hosts []string) {
	for _, endpoint := range endpoints {
		if _, after, isURL := strings.Cut(endpoint, "://"); isURL {
			endpoint = after
		}
		if host, _, err := net.SplitHostPort(endpoint); err == nil {
			endpoint = host
		}
		hosts = append(hosts, endpoint)
	}
	return hosts
}

// maxEpoch is 0 for the default of lease.Config.
func (l *leases) maxEpoch() int64 {
	if l.store == geo.OwnEtcd {
		return etcd.MaxEpoch
	}
	return 0
}

// No claim may run any more.
func (l *leases) close() {
	if l.client != nil {
		_ = l.client.Close()
	}
}
