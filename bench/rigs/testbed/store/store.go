// Package store runs the etcd in which proxies of a test keep their leases.
package store

import (
	"fmt"
	"net/url"
	"path/filepath"

	"go.etcd.io/etcd/server/v3/embed"
)

// Open runs an etcd of one member in this process, with its files in a folder. It
// answers once Open returns.
func Open(folder string) (*embed.Etcd, error) {
	c := embed.NewConfig()
	c.Dir, c.LogLevel, c.LogOutputs = filepath.Join(folder, "etcd"), "error", []string{filepath.Join(folder, "etcd.log")}
	local := url.URL{Scheme: "http", Host: "127.0.0.1:0"}
	c.ListenClientUrls, c.ListenPeerUrls = []url.URL{local}, []url.URL{local}
	c.UnsafeNoFsync = true
	e, err := embed.StartEtcd(c)
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	<-e.Server.ReadyNotify()
	return e, nil
}

// Address is where clients of an etcd connect to.
func Address(e *embed.Etcd) string { return e.Clients[0].Addr().String() }
