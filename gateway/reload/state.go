package reload

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/gateway/certs"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/keys"
	"evenkeel/gateway/openai"
	"evenkeel/geo"
	"evenkeel/predictor"
)

// A Reloader is asked for what is in force with every request, and by handshakes:
// none of them waits for a reload, which may take long, because files may lie on a slow
// disk.
type Reloader struct {
	host      Host
	metrics   *metrics
	settings  atomic.Pointer[Settings]
	status    atomic.Pointer[ConfigStatus]
	keys      atomic.Pointer[keys.Set]
	token     atomic.Pointer[token] // of operators; nil: none is asked for
	promptKey atomic.Pointer[[]byte]
	tls       [listeners]*certs.Pair // never replaced, once listeners have them
	authority *certs.Authority       // who signs the certificates of other dispatchers; nil: they show none

	mu     sync.Mutex // over all below: one at a time reads files
	source source
	fit    fitFile
	seen   map[string]digest // small files, as they were read last
}

// Outcomes of a reload.
const (
	used      = "used"
	refused   = "refused"
	unchanged = "unchanged"
	dryRun    = "dry"
)

// Settings are those in force. A caller that needs two of them that belong together
// asks once.
func (r *Reloader) Settings() *Settings { return r.settings.Load() }

// prepared is a config that was found good, with everything that may fail done.
type prepared struct {
	settings *Settings
	changes  []config.Change
	secrets  *secrets
	fit      fitFile
	apply    func(commit func()) error
}

// source is where the config is read again from.
type source struct {
	file string
	load func() (*config.Config, error) // parses, validates and applies what overrules the file
	seen digest                         // looked at last
	used digest
	at   time.Time // since when it is in force
	last *Reload
}

// Host is the proxy as its config sees it.
type Host struct {
	Log        *zap.Logger
	Registerer prometheus.Registerer
	Started    time.Time

	// Prepare checks what the parts of the proxy make of another config; fit is nil where its
	// file is still the same. Nothing has changed when Prepare returns. apply puts the config in
	// force. It calls commit between the parts that may refuse, although Prepare found it good,
	// and those that read the settings in force.
	Prepare func(old, next *Settings, fit *predictor.Fit) (apply func(commit func()) error, err error)
	// ReloadTrust reads again who is trusted to sign the certificates of engines, where changed
	// says that the file is another.
	ReloadTrust   func(changed func(file string) bool) (bool, error)
	SetFit        func(*predictor.Fit) error
	SetGeoKeys    func(*geo.Keys)
	LookAtEngines func() // files that list engines may have changed, or another config is in force
}

// ConfigStatus tells which config is in force and where it came from.
type ConfigStatus struct {
	File   string    `json:"file,omitempty"` // empty: flags
	SHA256 string    `json:"sha256,omitempty"`
	Since  time.Time `json:"since"`
	Last   *Reload   `json:"last_reload,omitempty"`
}

// Reload is what became of another version of the config.
type Reload struct {
	At      time.Time       `json:"at"`
	Outcome string          `json:"outcome"` // used, refused, unchanged; dry: what would be used
	Error   string          `json:"error,omitempty"`
	Line    int             `json:"line,omitempty"` // of the first thing that is wrong
	Column  int             `json:"column,omitempty"`
	Changes []config.Change `json:"changes"`
	Restart []string        `json:"needs_restart,omitempty"` // changed keys that are not in force
}

// Settings are the config in force with what follows from it. They never change: a
// reload puts others in their place.
type Settings struct {
	*fleet.Settings
	Accept openai.Limits // of what a client may send
}

// newSettings works out what follows from a config. Files that it names change by
// themselves (secrets.go).
func newSettings(cfg *config.Config) *Settings {
	return &Settings{fleet.NewSettings(cfg), openai.Limits{
		VocabSize: vocabSize(cfg), ChatTemplate: cfg.Limits.ChatTemplate, MediaHosts: cfg.Limits.MediaHosts,
		Answers: cfg.Limits.Answers, AnswersPerPrompt: cfg.Limits.AnswersPerPrompt, StopStrings: cfg.Limits.StopStrings,
	}}
}

