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

// Config is the section `geo` of the config file, with further parameters of New.
type Config struct {
	Mode    string `yaml:"mode"`
	Central string `yaml:"central"` // id of the proxy that decides, in mode central
	Self    Self   `yaml:"self"`
	Listen  string `yaml:"listen"` // for other proxies
	TLS     TLS    `yaml:"tls"`
	HMAC    struct {
		// KeysFile has a key per line: its id, a space, 32 bytes or more. The first key signs.
		KeysFile string        `yaml:"keys_file"`
		KeysEnv  string        `yaml:"keys_env"` // environment variable with the keys, as in keys_file
		Skew     time.Duration `yaml:"skew"`     // how far the clocks of sender and receiver may differ
	} `yaml:"hmac"`
	Peers  []PeerConfig `yaml:"peers"`
	Policy string       `yaml:"policy"` // as policy.Settings.Parse reads it
	Push   struct {
		Mode          string `yaml:"mode"`           // see policy.Push
		MaxUnanswered string `yaml:"max_unanswered"` // a number, or auto
	} `yaml:"push"`
	Probe struct {
		Interval time.Duration `yaml:"interval"` // between two probes of a peer
		Misses   int           `yaml:"misses"`   // in a row, until a peer counts as down
	} `yaml:"probe"`
	MaxHops   int       `yaml:"max_hops"`
	Ownership Ownership `yaml:"ownership"`
	Egress    struct {
		// DailyUSD is for the bytes of forwards, per peer and UTC day; 0: no limit.
		DailyUSD float64 `yaml:"daily_usd"`
	} `yaml:"egress"`
	// Residency has the allowed regions by tenant or model; no entry: all are allowed.
	Residency map[string][]string `yaml:"residency"`

	// PromptIndexBytes bounds the memory for what each peer was sent. Only tests and simulations
	// change it.
	PromptIndexBytes int64 `yaml:"-"`

	// Siblings: peers in the own region serve the same engines, and each owns some decode groups.
	Siblings   bool          `yaml:"-"`
	FirstByte  time.Duration `yaml:"-"` // for the first event of a forward
	Idle       time.Duration `yaml:"-"` // for each later event
	Connect    time.Duration `yaml:"-"` // to a peer
	Whole      time.Duration `yaml:"-"` // like FirstByte, for a peer in the own region
	WholeBytes int           `yaml:"-"` // bound of an answer in one piece
	EventBytes int           `yaml:"-"` // bound of one event

	Keys  *Keys `yaml:"-"` // nil: certificates alone prove the sender
	Queue Queue `yaml:"-"`
	// Running returns the requests on the least busy decode rank of a model, and how many all ranks
	// can run at once. It must not wait.
	Running  func(model string) (perReplica float64, seqs int) `yaml:"-"`
	Draining func() bool                                       `yaml:"-"`
	// Tenure is what this proxy owns; nil: nothing here has an owner.
	Tenure func() Tenure `yaml:"-"`
	// OnProbe is called for each good answer to a probe; nil if Tenure is nil.
	OnProbe func(ProbeReport) `yaml:"-"`
	// Lookup finds the addresses of a host; nil: by DNS.
	Lookup func(ctx context.Context, d Discovery, host, port string) (addresses []string, err error) `yaml:"-"`

	Clock Clock                  `yaml:"-"`
	Link  func(peer string) Link `yaml:"-"` // to a peer, by the id of its entry; nil: over HTTP

	Registerer prometheus.Registerer `yaml:"-"`
	Log        *zap.Logger           `yaml:"-"`
}

// Self names this proxy and its region.
type Self struct {
	ID     string `yaml:"id"`
	Region string `yaml:"region"`
}

// TLS has this proxy's certificate. CA signs those of other proxies.
type TLS struct {
	Cert string `yaml:"cert"`
	Key  string `yaml:"key"`
	CA   string `yaml:"ca"`
}

// PeerConfig is one proxy, or all proxies behind a host name.
type PeerConfig struct {
	ID       string    `yaml:"id"` // with discover, a prefix: eu for eu-1 and eu-2
	Region   string    `yaml:"region"`
	URL      string    `yaml:"url"`
	Discover Discovery `yaml:"discover"`
	// SAN is a DNS or URI name in the certificate; empty: a request with one is refused.
	SAN      string         `yaml:"san"`
	PriceOut float64        `yaml:"price_out"` // USD per GB sent
	PriceIn  float64        `yaml:"price_in"`  // USD per GB received
	Target   *engine.Target `yaml:"-"`         // URL and TLS settings, for calls
}

// Discovery is how the proxies of an entry are found.
type Discovery string

// Values of Discovery.
const (
	Static Discovery = ""    // the host is one proxy
	ByA    Discovery = "a"   // each address of the host is a proxy
	BySRV  Discovery = "srv" // each SRV record of the host is a proxy
)

// AnswersTo reports whether a proxy belongs to the entry. With discover, so do ids of the entry's
// id, a dash and any text.
func (c *PeerConfig) AnswersTo(id string) bool {
	return id == c.ID || c.Discover != Static && strings.HasPrefix(id, c.ID+"-")
}

// SANs are the names that a proxy's certificate may have.
func (c *PeerConfig) SANs() []string {
	if c.SAN == "" {
		return nil
	}
	return []string{c.SAN}
}

// Modes of geo. Distributed: each proxy decides for its own requests. Central: one decides for all.
const (
	Off         = "off"
	Distributed = "distributed"
	Central     = "central"
)

// auto: max_unanswered follows the traffic.
const auto = "auto"

// Default is the Config of an empty file.
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

// Follows says that the central proxy decides for this one.
func (c *Config) Follows() bool { return c.Mode == Central && c.Central != c.Self.ID }

// Leads says that this proxy is the central one.
func (c *Config) Leads() bool { return c.Mode == Central && c.Central == c.Self.ID }

// Settings are the policy's defaults, changed by geo.push. checkValues refuses an invalid mode.
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

// maxUnanswered is -1 for invalid text.
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

// Signed reports whether requests between proxies are signed.
func (c *Config) Signed() bool { return c.HMAC.KeysFile != "" || c.HMAC.KeysEnv != "" }

// ReadKeys returns nil if requests between proxies are not signed.
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
