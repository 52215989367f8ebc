package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"evenkeel/bench/process"
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

// world is the three regions.
type world struct {
	options
	ground
	dir     string
	regions [regions]*region
	owns    bool                    // this proxy takes over a dead region's engines
	stores  [regions]*process.Relay // each region's way to the store of leases, if there is one
	http    *http.Client
}

// region is one: its proxy and its two engines.
type region struct {
	world *world
	index int
	name  string
	place place

	proxy, prefill, decode *process.Process
}

func newWorld(ctx context.Context, o options, g ground) (_ *world, err error) {
	w := &world{options: o, ground: g, http: &http.Client{Timeout: 30 * time.Second}}
	if w.dir, err = process.Folder(o.keep, "regions"); err != nil {
		return nil, err
	}
	if w.binary, err = process.Evenkeel(ctx, o.binary, w.dir); err != nil {
		return nil, err
	}
	for i := range w.regions {
		if o.lease != "" {
			if w.stores[i], err = process.NewRelay(o.lease, 0); err != nil {
				return nil, err
			}
		}
		w.regions[i] = &region{world: w, index: i, name: names[i], place: g.place(i)}
	}
	var keys strings.Builder
	keys.WriteString("keys:\n")
	for name := range callers {
		fmt.Fprintf(&keys, "  - {name: %s, sha256: %x, trusted: true}\n", name, sha256.Sum256([]byte(keyOf(name))))
	}
	w.owns = true
	if err := errors.Join(w.write("keys.yaml", keys.String()), w.write("peers.key", "a 0123456789abcdef0123456789abcdef\n"), w.write("admin.token", adminToken), w.writeConfigs()); err != nil {
		return nil, err
	}
	// The proxy itself says whether it has ownership.
	if out, err := w.check(); err != nil {
		if !bytes.Contains(out, []byte("ownership")) && !bytes.Contains(out, []byte("region")) {
			return nil, fmt.Errorf("evenkeel check: %w: %s", err, out)
		}
		w.owns = false
		if err := w.writeConfigs(); err != nil {
			return nil, err
		}
	}
	return w, nil
}

func (w *world) check() ([]byte, error) {
	cmd := exec.Command(w.binary, "check", "--config", w.regions[us].config())
	cmd.Env = append(os.Environ(), "EVENKEEL_REGION="+names[us])
	return cmd.CombinedOutput()
}

func (w *world) write(name, text string) error {
	return os.WriteFile(filepath.Join(w.dir, name), []byte(text), 0o600)
}

func (w *world) writeConfigs() error {
	for _, r := range w.regions {
		if err := w.write(r.name+".yaml", r.settings()); err != nil {
			return err
		}
	}
	return nil
}

func (r *region) config() string { return filepath.Join(r.world.dir, r.name+".yaml") }

// settings is the region's config file.
func (r *region) settings() string {
	w := r.world
	var b strings.Builder
	fmt.Fprintf(&b, `listen: %q
admin: {listen: %q, token_file: %q}
keys_file: %q
expose_route_headers: true
self_test: false
profiles:
  ascend: {kv_hold_timeout: 8s, first_event_timeout: 10s, reject_releases: true, api_key_env: EVENKEEL_REGION}
prefill:
  calibration: {tp_ms: %g, t0_ms: %g}
  scrape: {interval: 200ms}
limits: {connect_timeout: 1s, probe_timeout: 10s, event_timeout: 3s, write_timeout: 3s, drain_timeout: 5s}
health: {interval: 500ms, slow_start: 0s}
geo:
  mode: distributed
  self: {id: %s-1, region: %[7]s}
  listen: %[8]q
  hmac: {keys_file: %[9]q}
  probe: {interval: 200ms, misses: 5}
`, r.place.clients, r.place.admin, filepath.Join(w.dir, "admin.token"), filepath.Join(w.dir, "keys.yaml"),
		[...]float64{1, 0.5, 0.01}[r.index], [...]float64{5000, 2500, 0.1}[r.index], r.name, r.place.peers, filepath.Join(w.dir, "peers.key"))
	if w.owns {
		engine := "engine: static"
		if w.lease != "" { // a third of the usual times and less
			engine = fmt.Sprintf("engine: etcd, etcd: {endpoints: [%q]}, lease: 3s, start_delay: 1s", "http://"+w.stores[r.index].Address())
		}
		fmt.Fprintf(&b, "  ownership: {%s, takeover_order: [us-1, as-1, eu-1], dead_after: %v}\n", engine, w.deadAfter)
	}
	b.WriteString("  peers:\n")
	for _, other := range w.regions {
		if other != r {
			fmt.Fprintf(&b, "    - {id: %s-1, region: %[1]s, url: %q}\n", other.name, "http://"+w.peer(r.index, other.index))
		}
	}
	b.WriteString("  residency:\n")
	for name, where := range callers {
		fmt.Fprintf(&b, "    %s: [%s]\n", name, strings.Join(append([]string{r.name}, where...), ", "))
	}
	b.WriteString("engines:\n")
	for _, role := range []string{"prefill", "decode"} {
		fmt.Fprintf(&b, "  %s:\n", role)
		for _, of := range w.regions {
			if of != r && !w.owns {
				continue
			}
			fmt.Fprintf(&b, "    - {url: %q", "http://"+of.engine(role))
			if role == "decode" {
				fmt.Fprintf(&b, ", group: %s, slots: %d", of.name, slots)
			}
			if of != r {
				fmt.Fprintf(&b, ", region: %s", of.name)
			}
			b.WriteString("}\n")
		}
	}
	return b.String()
}

