package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"go.etcd.io/etcd/server/v3/embed"

	"evenkeel/bench/process"
	"evenkeel/bench/process/store"
	"evenkeel/bench/refengine"
)

const (
	model   = "ref"
	proxies = 3
	slots   = 16
)

var groups = []string{"east", "west"}

// world is the proxies and what they stand before.
type world struct {
	options
	dir     string
	store   *embed.Etcd
	prefill []*refengine.Engine
	decode  []*refengine.Engine // one for each group
	all     [proxies]*proxy
	http    *http.Client
}

// proxy is one of them.
type proxy struct {
	name                  string
	clients, admin, peers string // addresses
	process               *process.Process
	store                 *process.Relay            // its way to the store of leases
	ways                  map[string]*process.Relay // and to the other proxies, by their names
}

func newWorld(ctx context.Context, o options) (_ *world, err error) {
	w := &world{options: o, http: &http.Client{Timeout: 5 * time.Second}}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close(false))
		}
	}()
	if w.dir, err = process.Folder(o.keep, "ha"); err != nil {
		return nil, err
	}
	if w.binary, err = process.Evenkeel(ctx, o.binary, w.dir); err != nil {
		return nil, err
	}
	if w.store, err = store.Open(w.dir); err != nil {
		return nil, err
	}
	if err := w.startEngines(); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(w.dir, "peers.key"), []byte("a 0123456789abcdef0123456789abcdef\n"), 0o600); err != nil {
		return nil, err
	}
	ports := process.FreeAddresses(3 * proxies)
	for i := range w.all {
		w.all[i] = &proxy{name: fmt.Sprintf("here-%d", i), clients: ports[3*i], admin: ports[3*i+1], peers: ports[3*i+2]}
	}
	for _, p := range w.all {
		if p.store, err = process.NewRelay(store.Address(w.store), 0); err != nil {
			return nil, err
		}
		p.ways = map[string]*process.Relay{}
		for _, o := range w.others(p) {
			if p.ways[o.name], err = process.NewRelay(o.peers, 0); err != nil {
				return nil, err
			}
		}
		if err := os.WriteFile(w.config(p), []byte(w.settings(p)), 0o600); err != nil {
			return nil, err
		}
	}
	return w, nil
}

func (w *world) startEngines() error {
	for range 2 {
		e, err := refengine.Start(refengine.Config{Role: refengine.Prefill, PrefixCache: 4096, KVHoldTimeout: 8 * time.Second, RejectReleases: true})
		if err != nil {
			return err
		}
		w.prefill = append(w.prefill, e)
	}
	for _, g := range groups {
		e, err := refengine.Start(refengine.Config{Role: refengine.Decode, DPSize: 2, Group: g, Slots: slots, C0: 5 * time.Millisecond, C1: time.Nanosecond, RejectReleases: true})
		if err != nil {
			return err
		}
		w.decode = append(w.decode, e)
	}
	return nil
}

func (w *world) config(p *proxy) string { return filepath.Join(w.dir, p.name+".yaml") }

// settings is a proxy's config file.
func (w *world) settings(p *proxy) string {
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
`, p.clients, p.admin, p.name, p.peers, filepath.Join(w.dir, "peers.key"))
	for _, other := range w.all {
		if other != p {
			fmt.Fprintf(&b, "    - {id: %s, region: here, url: %q}\n", other.name, "http://"+p.ways[other.name].Address())
		}
	}
	fmt.Fprintf(&b, "ha: {mode: shard, engine: etcd, lease: %v, start_delay: %v, members: [here-0, here-1, here-2], etcd: {endpoints: [%q]}}\nengines:\n  prefill:\n",
		w.lease, w.lease/3, "http://"+p.store.Address())
	for _, e := range w.prefill {
		fmt.Fprintf(&b, "    - {url: %q}\n", e.URLs()[0])
	}
	b.WriteString("  decode:\n")
	for i, e := range w.decode {
		for _, u := range e.URLs() {
			fmt.Fprintf(&b, "    - {url: %q, group: %s, slots: %d}\n", u, groups[i], slots)
		}
	}
	return b.String()
}

// start starts all proxies and waits until the groups are where they belong.
func (w *world) start(ctx context.Context) error {
	for _, p := range w.all {
		if err := w.begin(p); err != nil {
			return err
		}
	}
	return w.rest(ctx)
}

// begin starts a proxy, for the first time or again.
func (w *world) begin(p *proxy) (err error) {
	p.process, err = process.Start(exec.Command(w.binary, "serve", "--config", w.config(p)), filepath.Join(w.dir, p.name+".log"))
	return err
}

// signal sends one to a proxy; one that has ended does not mind.
func (p *proxy) signal(s os.Signal) { _ = p.process.Signal(s) }

// close ends everything; remove says whether the files go.
func (w *world) close(remove bool) error {
	for _, p := range w.all {
		if p == nil {
			continue
		}
		p.process.Kill()
		for _, r := range p.ways {
			r.Close()
		}
		if p.store != nil {
			p.store.Close()
		}
	}
	for _, e := range append(w.prefill, w.decode...) {
		e.Close()
	}
	if w.store != nil {
		w.store.Close()
	}
	w.http.CloseIdleConnections()
	if remove {
		return os.RemoveAll(w.dir)
	}
	return nil
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

func (w *world) status(p *proxy) (s status, ok bool) {
	ok = w.ask(p).Read("/status", &s)
	return s, ok
}

// ask is the proxy's admin listener.
func (w *world) ask(p *proxy) process.Admin { return process.Admin{Address: p.admin, Client: w.http} }

// metric sums the series whose names begin so.
func (w *world) metric(p *proxy, prefix string) float64 { return w.ask(p).Metric(prefix) }

// owner is the proxy that admits to a group; nil: none, or none that answers.
func (w *world) owner(group string) *proxy {
	for _, p := range w.all {
		if w.metric(p, fmt.Sprintf("evenkeel_ha_owner{group=%q}", group)) == 1 {
			return p
		}
	}
	return nil
}

// patience is how long a scene waits for what need not come in a certain time: a
// machine that has other work takes longer.
const patience = time.Minute

// rest waits until every group is with the proxy that all think should have it.
func (w *world) rest(ctx context.Context) error {
	return process.Await(ctx, patience, "all proxies are ready, know each other, and have their groups", func() bool {
		for _, p := range w.all {
			s, ok := w.status(p)
			if !ok || !s.Ready || len(s.HA.Members) < proxies {
				return false
			}
			for _, g := range s.HA.Groups {
				if len(g.Order) == 0 || g.Admits != (g.Order[0] == p.name) {
					return false
				}
			}
		}
		return true
	})
}
