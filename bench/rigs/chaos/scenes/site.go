package scenes

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/rigs/testbed/store"
)

const (
	model      = "ref"
	adminToken = "operators-of-three-proxies"
	environ    = "EVENKEEL_REGION" // how engines tell regions' proxies apart
)

// patience bounds every wait for what must come to be.
const patience = 20 * time.Second

// site is the proxies and what they stand before.
type site struct {
	*testbed.World
	options
	ground
	kind
	all             [sides]*side
	prefill, decode []*engine
}

// side is one of the proxies.
type side struct {
	*testbed.Proxy
	index  int
	region string
	store  *testbed.Relay // its way to the store of leases, if there is one
}

// engine is one of the engines, in this process or in one of its own.
type engine struct {
	testbed.Admin
	*testbed.Process // nil in this process
	region, group    string
	slots            int
	urls             []string
	start            func() error // a process, for the first time or again
}

// start makes everything, starts it, and waits until the proxies have settled.
func (w *site) start(ctx context.Context) error {
	etcd := ""
	if w.leases {
		e, err := store.Open(w.Dir)
		if err != nil {
			return err
		}
		w.AtEnd(e.Close)
		etcd = store.Address(e)
	}
	for i, name := range w.names {
		at := w.place(i)
		region, _, _ := strings.Cut(name, "-")
		p := &side{Proxy: w.ProxyAt(name, at.clients, w.at(at.admin), at.peers), index: i, region: region}
		p.Command = func(binary string, args ...string) *exec.Cmd { return w.within(i, binary, args...) }
		if etcd != "" {
			var err error
			if p.store, err = w.Way(etcd, 0); err != nil {
				return err
			}
		}
		w.all[i] = p
	}
	if err := errors.Join(w.Write("peers.key", testbed.PeersKey), w.Write("admin.token", adminToken), w.build(w)); err != nil {
		return err
	}
	for _, p := range w.all {
		if err := errors.Join(w.Write(p.Config(), w.config(p)), p.Serve()); err != nil {
			return err
		}
	}
	return w.settled(ctx, w)
}

// within is a command of one of the sides.
func (w *site) within(i int, binary string, args ...string) *exec.Cmd {
	cmd := w.command(i, binary, args...)
	cmd.Env = append(os.Environ(), environ+"="+w.all[i].region)
	return cmd
}

// at is a listener that knows the operators' token, or needs none.
func (w *site) at(address string) testbed.Admin {
	return testbed.Admin{Address: address, Token: adminToken, Client: w.HTTP}
}

// others are all proxies but one.
func (w *site) others(p *side) []*side {
	return slices.DeleteFunc(slices.Clone(w.all[:]), func(o *side) bool { return o == p })
}

// config is a proxy's config file.
func (w *site) config(p *side) string {
	geo, rest := w.settings(w, p)
	var b strings.Builder
	fmt.Fprintf(&b, `listen: %q
admin: {listen: %q, token_file: %q}
self_test: false
health: {interval: 500ms, slow_start: 0s}
%sgeo:
  mode: distributed
  self: {id: %s, region: %s}
  listen: %q
  hmac: {keys_file: %q}
%s  peers:
`, p.Clients, p.Address, w.File("admin.token"), rest, p.Name, p.region, p.Peers, w.File("peers.key"), geo)
	for _, other := range w.others(p) {
		fmt.Fprintf(&b, "    - {id: %s, region: %s, url: %q}\n", other.Name, other.region, "http://"+w.peer(p.index, other.index))
	}
	list := func(engines []*engine, more func(e *engine) string) (lines []string) {
		for _, e := range engines {
			where := ""
			if e.region != p.region {
				where = ", region: " + e.region
			}
			lines = append(lines, testbed.EnginesAt(e.urls, "%s%s", more(e), where)...)
		}
		return lines
	}
	return b.String() + testbed.Engines(list(w.prefill, func(*engine) string { return "" }),
		list(w.decode, func(e *engine) string { return fmt.Sprintf(", group: %s, slots: %d", e.group, e.slots) }))
}

// here starts an engine in this process.
func (w *site) here(c refengine.Config) (*engine, error) {
	list, err := w.Engines(c)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(list[0].URLs()[0])
	return &engine{Admin: w.at(u.Host), region: w.all[0].region, group: c.Group, slots: c.Slots, urls: list[0].URLs()}, err
}

// there starts an engine as a process of a side.
func (w *site) there(i int, role, at string, slots int, more ...string) (*engine, error) {
	of := w.all[i]
	e := &engine{Admin: w.at(at), region: of.region, group: of.region, slots: slots, urls: []string{"http://" + at}}
	e.start = func() (err error) {
		args := []string{"engine", "--role", role, "--listen", at, "--prefix-cache", "4096", "--kv-hold-timeout", hold.String(),
			"--reject-releases"}
		e.Process, err = w.Start(of.region+"-"+role, w.within(i, w.Binary, append(args, more...)...))
		return err
	}
	return e, e.start()
}

// hold is how long engines keep KV that is not fetched.
const hold = 8 * time.Second

// stats is what an engine counted.
func (e *engine) stats() (s refengine.Stats, err error) {
	if !e.Read("/stats", &s) {
		return s, fmt.Errorf("the engine at %s does not tell what it counted", e.Address)
	}
	return s, nil
}
