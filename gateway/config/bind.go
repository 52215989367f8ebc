package config

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/mooncake"
)

// Bind has the settings for requests whose decode rank is chosen before their prefill (early
// binding).
type Bind struct {
	// The following keys are for the connector ascend-layerwise, whose decode engines send callbacks
	// to the proxy.
	Listen    string   `yaml:"listen"`    // address at which the proxy listens for callbacks; empty: it does not listen
	Advertise string   `yaml:"advertise"` // URL at which decode engines reach Listen; empty: http:// and Listen
	Allow     []string `yaml:"allow"`     // addresses or ranges that may send callbacks; empty: those of the decode engines

	// Lead is a constant except in tests: the time from the choice of the decode rank until a
	// prefill engine can start. It covers the way of the request to the rank and of the rank's call
	// to the prefill engine; for longer, the slot would stand empty.
	Lead time.Duration `yaml:"-"`
	// Ahead is how many requests a decode rank may have beyond its slots, because a prefill needs no
	// slot: a number, or auto.
	Ahead           string        `yaml:"ahead"`
	CallbackTimeout time.Duration `yaml:"callback_timeout"`

	// Grace and Confirm are constants except in tests. Grace is how long a callback is still accepted
	// after its timeout. A prefill call whose client has left, or whose answer is not confirmed yet,
	// may run on for the same time. Most prefills end within this time, so slots are held only shortly
	// for requests that no client needs.
	Grace time.Duration `yaml:"-"`
	// Confirm is how long the first token of an SGLang answer is held back until its prefill has ended
	// well. The token and the end of the prefill come within milliseconds of each other, and no client
	// notices a single delay of 0.1 s.
	Confirm time.Duration `yaml:"-"`
}

// grace and confirm are variables, so that the linker can set longer times for bench/rigs/chaos,
// whose engines fail late on purpose.
var (
	grace   = "5s"
	confirm = "100ms"
)

// aheadAuto is the value of bind.ahead with which the number adapts to the measured prefill times.
const aheadAuto = "auto"

func defaultBind() Bind {
	b := Bind{Lead: 20 * time.Millisecond, Ahead: "0", CallbackTimeout: 30 * time.Second}
	b.Grace, _ = time.ParseDuration(grace) // fails only if the linker set an invalid duration; Grace is then 0
	b.Confirm, _ = time.ParseDuration(confirm)
	return b
}

// BoardAhead returns Ahead as a board takes it: the number of requests, or board.AheadAuto.
func (b *Bind) BoardAhead() int {
	if b.Ahead == aheadAuto {
		return board.AheadAuto
	}
	n, _ := strconv.Atoi(b.Ahead) // checkBind has checked that it is a number
	return n
}

// Allows says whether an address may send callbacks: Allow contains the address or a range around
// it.
func (b *Bind) Allows(a netip.Addr) bool {
	return slices.ContainsFunc(b.Allow, func(s string) bool {
		if p, err := netip.ParsePrefix(s); err == nil {
			return p.Contains(a)
		}
		address, err := netip.ParseAddr(s)
		return err == nil && address.Unmap() == a
	})
}

// OnlyEarlyBinding says whether every request is bound to its decode rank before its prefill: all
// prefill engines, including those that discovery may find, have a profile with early binding, and
// there are no aggregated engines. No request then waits for a prefill engine.
func (c *Config) OnlyEarlyBinding() bool {
	used := c.ProfilesInUse("prefill")
	anyLate := slices.ContainsFunc(used, func(name string) bool { return !bindsEarly(c, name) })
	return len(used) > 0 && !anyLate && len(c.ProfilesInUse("aggregated")) == 0
}

// bindsEarly says whether requests with this profile get their decode rank before their prefill.
func bindsEarly(c *Config, profile string) bool {
	p := c.Profiles[profile]
	return p.Early()
}

// checkBind checks bind. It also checks that every engine has a partner of the other role with
// which it can serve requests.
func (c *Config) checkBind(bad report) {
	b := &c.Bind
	c.checkMetaserver(bad)
	for i, a := range b.Allow {
		_, err := netip.ParseAddr(a)
		if _, rangeErr := netip.ParsePrefix(a); err != nil && rangeErr != nil {
			bad(fmt.Sprintf("$.bind.allow[%d]", i), "%q is neither an address nor a range; write one such as 10.0.1.5 or 10.0.1.0/24", a)
		}
	}
	if b.CallbackTimeout <= 0 {
		bad("$.bind.callback_timeout", "%v; a time above 0 is needed", b.CallbackTimeout)
	}
	if n, err := strconv.Atoi(b.Ahead); b.Ahead != aheadAuto && (err != nil || n < 0) {
		bad("$.bind.ahead", "%q is no number of requests; write 0 or more, or auto", b.Ahead)
	}
	if set := "$.prefill.queue.max"; c.OnlyEarlyBinding() && c.source.isSet(set) {
		bad(set, "requests of all profiles here wait for a decode rank before their prefill, so none waits for a prefill engine, and pool.size "+
			"is their limit; remove it")
	}
	c.checkPartners(bad)
}

