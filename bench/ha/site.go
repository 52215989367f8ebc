package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"evenkeel/bench/refengine"
	"evenkeel/bench/world"
	"evenkeel/bench/world/store"
)

const (
	model   = "ref"
	proxies = 3
	slots   = 16
)

var groups = []string{"east", "west"}

// site is the proxies and what they stand before.
type site struct {
	*world.World
	options
	prefill []*refengine.Engine
	decode  []*refengine.Engine // one for each group
	all     [proxies]*proxy
}

// proxy is one of them.
type proxy struct {
	*world.Proxy
	store *world.Relay            // its way to the store of leases
	ways  map[string]*world.Relay // and to the other proxies, by their names
}

// build makes the engines, their store, and the configs of the proxies.
func (w *site) build() error {
	etcd, err := store.Open(w.Dir)
	if err != nil {
		return err
	}
	w.AtEnd(etcd.Close)
	prefill := refengine.Config{Role: refengine.Prefill, PrefixCache: 4096, KVHoldTimeout: 8 * time.Second, RejectReleases: true}
	if w.prefill, err = w.Engines(prefill, prefill); err != nil {
		return err
	}
	decode := refengine.Config{Role: refengine.Decode, DPSize: 2, Slots: slots, C0: 5 * time.Millisecond, C1: time.Nanosecond, RejectReleases: true}
	for _, decode.Group = range groups {
		e, err := w.Engines(decode)
		if err != nil {
			return err
		}
		w.decode = append(w.decode, e...)
	}
	if err := w.Write("peers.key", world.PeersKey); err != nil {
		return err
	}
	for i, p := range w.Proxies("here-0", "here-1", "here-2") {
		w.all[i] = &proxy{Proxy: p, ways: map[string]*world.Relay{}}
	}
	for _, p := range w.all {
		if p.store, err = w.Way(store.Address(etcd), 0); err != nil {
			return err
		}
		for _, o := range w.others(p) {
			if p.ways[o.Name], err = w.Way(o.Peers, 0); err != nil {
				return err
			}
		}
		if err := w.Write(p.Config(), w.settings(p)); err != nil {
			return err
		}
	}
	return nil
}

// settings is a proxy's config file.
func (w *site) settings(p *proxy) string {
	var b strings.Builder
	fmt.Fprintf(&b, `listen: %q
admin: {listen: %q}
self_test: false
profiles:
  ascend: {kv_hold_timeout: 8s, first_event_timeout: 10s, reject_releases: true}
limits: {connect_timeout: 1s, probe_timeout: 10s, event_timeout: 5s, drain_grace: 1s, drain_timeout: 10s}
health: {interval: 500ms, slow_start: 0s}
geo:
  mode: distributed
  self: {id: %s, region: here}
  listen: %q
  hmac: {keys_file: %q}
  peers:
`, p.Clients, p.Address, p.Name, p.Peers, w.File("peers.key"))
	for _, other := range w.others(p) {
		fmt.Fprintf(&b, "    - {id: %s, region: here, url: %q}\n", other.Name, "http://"+p.ways[other.Name].Address())
	}
	fmt.Fprintf(&b, "ha: {mode: shard, engine: etcd, lease: %v, start_delay: %v, members: [here-0, here-1, here-2], etcd: {endpoints: [%q]}}\n",
		w.lease, w.lease/3, "http://"+p.store.Address())
	var prefill, decode []string
	for _, e := range w.prefill {
		prefill = append(prefill, world.EnginesAt(e.URLs(), "")...)
	}
	for i, e := range w.decode {
		decode = append(decode, world.EnginesAt(e.URLs(), ", group: %s, slots: %d", groups[i], slots)...)
	}
	return b.String() + world.Engines(prefill, decode)
}

// start starts all proxies and waits until the groups are where they belong.
func (w *site) start(ctx context.Context) error {
	for _, p := range w.all {
		if err := p.Serve(); err != nil {
			return err
		}
	}
	return w.rest(ctx)
}

// status is what matters of a proxy's GET /status.
type status struct {
	Ready bool
	HA    struct {
		Role    string
		Members []string
		Groups  []struct {
			Group  string
			Admits bool
			Order  []string
		}
	}
}

// owns says whether the proxy admits to a group; one that does not answer owns none.
func (p *proxy) owns(group string) bool {
	return p.Metric(fmt.Sprintf("evenkeel_ha_owner{group=%q}", group)) == 1
}

// owner is the proxy that admits to a group; nil: none, or none that answers.
func (w *site) owner(group string) *proxy {
	for _, p := range w.all {
		if p.owns(group) {
			return p
		}
	}
	return nil
}

// patience is how long a scene waits for what need not come in a certain time: a
// machine that has other work takes longer.
const patience = time.Minute

// rest waits until every group is with the proxy that all think should have it.
func (w *site) rest(ctx context.Context) error {
	return world.Await(ctx, patience, "all proxies are ready, know each other, and have their groups", func() bool {
		for _, p := range w.all {
			var s status
			if !p.Read("/status", &s) || !s.Ready || len(s.HA.Members) < proxies {
				return false
			}
			for _, g := range s.HA.Groups {
				if len(g.Order) == 0 || g.Admits != (g.Order[0] == p.Name) {
					return false
				}
			}
		}
		return true
	})
}
