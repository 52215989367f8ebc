package config

import (
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"evenkeel/geo/policy"
)

// Geo is this dispatcher among those of other regions.
type Geo struct {
	Mode    string  `yaml:"mode"`    // off, distributed, central
	Central string  `yaml:"central"` // mode central: the id of the dispatcher that decides
	Self    GeoSelf `yaml:"self"`
	Listen  string  `yaml:"listen"` // for other dispatchers
	TLS     GeoTLS  `yaml:"tls"`
	HMAC    struct {
		KeysFile string        `yaml:"keys_file"` // one key a line: its id, a space, 32 bytes or more; the first signs
		KeysEnv  string        `yaml:"keys_env"`  // name of a variable with the same
		Skew     time.Duration `yaml:"skew"`
	} `yaml:"hmac"`
	Peers  []GeoPeer `yaml:"peers"`
	Policy string    `yaml:"policy"`
	Push   struct {
		Mode           string  `yaml:"mode"`           // sp-e, sp-p, sp-o, blind
		MaxUnanswered  string  `yaml:"max_unanswered"` // a number, or auto
		MaxOutstanding int     `yaml:"max_outstanding"`
		CreditMax      int     `yaml:"credit_max"`
		Patience       float64 `yaml:"patience"`
	} `yaml:"push"`
	Tau   int `yaml:"tau"`
	Probe struct {
		Interval time.Duration `yaml:"interval"`
		Misses   int           `yaml:"misses"`
	} `yaml:"probe"`
	Cost struct {
		QS        float64 `yaml:"qs"`
		W         float64 `yaml:"w"`
		Load      float64 `yaml:"load"`
		BMs       float64 `yaml:"b_ms"`
		MinGainMs float64 `yaml:"min_gain_ms"`
		TPMs      float64 `yaml:"tp_ms"`
		T0Ms      float64 `yaml:"t0_ms"`
		RTTAlpha  float64 `yaml:"rtt_alpha"`
	} `yaml:"cost"`
	Snapshot struct {
		MaxBytesPerPeer string `yaml:"max_bytes_per_peer"` // a number, or one with KiB, MiB or GiB
	} `yaml:"snapshot"`
	MaxHops   int          `yaml:"max_hops"`
	Ownership GeoOwnership `yaml:"ownership"`
	Egress    struct {
		DailyUSD float64 `yaml:"daily_usd"` // a peer, UTC day; 0: any
	} `yaml:"egress"`
	Residency map[string][]string `yaml:"residency"` // by tenant or model, the regions its requests may go to; none: all
}

// GeoSelf is how others know this dispatcher.
type GeoSelf struct {
	ID     string `yaml:"id"`
	Region string `yaml:"region"`
}

// GeoTLS is the certificate that this dispatcher shows others, and who signs
// theirs.
type GeoTLS struct {
	Cert string `yaml:"cert"`
	Key  string `yaml:"key"`
	CA   string `yaml:"ca"`
}

// GeoPeer is another dispatcher, or all of them that a name leads to.
type GeoPeer struct {
	ID       string  `yaml:"id"` // with discover, the beginning of theirs: eu for eu-1 and eu-2
	Region   string  `yaml:"region"`
	URL      string  `yaml:"url"`
	Discover string  `yaml:"discover"` // empty, a: every address of the name, srv: its SRV records
	SAN      string  `yaml:"san"`      // DNS or URI name in its certificate
	PriceOut float64 `yaml:"price_out"`
	PriceIn  float64 `yaml:"price_in"`
}

// Modes of geo.
const (
	GeoOff         = "off"
	GeoDistributed = "distributed"
	GeoCentral     = "central"
)

// On says whether there are other regions.
func (g *Geo) On() bool { return g.Mode != GeoOff }

func defaultGeo() Geo {
	d := policy.Defaults()
	g := Geo{Mode: GeoOff, Listen: ":9443", Policy: "finish", Tau: d.Tau, MaxHops: 1}
	g.HMAC.Skew = 30 * time.Second
	g.Push.Mode, g.Push.MaxUnanswered, g.Push.MaxOutstanding, g.Push.CreditMax, g.Push.Patience = d.Push.String(), strconv.Itoa(d.MaxUnanswered), d.MaxOutstanding, d.CreditMax, d.Patience
	g.Probe.Interval, g.Probe.Misses = 500*time.Millisecond, 3
	g.Cost.QS, g.Cost.W, g.Cost.Load, g.Cost.BMs, g.Cost.MinGainMs, g.Cost.TPMs, g.Cost.T0Ms, g.Cost.RTTAlpha = d.QS, d.W, d.Load, d.BMs, d.MinGainMs, d.TPMs, d.T0Ms, 0.3
	g.Snapshot.MaxBytesPerPeer = "32MiB"
	g.Ownership = defaultOwnership()
	return g
}