// checkMetaserver checks the address to which decode engines send callbacks: they must be able to
// reach it.
func (c *Config) checkMetaserver(bad report) {
	b := &c.Bind
	if b.Listen == "" {
		c.checkNoCallbacks(bad)
		return
	}
	if problem := listenProblem(b.Listen); problem != "" {
		bad("$.bind.listen", "%q %s; write host:port, such as \"10.0.0.2:8010\"", b.Listen, problem)
		return
	}
	host, port, _ := net.SplitHostPort(b.Listen) // listenProblem has checked the form
	// With port 0, the listener gets a free port of its own.
	if port != "0" && slices.Contains([]string{c.Listen, c.Admin.Listen, c.Geo.Listen}, b.Listen) {
		bad("$.bind.listen", "callbacks need an address of their own; %q is that of clients, operators or other proxies", b.Listen)
	}
	path := "$.bind.listen" // errors point at the key that has the host for decode engines
	if b.Advertise != "" {
		path = "$.bind.advertise"
		u, err := url.Parse(b.Advertise)
		isHTTP := err == nil && (u.Scheme == "http" || u.Scheme == "https")
		isOrigin := isHTTP && u.Host != "" && strings.Trim(u.Path, "/") == "" && u.RawQuery == "" && u.Fragment == "" && u.User == nil
		if !isOrigin {
			bad(path, "%q is not a URL of a host and a port alone; write one such as http://10.0.0.2:8010", b.Advertise)
			return
		}
		host = u.Hostname()
	}
	c.checkCallbackHost(path, host, bad)
}

// checkCallbackHost checks that decode engines can call a host at which the proxy receives
// callbacks. path is the key that names the host.
func (c *Config) checkCallbackHost(path, host string, bad report) {
	switch {
	case Wildcard(host):
		bad(path, "%q is no host that decode engines can call; set bind.advertise to the URL under which they reach this proxy, such as "+
			"http://10.0.0.2:8010", host)
	case Loopback(host): // only engines on this machine can call it
		for _, decodeHost := range c.CallbackHosts() { // the hosts of the decode engines that send callbacks
			if !Loopback(decodeHost) {
				bad(path, "%q is the decode engine itself for %s; "+
					"set bind.advertise to the URL under which it reaches this proxy", host, decodeHost)
				return
			}
		}
	}
}

// checkNoCallbacks checks that no decode engine sends callbacks, because evenkeel does not listen
// for them.
func (c *Config) checkNoCallbacks(bad report) {
	for _, name := range c.ProfilesInUse("decode") {
		if c.Profiles[name].Connector == mooncake.AscendLayerwise {
			bad("$.profiles."+name+".connector", "decode engines with %s call evenkeel back, and evenkeel does not listen for that; set "+
				"bind.listen to an address that they reach", mooncake.AscendLayerwise)
			return
		}
	}
	if c.Bind.Advertise != "" {
		bad("$.bind.advertise", "evenkeel does not listen for callbacks; set bind.listen, or remove this key")
	}
}

// Wildcard says whether a host stands for all addresses of a machine, such as 0.0.0.0, so that no
// engine can call it.
func Wildcard(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || ip != nil && ip.IsUnspecified()
}

// CallbackHosts returns the hosts of the decode engines in the file that send callbacks, each once.
func (c *Config) CallbackHosts() (hosts []string) {
	for _, e := range c.Engines.Decode {
		sendsCallbacks := c.Profiles[e.Profile].Connector == mooncake.AscendLayerwise
		if u, err := url.Parse(e.URL); err == nil && sendsCallbacks && !slices.Contains(hosts, u.Hostname()) {
			hosts = append(hosts, u.Hostname())
		}
	}
	return hosts
}

// checkCanCallBack checks an engine that is added while the proxy runs: a decode engine must be
// able to send its callbacks to this proxy.
func (c *Config) checkCanCallBack(role string, e *Engine, bad report) {
	if role != "decode" || c.Profiles[e.Profile].Connector != mooncake.AscendLayerwise {
		return
	}
	// A config whose only decode engine is e, so that checkMetaserver checks the address for this
	// engine.
	one := &Config{Profiles: c.Profiles, Bind: c.Bind, Engines: Engines{Decode: []Engine{*e}}}
	one.checkMetaserver(func(_, format string, args ...any) { bad("$.profile", format, args...) })
}

// PairingKey returns a text that is equal for two engines that can serve one model together. It is
// the connector for a profile with early binding, and one constant for all other profiles.
func PairingKey(p *mooncake.Profile) string {
	if p.Early() {
		return p.Connector
	}
	return "hand-off"
}

// checkPartners reports engines that have no partner: no engine of the other role has the same
// PairingKey, so none can serve a model together with them. All profiles with late binding have the
// same key. With early binding, where a request gets its decode rank before its prefill, the key is
// the connector, which both engines then must have. checkPartners does not compare the engines'
// models, which are not known yet. A role without any engine is no error, because its engines may
// be added later.
func (c *Config) checkPartners(bad report) {
	if c.Discovery.On() || len(c.Engines.Prefill) == 0 || len(c.Engines.Decode) == 0 {
		return
	}
	anyEarly := false
	for _, e := range c.Engines.All() {
		anyEarly = anyEarly || bindsEarly(c, e.Profile)
	}
	if !anyEarly { // then all engines have the same PairingKey
		return
	}
	for _, side := range []struct {
		role, other    string
		list, partners []Engine
	}{{"prefill", "decode", c.Engines.Prefill, c.Engines.Decode}, {"decode", "prefill", c.Engines.Decode, c.Engines.Prefill}} {
		for i, e := range side.list {
			p, known := c.Profiles[e.Profile] // checkEngine reports an unknown profile
			if !known || slices.ContainsFunc(side.partners, func(other Engine) bool { return c.pairingKeyOf(other) == c.pairingKeyOf(e) }) {
				continue
			}
			first := side.partners[0]
			bad(fmt.Sprintf("$.engines.%s[%d].profile", side.role, i), "its connector is %s (profile %s), and no %s engine has the same: "+
				"%s has %s (profile %s); all engines of one model share one connector",
				p.Connector, e.Profile, side.other, first.URL, c.Profiles[first.Profile].Connector, first.Profile)
		}
	}
}

// pairingKeyOf returns the PairingKey of an engine's profile.
func (c *Config) pairingKeyOf(e Engine) string {
	p := c.Profiles[e.Profile]
	return PairingKey(&p)
}
