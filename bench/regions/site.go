package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"evenkeel/bench/world"
)

const (
	model      = "ref"
	adminToken = "operators-of-three-regions"
	slots      = 32
)

// Callers, by where their requests may go beside the region they are sent to:
// a region forwards each to the fastest of those, us being slow, eu less and as
// least, as their calibrations have it.
var callers = map[string][]string{"home": {}, "any": {"us", "eu", "as"}, "to-eu": {"eu"}, "to-as": {"as"}}

func keyOf(caller string) string { return "sk-regions-" + caller }

// site is the three regions.
type site struct {
	*world.World
	options
	ground
	regions [regions]*region
	owns    bool                  // this proxy takes over a dead region's engines
	stores  [regions]*world.Relay // each region's way to the store of leases, if there is one
}

// region is one: its proxy and its two engines.
type region struct {
	world.Admin
	site  *site
	index int
	name  string
	place place

	proxy, prefill, decode *world.Process
}

// build makes the files of the proxies.
func (w *site) build() (err error) {
	for i := range w.regions {
		if w.lease != "" {
			if w.stores[i], err = w.Way(w.lease, 0); err != nil {
				return err
			}
		}
		at := w.place(i)
		w.regions[i] = &region{Admin: w.at(at.admin), site: w, index: i, name: names[i], place: at}
	}
	var keys strings.Builder
	keys.WriteString("keys:\n")
	for name := range callers {
		fmt.Fprintf(&keys, "  - {name: %s, sha256: %x, trusted: true}\n", name, sha256.Sum256([]byte(keyOf(name))))
	}
	w.owns = true
	if err := errors.Join(w.Write("keys.yaml", keys.String()), w.Write("peers.key", world.PeersKey), w.Write("admin.token", adminToken), w.writeConfigs()); err != nil {
		return err
	}
	// The proxy itself says whether it has ownership.
	if out, err := w.check(); err != nil {
		if !bytes.Contains(out, []byte("ownership")) && !bytes.Contains(out, []byte("region")) {
			return fmt.Errorf("evenkeel check: %w: %s", err, out)
		}
		w.owns = false
		return w.writeConfigs()
	}
	return nil
}

func (w *site) check() ([]byte, error) {
	cmd := exec.Command(w.Binary, "check", "--config", w.regions[us].config())
	cmd.Env = append(os.Environ(), "EVENKEEL_REGION="+names[us])
	return cmd.CombinedOutput()
}

func (w *site) writeConfigs() error {
	for _, r := range w.regions {
		if err := w.Write(r.name+".yaml", r.settings()); err != nil {
			return err
		}
	}
	return nil
}

func (r *region) config() string { return r.site.File(r.name + ".yaml") }

// settings is the region's config file. A region's own engines are told to be so slow that another
// stays the better place even when the quarter is left of it that corrections leave. And they are told to need
// so much for attention (beta2_ms) that what else takes their time falls with a prompt's length: no line of
// prefill times is like that, so a proxy never learns how fast they really are. On a busy machine it did, from
// prompts that were answered together and count as one of twice the length.
func (r *region) settings() string {
	w := r.site
	var b strings.Builder
	fmt.Fprintf(&b, `listen: %q
admin: {listen: %q, token_file: %q}
keys_file: %q
expose_route_headers: true
self_test: false
profiles:
  ascend: {kv_hold_timeout: 8s, first_event_timeout: 10s, reject_releases: true, api_key_env: EVENKEEL_REGION}
prefill:
  calibration: {tp_ms: %g, t0_ms: %g, beta2_ms: %g}
  scrape: {interval: 200ms}
limits: {connect_timeout: 1s, probe_timeout: 10s, event_timeout: 3s, write_timeout: 3s, drain_timeout: 5s}
health: {interval: 500ms, slow_start: 0s}
geo:
  mode: distributed
  self: {id: %s-1, region: %[8]s}
  listen: %[9]q
  hmac: {keys_file: %[10]q}
  probe: {interval: 200ms, misses: 5}
`, r.place.clients, r.place.admin, w.File("admin.token"), w.File("keys.yaml"),
		[...]float64{1, 0.5, 0.01}[r.index], [...]float64{400_000, 2500, 0.1}[r.index], [...]float64{1, 0.5, 0}[r.index], r.name, r.place.peers, w.File("peers.key"))
	if w.owns {
		engine := "engine: static"
		if w.lease != "" { // a third of the usual times and less
			engine = fmt.Sprintf("engine: etcd, etcd: {endpoints: [%q]}, lease: 3s, start_delay: 1s", "http://"+w.stores[r.index].Address())
		}
		fmt.Fprintf(&b, "  ownership: {%s, takeover_order: [us-1, as-1, eu-1], dead_after: %v}\n", engine, w.deadAfter)
	}
	b.WriteString("  peers:\n")
	var prefill, decode []string
	for _, of := range w.regions {
		where := ""
		if of != r {
			fmt.Fprintf(&b, "    - {id: %s-1, region: %[1]s, url: %q}\n", of.name, "http://"+w.peer(r.index, of.index))
			where = ", region: " + of.name
		}
		if of == r || w.owns {
			prefill = append(prefill, world.EnginesAt([]string{"http://" + of.place.prefill}, "%s", where)...)
			decode = append(decode, world.EnginesAt([]string{"http://" + of.place.decode}, ", group: %s, slots: %d%s", of.name, slots, where)...)
		}
	}
	b.WriteString("  residency:\n")
	for name, where := range callers {
		fmt.Fprintf(&b, "    %s: [%s]\n", name, strings.Join(append([]string{r.name}, where...), ", "))
	}
	return b.String() + world.Engines(prefill, decode)
}