// vocabSize is the smallest of the profiles in use, 0 when any is unknown: a
// token id must be good for whichever engine gets it.
func vocabSize(cfg *config.Config) int {
	size := math.MaxInt
	for _, name := range cfg.ProfilesInUse("") {
		if v := cfg.Profiles[name].VocabSize; v < size {
			size = v
		}
	}
	if size == math.MaxInt {
		return 0
	}
	return size
}

// secrets are what files hold that nobody else should know, or is checked against.
type secrets struct {
	keys    *keys.Set
	token   *token
	prompts []byte                 // the key of hashes that tell prompts apart; nil: nobody does
	tls     [listeners]*certs.Pair // nil: clear text
	seen    map[string]digest      // as the files were read
	ca      map[string]digest      // of authorities; the fleet reads them
}

// The listeners that may have a certificate.
const (
	Public = iota
	Admin
	Peers
	listeners
)

// digest tells versions of a small file apart by their contents: some tools
// keep a file's time when they replace it.
type digest [sha256.Size]byte

// token is what admin requests are let in with; nil: nothing is asked for.
type token struct{ sum digest }

// tlsKeys are those of the listeners' certificates.
var tlsKeys = [listeners]string{keyTLS, keyAdminTLS, keyGeoTLS}

type metrics struct {
	reloads  *prometheus.CounterVec
	certEnd  *prometheus.GaugeVec
	ok, hash prometheus.Gauge
}

// Status is what is in force and where it came from.
func (r *Reloader) Status() *ConfigStatus { return r.status.Load() }

// Keys are those that clients are let in with.
func (r *Reloader) Keys() *keys.Set { return r.keys.Load() }

// Certificate is that of a listener; nil: it speaks clear text.
func (r *Reloader) Certificate(listener int) *certs.Pair { return r.tls[listener] }

// Authority signs the certificates of other dispatchers; nil: they show none.
func (r *Reloader) Authority() *certs.Authority { return r.authority }

func newMetrics(reg prometheus.Registerer) *metrics {
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
		reg.MustRegister(g)
		return g
	}
	m := &metrics{
		reloads: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "evenkeel_reloads_total", Help: "Files that changed while the proxy ran, by what became of the new version. If it was refused, " +
				"the version before stays in force, and the log says why.",
		}, []string{"key", "outcome"}),
		certEnd: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "evenkeel_certificate_expiry_timestamp_seconds", Help: "Unix time at which the certificate that the listener presents now ends.",
		}, []string{"key"}),
		ok: gauge("evenkeel_config_last_reload_successful",
			"0 if the last config file that was read was refused. /status says where it is wrong."),
		hash: gauge("evenkeel_config_hash",
			"The first 48 bits of the SHA-256 of the config file in force. It is equal on proxies with equal files, and 0 without a file."),
	}
	for _, key := range []string{keyConfig, keyKeys, keyToken, keyTLS, keyAdminTLS, keyAuthority, keyPredictor, keyPromptKey, keyGeoTLS,
		keyGeoCA, keyGeoKeys} {
		for _, outcome := range []string{used, refused} {
			m.reloads.WithLabelValues(key, outcome)
		}
	}
	reg.MustRegister(m.reloads, m.certEnd)
	return m
}

// inForce exports which config is in force.
func (m *metrics) inForce(s *source) {
	ok := 1.0
	if s.last != nil && s.last.Outcome == refused {
		ok = 0
	}
	m.ok.Set(ok)
	m.hash.Set(float64(binary.BigEndian.Uint64(s.used[:8]) >> 16)) // what a float holds
}

// fitFile is the file predictions start from. It is read again whenever it
// changes; one that cannot be used leaves what was read before in force.
type fitFile struct {
	path string
	seen fileState
	kind predictor.Kind // of the fit that was read last
}

// fileState tells versions of a file apart.
type fileState struct {
	modified time.Time
	size     int64
}

// Keys of the files that change by themselves, as reloads_total labels them.
const (
	keyConfig    = "config"
	keyKeys      = "keys_file"
	keyToken     = "admin.token_file"
	keyTLS       = "tls"
	keyAdminTLS  = "admin.tls"
	keyAuthority = "ca_file"
	keyPredictor = "predictor.file"
	keyPromptKey = "predictor.secret_file"
	keyGeoTLS    = "geo.tls"
	keyGeoCA     = "geo.tls.ca"
	keyGeoKeys   = "geo.hmac.keys_file"
)
