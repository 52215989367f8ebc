package geo

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/geo/policy"
)

// Config is the section `geo` of the config file, which describes this proxy and its peers, together with further
// parameters of New.
type Config struct {
	Mode    string `yaml:"mode"`
	Central string `yaml:"central"` // mode central: the id of the proxy that decides
	Self    Self   `yaml:"self"`
	Listen  string `yaml:"listen"` // the address on which other proxies reach this one
	TLS     TLS    `yaml:"tls"`
	HMAC    struct {
		KeysFile string        `yaml:"keys_file"` // one key per line: its id, a space, 32 bytes or more; the first key signs
		KeysEnv  string        `yaml:"keys_env"`  // name of an environment variable that has the keys, in the form of keys_file
		Skew     time.Duration `yaml:"skew"`      // how far the clocks of sender and receiver may differ
	} `yaml:"hmac"`
	Peers  []PeerConfig `yaml:"peers"`
	Policy string       `yaml:"policy"` // name of the policy, or name:key=value,... as policy.Settings.Parse reads it
	Push   struct {
		Mode          string `yaml:"mode"`           // sp-e, sp-p, sp-o or blind, see policy.Push
		MaxUnanswered string `yaml:"max_unanswered"` // a number, or auto
	} `yaml:"push"`
	Probe struct {
		Interval time.Duration `yaml:"interval"` // time between two probes of a peer
		Misses   int           `yaml:"misses"`   // number of missed probes in a row after which a peer counts as down
	} `yaml:"probe"`
	MaxHops   int       `yaml:"max_hops"`
	Ownership Ownership `yaml:"ownership"`
	Egress    struct {
		DailyUSD float64 `yaml:"daily_usd"` // budget in USD for the bytes of forwards, per peer and UTC day; 0: no limit
	} `yaml:"egress"`
	Residency map[string][]string `yaml:"residency"` // by tenant or model: the regions to which its requests may go; no entry: all regions

	// PromptIndexBytes is a constant except in tests and simulations: it bounds the memory for what
	// each peer was sent.
	PromptIndexBytes int64 `yaml:"-"`

	Siblings   bool          `yaml:"-"` // peers in the own region serve the same engines; each owns some decode groups
	FirstByte  time.Duration `yaml:"-"` // time limit for the first event of a forward
	Idle       time.Duration `yaml:"-"` // time limit for each later event
	Connect    time.Duration `yaml:"-"` // time limit for connecting to a peer
	Whole      time.Duration `yaml:"-"` // like FirstByte, but for a peer in the own region, which serves the request as this proxy would
	WholeBytes int           `yaml:"-"` // size limit of an answer that is not streamed
	EventBytes int           `yaml:"-"` // size limit of one event

	Keys  *Keys `yaml:"-"` // keys that sign requests between proxies; nil: certificates alone prove the sender
	Queue Queue `yaml:"-"`
	// Running returns how many requests run on the least busy decode rank of a model, and how many requests (seqs) all of its
	// ranks can run at once. It must not wait.
	Running  func(model string) (perReplica float64, seqs int) `yaml:"-"`
	Draining func() bool                                       `yaml:"-"`
	Tenure   func() Tenure                                     `yaml:"-"` // what this proxy owns; nil: nothing here has an owner
	OnProbe  func(ProbeReport)                                 `yaml:"-"` // called for each good answer to a probe; nil if Tenure is nil
	// Lookup finds the addresses behind a host name; nil: by DNS.
	Lookup func(ctx context.Context, d Discovery, host, port string) (addresses []string, err error) `yaml:"-"`

	Clock Clock                  `yaml:"-"` // nil: the computer's clock
	Link  func(peer string) Link `yaml:"-"` // makes the link to a peer, given by the id of its entry; nil: links over HTTP

	Registerer prometheus.Registerer `yaml:"-"`
	Log        *zap.Logger           `yaml:"-"` // nil: nothing is logged
}

// Self names this proxy and its region for other proxies.
type Self struct {
	ID     string `yaml:"id"`
	Region string `yaml:"region"`
}

// TLS has the certificate of this proxy, and the authority that signs the certificates of other proxies.
type TLS struct {
	Cert string `yaml:"cert"`
	Key  string `yaml:"key"`
	CA   string `yaml:"ca"`
}