// start starts everything and waits until every region may forward to each other.
func (w *site) start(ctx context.Context) error {
	for _, r := range w.regions {
		if err := errors.Join(r.startPrefill(), r.startDecode(), r.startProxy()); err != nil {
			return err
		}
	}
	for _, r := range w.regions {
		if err := world.Await(ctx, patience, r.name+" is ready and both its peers are available", func() bool {
			for _, other := range w.regions {
				if other != r && !r.available(other) {
					return false
				}
			}
			return r.IsReady()
		}); err != nil {
			return err
		}
	}
	return nil
}

// startProxy starts the region's proxy, for the first time or again.
func (r *region) startProxy() (err error) {
	r.proxy, err = r.spawn(r.name, "serve", "--config", r.config())
	return err
}

// startPrefill and startDecode start one of the region's engines, likewise.
func (r *region) startPrefill() (err error) {
	r.prefill, err = r.spawnEngine("prefill", r.place.prefill)
	return err
}

func (r *region) startDecode() (err error) {
	r.decode, err = r.spawnEngine("decode", r.place.decode, "--slots", fmt.Sprint(slots), "--group", r.name, "--c0", "5ms", "--c1", "1ns")
	return err
}

func (r *region) spawnEngine(role, at string, more ...string) (*world.Process, error) {
	args := []string{"engine", "--role", role, "--listen", at, "--prefix-cache", "4096", "--kv-hold-timeout", "8s", "--reject-releases"}
	return r.spawn(r.name+"-"+role, append(args, more...)...)
}

// spawn starts our program in the region.
func (r *region) spawn(name string, args ...string) (*world.Process, error) {
	cmd := r.site.command(r.index, r.site.Binary, args...)
	cmd.Env = append(os.Environ(), "EVENKEEL_REGION="+r.name) // how engines tell proxies apart
	return r.site.Start(name, cmd)
}

func (r *region) url() string { return "http://" + r.place.clients }

// at is a listener that knows the operators' token, or needs none.
func (w *site) at(address string) world.Admin {
	return world.Admin{Address: address, Token: adminToken, Client: w.HTTP}
}

// peerStatus is what /geo says of a peer.
type peerStatus struct {
	ID        string            `json:"id"`
	RTTMs     float64           `json:"rtt_ms"`
	Available map[string]string `json:"available"`
}

func (r *region) seen(other *region) (p peerStatus) {
	var status struct {
		Peers []peerStatus `json:"peers"`
	}
	if !r.Read("/geo", &status) {
		return p
	}
	for _, p = range status.Peers {
		if p.ID == other.name+"-1" {
			return p
		}
	}
	return peerStatus{}
}

func (r *region) available(other *region) bool { return r.seen(other).Available[model] == "available" }

// patience bounds every wait for what must come to be.
const patience = 20 * time.Second
