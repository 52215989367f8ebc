package geo

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"
)

// Check calls bad for every setting of the config file that cannot work, with its key below geo. It
// does not check the address of the listener. While geo is off, it checks only values that would be
// wrong in any mode.
func (c *Config) Check(bad report) {
	if !slices.Contains([]string{Off, Distributed, Central}, c.Mode) {
		bad("mode", "%q is no mode; write off, distributed or central", c.Mode)
	}
	c.checkValues(bad)
	c.Ownership.check(c, func(key, format string, args ...any) { bad("ownership."+key, format, args...) })
	if !c.On() {
		return
	}
	checkName(bad, "self.id", c.Self.ID, "a proxy")
	checkName(bad, "self.region", c.Self.Region, "a region")
	switch t := c.TLS; {
	case (t.Cert == "") != (t.Key == ""):
		bad("tls", "a certificate and its key belong together; set cert and key, or neither")
	case t.CA != "" && t.Cert == "":
		bad("tls.ca", "there is no certificate that others could check; set cert and key, too")
	case t.CA == "" && !c.Signed():
		bad("tls", "anyone could send requests here; set tls with cert, key and ca, or hmac.keys_file, or both")
	}
	if c.HMAC.KeysFile != "" && c.HMAC.KeysEnv != "" {
		bad("hmac.keys_env", "the keys are in keys_file already; remove one")
	}
	// An entry with discover does not count, because it stands for several proxies.
	isPeer := slices.ContainsFunc(c.Peers, func(p PeerConfig) bool { return p.ID == c.Central && p.Discover == Static })
	centralIsUnknown := c.Central != c.Self.ID && !isPeer
	if c.Mode == Central && centralIsUnknown {
		bad("central", "%q is neither geo.self.id nor one of geo.peers", c.Central)
	}
	usedIDs := map[string]bool{c.Self.ID: true}
	for i := range c.Peers {
		p := &c.Peers[i]
		badPeer := func(key, format string, args ...any) { bad(fmt.Sprintf("peers[%d].%s", i, key), format, args...) }
		if checkName(badPeer, "id", p.ID, "a proxy") && usedIDs[p.ID] {
			badPeer("id", "%q is the id of another, or of this one; each needs its own", p.ID)
		}
		usedIDs[p.ID] = true
		c.checkPeer(p, badPeer)
	}
}

// checkPeer calls bad for every setting of one entry of geo.peers that cannot work, with its key
// below the entry.
func (c *Config) checkPeer(p *PeerConfig, bad report) {
	checkName(bad, "region", p.Region, "a region")
	if !slices.Contains([]Discovery{Static, ByA, BySRV}, p.Discover) {
		bad("discover", "%q is no way to find proxies; write a for the addresses of a name, srv for its SRV records, or leave it out", p.Discover)
	}
	u, err := url.Parse(p.URL)
	isHTTP := err == nil && (u.Scheme == "http" || u.Scheme == "https")
	onlyHost := err == nil && u.Hostname() != "" && strings.Trim(u.Path, "/") == "" && u.RawQuery == "" && u.User == nil
	switch {
	case !isHTTP || !onlyHost:
		bad("url", "%q is not a proxy's URL; write https://host:9443", p.URL)
	case u.Port() == "" && p.Discover != BySRV:
		bad("url", "%q has no port; write that of the peer's geo.listen", p.URL)
	case u.Scheme == "http" && !c.Signed():
		bad("url", "%q is clear text and nothing is signed; write https, or set hmac.keys_file", p.URL)
	}
	if c.TLS.CA != "" && p.SAN == "" {
		bad("san", "the certificate of the peer is not named; write a DNS or URI name that it has, such as spiffe://ek/%s", p.ID)
	}
	for key, v := range map[string]float64{"price_out": p.PriceOut, "price_in": p.PriceIn} {
		if !(v >= 0) { // this form also refuses NaN
			bad(key, "%v is no price; write USD per GB, or 0", v)
		}
	}
}

// checkValues calls bad for the mode, the policy, and every number, time and size below geo that is
// not valid.
func (c *Config) checkValues(bad report) {
	s := c.Settings()
	if s.Push.String() != c.Push.Mode { // Settings has the default mode instead of an unknown one
		bad("push.mode", "%q is no mode; write sp-e, sp-p, sp-o or blind", c.Push.Mode)
	} else if _, err := s.Parse(c.Policy); err != nil {
		// Whether a policy's text is valid depends on the mode.
		bad("policy", "%v", err)
	}
	for key, n := range map[string]int{"probe.misses": c.Probe.Misses, "max_hops": c.MaxHops} {
		if n < 1 {
			bad(key, "%d; at least 1 is needed", n)
		}
	}
	if c.Push.MaxUnanswered != auto && c.maxUnanswered() < 1 {
		bad("push.max_unanswered", "%q is no number of requests; write 1 or more, or auto", c.Push.MaxUnanswered)
	}
	if c.MaxHops > maxVia {
		bad("max_hops", "%d is too many; the header has room for %d, and 1 is enough if every proxy knows every other", c.MaxHops, maxVia)
	}
	for key, d := range map[string]time.Duration{"probe.interval": c.Probe.Interval, "hmac.skew": c.HMAC.Skew} {
		if d <= 0 {
			bad(key, "%v; a time above 0 is needed", d)
		}
	}
	if v := c.Egress.DailyUSD; !(v >= 0) { // this form also refuses NaN
		bad("egress.daily_usd", "%v; write 0 or more", v)
	}
}