// PeerConfig is one entry of geo.peers: one proxy, or all proxies behind a host name.
type PeerConfig struct {
	ID       string         `yaml:"id"` // with discover, the prefix of the proxies' ids: eu for eu-1 and eu-2
	Region   string         `yaml:"region"`
	URL      string         `yaml:"url"`
	Discover Discovery      `yaml:"discover"`
	SAN      string         `yaml:"san"`       // DNS or URI name in the certificate; empty: a request with a certificate is refused
	PriceOut float64        `yaml:"price_out"` // USD per GB sent to the peer
	PriceIn  float64        `yaml:"price_in"`  // USD per GB received from the peer
	Target   *engine.Target `yaml:"-"`         // the parsed URL and the TLS settings, for calls to the proxy
}

// Discovery is the way in which the proxies of an entry are found.
type Discovery string

// Values of Discovery.
const (
	Static Discovery = ""    // the URL's host is one proxy
	ByA    Discovery = "a"   // every address of the host is a proxy
	BySRV  Discovery = "srv" // the host is a name with SRV records; each record is a proxy
)

// AnswersTo reports whether a proxy with this id belongs to the entry. With discover, ids that
// consist of the entry's id, a dash and any text belong to it, too.
func (c *PeerConfig) AnswersTo(id string) bool {
	return id == c.ID || c.Discover != Static && strings.HasPrefix(id, c.ID+"-")
}

// SANs returns the names that a proxy's certificate may have.
func (c *PeerConfig) SANs() []string {
	if c.SAN == "" {
		return nil
	}
	return []string{c.SAN}
}

// Modes of geo. Off: there are no other regions. Distributed: each proxy decides for its own requests. Central: one proxy
// decides for all.
const (
	Off         = "off"
	Distributed = "distributed"
	Central     = "central"
)

// auto is the value of max_unanswered for a number that follows the traffic.
const auto = "auto"

// Default returns the Config of an empty config file.
func Default() Config {
	d := policy.Defaults()
	c := Config{Mode: Off, Listen: ":9443", Policy: "finish", MaxHops: 1, Ownership: defaultOwnership()}
	c.HMAC.Skew = 30 * time.Second
	c.Push.Mode, c.Push.MaxUnanswered = d.Push.String(), strconv.Itoa(d.MaxUnanswered)
	c.Probe.Interval, c.Probe.Misses = 500*time.Millisecond, 3
	c.PromptIndexBytes = 32 << 20
	return c
}

// On reports whether there are other regions.
func (c *Config) On() bool { return c.Mode != Off }

// Follows reports whether another proxy, the central one, decides where the requests of this proxy go.
func (c *Config) Follows() bool { return c.Mode == Central && c.Central != c.Self.ID }

// Leads reports whether this proxy is the central one, which decides where the requests of all proxies go.
func (c *Config) Leads() bool { return c.Mode == Central && c.Central == c.Self.ID }

// Settings returns the settings of the policy: its defaults, changed by geo.push of the config file. For an invalid push.mode,
// which checkValues refuses, the default mode remains.
func (c *Config) Settings() policy.Settings {
	s := policy.Defaults()
	s.MaxUnanswered = c.maxUnanswered()
	for mode := policy.SPE; mode <= policy.Blind; mode++ {
		if mode.String() == c.Push.Mode {
			s.Push = mode
		}
	}
	return s
}

// maxUnanswered is push.max_unanswered as a number; policy.Auto for auto, -1 for invalid text.
func (c *Config) maxUnanswered() int {
	if c.Push.MaxUnanswered == auto {
		return policy.Auto
	}
	n, err := strconv.Atoi(c.Push.MaxUnanswered)
	if err != nil {
		return -1
	}
	return n
}

// Signed reports whether requests between proxies are signed with keys.
func (c *Config) Signed() bool { return c.HMAC.KeysFile != "" || c.HMAC.KeysEnv != "" }

// ReadKeys reads the keys with which requests between proxies are signed; nil: they are not signed.
func (c *Config) ReadKeys() (*Keys, error) {
	if !c.Signed() {
		return nil, nil
	}
	text := os.Getenv(c.HMAC.KeysEnv)
	if c.HMAC.KeysFile != "" {
		file, err := os.ReadFile(c.HMAC.KeysFile)
		if err != nil {
			return nil, fmt.Errorf("geo.hmac.keys_file: %w", err)
		}
		text = string(file)
	} else if text == "" {
		return nil, fmt.Errorf("geo.hmac.keys_env names %s, which is empty; export it", c.HMAC.KeysEnv)
	}
	keys, err := ParseKeys(text)
	if err != nil {
		return nil, fmt.Errorf("geo.hmac: %w", err)
	}
	return keys, nil
}