// Follows says whether another dispatcher decides for this one.
func (g *Geo) Follows() bool { return g.Mode == GeoCentral && g.Central != g.Self.ID }

// Leads says whether this one decides for all.
func (g *Geo) Leads() bool { return g.Mode == GeoCentral && g.Central == g.Self.ID }

// Settings are the policy's.
func (g *Geo) Settings() policy.Settings {
	s := policy.Defaults()
	for m := policy.SPE; m <= policy.Blind; m++ {
		if m.String() == g.Push.Mode {
			s.Push = m
		}
	}
	s.MaxUnanswered, s.MaxOutstanding, s.CreditMax, s.Patience, s.Tau = g.unanswered(), g.Push.MaxOutstanding, g.Push.CreditMax, g.Push.Patience, g.Tau
	s.QS, s.W, s.Load, s.BMs, s.MinGainMs, s.TPMs, s.T0Ms = g.Cost.QS, g.Cost.W, g.Cost.Load, g.Cost.BMs, g.Cost.MinGainMs, g.Cost.TPMs, g.Cost.T0Ms
	return s
}

// auto as max_unanswered follows the traffic.
const auto = "auto"

func (g *Geo) unanswered() int {
	if g.Push.MaxUnanswered == auto {
		return policy.Auto
	}
	n, err := strconv.Atoi(g.Push.MaxUnanswered)
	if err != nil {
		return -1
	}
	return n
}

// SnapshotBytes is snapshot.max_bytes_per_peer; false: it is no size.
func (g *Geo) SnapshotBytes() (int64, bool) {
	text, unit := g.Snapshot.MaxBytesPerPeer, int64(1)
	for suffix, n := range map[string]int64{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30} {
		if rest, ok := strings.CutSuffix(text, suffix); ok {
			text, unit = strings.TrimSpace(rest), n
		}
	}
	n, err := strconv.ParseInt(text, 10, 32)
	return n * unit, err == nil && n > 0
}

// Signed says whether hops are signed with keys.
func (g *Geo) Signed() bool { return g.HMAC.KeysFile != "" || g.HMAC.KeysEnv != "" }

// KeysText is what holds the keys.
func (g *Geo) KeysText() (string, error) {
	if g.HMAC.KeysFile == "" {
		text := os.Getenv(g.HMAC.KeysEnv)
		if text == "" {
			return "", fmt.Errorf("geo.hmac.keys_env names %s, which is empty; export it", g.HMAC.KeysEnv)
		}
		return text, nil
	}
	text, err := os.ReadFile(g.HMAC.KeysFile)
	if err != nil {
		return "", fmt.Errorf("geo.hmac.keys_file: %w", err)
	}
	return string(text), nil
}

func (c *Config) checkGeo(bad report) {
	g := &c.Geo
	if !slices.Contains([]string{GeoOff, GeoDistributed, GeoCentral}, g.Mode) {
		bad("$.geo.mode", "%q is no mode; write off, distributed or central", g.Mode)
	}
	c.checkGeoNumbers(bad)
	c.checkOwnership(bad)
	if !g.On() {
		return
	}
	name := func(path, name, what string) {
		if !validName(name) {
			bad(path, "%q cannot name %s; write up to 64 letters, digits, dots and dashes", name, what)
		}
	}
	name("$.geo.self.id", g.Self.ID, "a dispatcher")
	name("$.geo.self.region", g.Self.Region, "a region")
	if problem := listenProblem(g.Listen); problem != "" {
		bad("$.geo.listen", "%q %s; write host:port, such as \":9443\"", g.Listen, problem)
	} else if _, port, _ := net.SplitHostPort(g.Listen); port != "0" && (g.Listen == c.Listen || g.Listen == c.Admin.Listen) {
		bad("$.geo.listen", "dispatchers need an address of their own; %q is that of clients or operators", g.Listen)
	}
	switch t := g.TLS; {
	case (t.Cert == "") != (t.Key == ""):
		bad("$.geo.tls", "a certificate and its key belong together; set cert and key, or neither")
	case t.CA != "" && t.Cert == "":
		bad("$.geo.tls.ca", "there is no certificate for others to check; set cert and key, too")
	case t.CA == "" && !g.Signed():
		bad("$.geo.tls", "anybody could send requests here; set tls with cert, key and ca, or hmac.keys_file, or both")
	}
	if g.HMAC.KeysFile != "" && g.HMAC.KeysEnv != "" {
		bad("$.geo.hmac.keys_env", "the keys are in keys_file already; remove one")
	}
	if g.Mode == GeoCentral && g.Central != g.Self.ID && !slices.ContainsFunc(g.Peers, func(p GeoPeer) bool { return p.ID == g.Central && p.Discover == "" }) {
		bad("$.geo.central", "%q is neither geo.self.id nor one of geo.peers", g.Central)
	}
	seen := map[string]bool{g.Self.ID: true}
	for i := range g.Peers {
		c.checkGeoPeer(fmt.Sprintf("$.geo.peers[%d]", i), &g.Peers[i], seen, bad)
	}
}