func (r *region) engine(role string) string {
	if role == "prefill" {
		return r.place.prefill
	}
	return r.place.decode
}

// start starts everything and waits until every region may forward to each other.
func (w *world) start(ctx context.Context) error {
	for _, r := range w.regions {
		if err := errors.Join(r.beginEngine("prefill"), r.beginEngine("decode")); err != nil {
			return err
		}
		if err := r.begin(); err != nil {
			return err
		}
	}
	for _, r := range w.regions {
		if err := process.Await(ctx, patience, r.name+" is ready and both its peers are available", func() bool {
			for _, other := range w.regions {
				if other != r && !r.available(other) {
					return false
				}
			}
			status, _, err := w.at(r.place.admin).Ask(http.MethodGet, "/readyz", nil)
			return err == nil && status == http.StatusOK
		}); err != nil {
			return err
		}
	}
	return nil
}

// close ends all processes; remove says whether their files go.
func (w *world) close(remove bool) {
	for _, r := range w.regions {
		for _, p := range []*process.Process{r.proxy, r.prefill, r.decode} {
			p.Kill()
		}
	}
	for _, s := range w.stores {
		if s != nil {
			s.Close()
		}
	}
	w.http.CloseIdleConnections()
	if remove {
		_ = os.RemoveAll(w.dir)
	}
}

// begin starts the region's proxy, for the first time or again.
func (r *region) begin() (err error) {
	r.proxy, err = r.world.spawn(r.index, r.name, "serve", "--config", r.config())
	return err
}

// beginEngine starts one of the region's engines, likewise.
func (r *region) beginEngine(role string) (err error) {
	args := []string{"engine", "--role", role, "--listen", r.engine(role), "--prefix-cache", "4096", "--kv-hold-timeout", "8s", "--reject-releases"}
	p := &r.prefill
	if role == "decode" {
		p, args = &r.decode, append(args, "--slots", fmt.Sprint(slots), "--group", r.name, "--c0", "5ms", "--c1", "1ns")
	}
	*p, err = r.world.spawn(r.index, r.name+"-"+role, args...)
	return err
}

func (r *region) url() string { return "http://" + r.place.clients }

// at is a listener that knows the operators' token, or needs none.
func (w *world) at(address string) process.Admin {
	return process.Admin{Address: address, Token: adminToken, Client: w.http}
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
	if !r.world.at(r.place.admin).Read("/geo", &status) {
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

// metric sums the series whose names begin so, at any listener with /metrics.
func (w *world) metric(at, prefix string) float64 { return w.at(at).Metric(prefix) }

// spawn starts our program in a region.
func (w *world) spawn(region int, name string, args ...string) (*process.Process, error) {
	cmd := w.command(region, w.binary, args...)
	cmd.Env = append(os.Environ(), "EVENKEEL_REGION="+names[region]) // how engines tell proxies apart
	return process.Start(cmd, filepath.Join(w.dir, name+".log"))
}
