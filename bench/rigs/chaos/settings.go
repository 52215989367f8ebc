package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"time"

	"evenkeel/bench/rigs/testbed"
)

// bodiesBytes bounds all bodies. It is small, so that the effect shows when one
// caller takes all of it.
const bodiesBytes = 256 << 20

// settings are the proxy's files. They are replaced whole, as config management
// does it.
type settings struct {
	world       *testbed.World
	proxy       *testbed.Proxy
	callbacks   string // where decode engines call back
	geo         bool   // there are other proxies
	hold        time.Duration
	pool, slots int
	loops       int     // that carry answers, as event_loops has it
	budget      float64 // of retries: enough for the faults there are
	fleet       *fleet
}

// caller is a client with a key of its own.
type caller struct {
	name    string
	trusted bool
	most    int // answers at once; 0: no limit
}

func (c caller) key() string { return "sk-chaos-" + c.name }

// callers are who may ask. The guest comes and goes under trouble; the narrow
// one is over its limit at times.
var callers = []caller{{"inside", true, 0}, {"outside", false, 0}, {"narrow", false, 8}, greedy, guest}

var guest = caller{name: "guest"}

// greedy only asks for memory, and only in the scenario strangers.
var greedy = caller{name: "greedy"}

// The names of this proxy and of its peer, which is never there.
const (
	thisRegion, otherRegion = "here-1", "there-1"
	hopKeyName              = "a" // of testbed.PeersKey
)

func (s *settings) write() error {
	config := fmt.Sprintf(`listen: %q
admin: {listen: %q}
keys_file: %q
self_test: false
event_loops: %[10]d
%[4]spool: {size: %[5]d}
prefill:
  scrape: {interval: 200ms}
  retry: {base: 20ms, budget: %[7]v}
limits: {bodies_bytes: %[9]d, connect_timeout: 1s, probe_timeout: 6s, event_timeout: 6s, write_timeout: 3s, drain_timeout: 10s}
log: {level: info, requests: %[6]q}
%[8]s`, s.proxy.Clients, s.proxy.Address, s.world.File("keys.yaml"), s.profiles(), s.pool, s.world.File("requests.jsonl"), s.budget, s.others(), bodiesBytes, s.loops)
	var prefill, decode []string
	for _, m := range s.fleet.of("prefill") {
		prefill = append(prefill, testbed.EnginesAt(m.urls, ", profile: %s", m.profile())...)
	}
	for _, m := range s.fleet.of("decode") {
		ranks := ""
		if m.internal {
			ranks = fmt.Sprintf(", ranks: %d", m.Config().DPSize)
		}
		decode = append(decode,
			testbed.EnginesAt(m.urls, ", group: %s, slots: %d, profile: %s%s", m.Config().Group, s.slots, m.profile(), ranks)...)
	}
	return s.world.Write(s.proxy.Config(), config+testbed.Engines(prefill, decode))
}

// others are the lines about other regions.
func (s *settings) others() string {
	if !s.geo {
		return ""
	}
	return fmt.Sprintf(`geo:
  mode: distributed
  self: {id: %s, region: here}
  listen: %q
  hmac: {keys_file: %q}
  peers: [{id: %s, region: there, url: "http://127.0.0.1:9"}]
`, thisRegion, s.proxy.Peers, s.world.File("hops.key"), otherRegion)
}

func (s *settings) writeKeys(who []caller) error {
	var b strings.Builder
	b.WriteString("keys:\n")
	for _, c := range who {
		fmt.Fprintf(&b, "  - {name: %s, sha256: %x, trusted: %v, max_concurrent: %d}\n", c.name, sha256.Sum256([]byte(c.key())), c.trusted,
			c.most)
	}
	return errors.Join(s.world.Write("keys.yaml", b.String()), s.world.Write("hops.key", testbed.PeersKey))
}

// spoil puts a file there that nobody can use.
func (s *settings) spoil(name string) error {
	return s.world.Write(name, "engines: [\nkeys: {}\n")
}