func (c *Config) checkGeoPeer(path string, p *GeoPeer, seen map[string]bool, bad report) {
	g := &c.Geo
	switch {
	case !validName(p.ID):
		bad(path+".id", "%q cannot name a dispatcher; write up to 64 letters, digits, dots and dashes", p.ID)
	case seen[p.ID]:
		bad(path+".id", "%q is the id of another, or of this one; each needs its own", p.ID)
	}
	seen[p.ID] = true
	if !validName(p.Region) {
		bad(path+".region", "%q cannot name a region; write up to 64 letters, digits, dots and dashes", p.Region)
	}
	if !slices.Contains([]string{"", "a", "srv"}, p.Discover) {
		bad(path+".discover", "%q finds nobody; write a for the addresses of a name, srv for its SRV records, or leave it out", p.Discover)
	}
	u, err := url.Parse(p.URL)
	switch {
	case err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Hostname() == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.User != nil:
		bad(path+".url", "%q is not a dispatcher's URL; write https://host:9443", p.URL)
	case u.Port() == "" && p.Discover != "srv":
		bad(path+".url", "%q has no port; write that of the peer's geo.listen", p.URL)
	case u.Scheme == "http" && !g.Signed():
		bad(path+".url", "%q is clear text and nothing is signed; write https, or set hmac.keys_file", p.URL)
	}
	if g.TLS.CA != "" && p.SAN == "" {
		bad(path+".san", "which certificate is the peer's own is not said; write a DNS or URI name in it, such as spiffe://ek/%s", p.ID)
	}
	for key, v := range map[string]float64{"price_out": p.PriceOut, "price_in": p.PriceIn} {
		if !(v >= 0) {
			bad(path+"."+key, "%v is no price; write USD per GB, or 0", v)
		}
	}
}

func (c *Config) checkGeoNumbers(bad report) {
	g := &c.Geo
	s := g.Settings()
	if s.Push.String() != g.Push.Mode {
		bad("$.geo.push.mode", "%q is no mode; write sp-e, sp-p, sp-o or blind", g.Push.Mode)
	} else if _, err := s.Parse(g.Policy); err != nil {
		bad("$.geo.policy", "%v", err)
	}
	for path, n := range map[string]int{
		"push.max_outstanding": g.Push.MaxOutstanding, "push.credit_max": g.Push.CreditMax,
		"probe.misses": g.Probe.Misses, "max_hops": g.MaxHops,
	} {
		if n < 1 {
			bad("$.geo."+path, "%d; at least 1 is needed", n)
		}
	}
	if g.Push.MaxUnanswered != auto && g.unanswered() < 1 {
		bad("$.geo.push.max_unanswered", "%q is no number of requests; write 1 or more, or auto", g.Push.MaxUnanswered)
	}
	if g.MaxHops > 8 {
		bad("$.geo.max_hops", "%d; the header has room for 8, and 1 is enough where all know all", g.MaxHops)
	}
	if g.Tau < 0 {
		bad("$.geo.tau", "%d; write 0 or more", g.Tau)
	}
	for path, d := range map[string]time.Duration{"probe.interval": g.Probe.Interval, "hmac.skew": g.HMAC.Skew} {
		if d <= 0 {
			bad("$.geo."+path, "%v; a time above 0 is needed", d)
		}
	}
	for path, v := range map[string]float64{
		"push.patience": g.Push.Patience, "cost.qs": g.Cost.QS, "cost.w": g.Cost.W, "cost.load": g.Cost.Load, "cost.b_ms": g.Cost.BMs,
		"cost.min_gain_ms": g.Cost.MinGainMs, "cost.tp_ms": g.Cost.TPMs, "cost.t0_ms": g.Cost.T0Ms, "egress.daily_usd": g.Egress.DailyUSD,
	} {
		if !(v >= 0) {
			bad("$.geo."+path, "%v; write 0 or more", v)
		}
	}
	if !(g.Cost.RTTAlpha > 0 && g.Cost.RTTAlpha <= 1) {
		bad("$.geo.cost.rtt_alpha", "%v is no share of a new sample; write a number up to 1, such as 0.3", g.Cost.RTTAlpha)
	}
	if n, ok := g.SnapshotBytes(); !ok || n < 64<<10 {
		bad("$.geo.snapshot.max_bytes_per_peer", "%q is no size of 64KiB or more; write one such as 32MiB", g.Snapshot.MaxBytesPerPeer)
	}
}

// validName is geo.ValidName without what stands between an id and an address.
func validName(s string) bool {
	return s != "" && len(s) <= 64 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_") == ""
}
