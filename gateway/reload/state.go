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

// A Reloader gives every request and every TLS handshake the values in force. None of them waits
// for a reload, which may take long if the files are on a slow disk.
type Reloader struct {
	deps      Deps
	metrics   *metrics
	settings  atomic.Pointer[Settings]
	status    atomic.Pointer[ConfigStatus]
	keys      atomic.Pointer[keys.Set]
	token     atomic.Pointer[token] // the token that admin requests need; nil: they need none
	promptKey atomic.Pointer[[]byte]
	tls       [listeners]*certs.Pair // never replaced once listeners have them: a reload changes their contents
	authority *certs.Authority       // signs the certificates of other proxies; nil: other proxies have no certificates
	onChange  []func()               // functions to call after files may have changed (see OnChange)

	mu       sync.Mutex // guards all fields below: only one goroutine at a time reads files
	source   source
	fitFile  fitFile
	lastRead map[string]digest // digests of small files as they were last read
	// profileFilesAtRefusal has the digests of the files of all profiles at the last change of a
	// ca_file that could not be used; nil: the last change was used.
	profileFilesAtRefusal map[string]digest
}

// Outcomes of a reload.
const (
	used      = "used"
	refused   = "refused"
	unchanged = "unchanged"
	dryRun    = "dry"
)

// Settings returns the settings in force. A caller that needs several of them must call Settings
// only once, because a reload may come in between.
func (r *Reloader) Settings() *Settings { return r.settings.Load() }

// prepared is a config that was checked. All files that it names have been read.
type prepared struct {
	settings   *Settings
	changes    []config.Change
	secrets    *secrets
	fitFile    fitFile
	namedFiles map[string]digest // digests of the files that the config names
	apply      func(commit func()) error
}

// source says from where the config is read again.
type source struct {
	file     string
	load     func() (*config.Config, error) // parses the file, applies what overrides it, and validates the result
	lastRead digest                         // version of the file that was last read, even if it was refused
	inForce  digest                         // version of the file that is in force
	// refusedFiles has the digests of the files that a refused config names: the config is tried again
	// when one of them changes. nil: the last version was not refused.
	refusedFiles map[string]digest
	at           time.Time // time since which the version inForce is in force
	last         *Reload   // result of the last reload; nil: there was none
}

// Deps is what a Reloader needs of the proxy.
type Deps struct {
	Log        *zap.Logger
	Registerer prometheus.Registerer
	Started    time.Time

	// Prepare checks a new config with all components of the proxy, and changes nothing. fit is nil if
	// the fit file has not changed. apply puts the config in force: first in components that may still
	// refuse it, then it calls commit, and then in components that read the settings in force.
	Prepare func(old, next *Settings, fit *predictor.Fit) (apply func(commit func()) error, err error)
	// ReloadTrust reads the certificate authorities of engines again, if changed says that their file
	// has changed.
	ReloadTrust func(changed func(file string) bool) (bool, error)
	SetFit      func(*predictor.Fit) error
	SetGeoKeys  func(*geo.Keys)
}

// ConfigStatus says which config is in force and where it came from.
type ConfigStatus struct {
	File   string    `json:"file,omitempty"` // empty: the config comes from flags
	SHA256 string    `json:"sha256,omitempty"`
	Since  time.Time `json:"since"`
	Last   *Reload   `json:"last_reload,omitempty"`
}

// Reload is the outcome of a reload of the config.
type Reload struct {
	At      time.Time       `json:"at"`
	Outcome string          `json:"outcome"` // used, refused, unchanged; dry: what would be used
	Error   string          `json:"error,omitempty"`
	Line    int             `json:"line,omitempty"` // line of the first error in the file; 0: not known
	Column  int             `json:"column,omitempty"`
	Changes []config.Change `json:"changes"`
	Restart []string        `json:"needs_restart,omitempty"` // changed keys that take effect only after a restart
}

// Settings are the config in force, with values that are derived from it. They never change: a
// reload replaces them.
type Settings struct {
	*fleet.Settings
	Accept openai.Limits // limits of what a client may send
}

// newSettings derives the settings from a config. The contents of the files that the config names
// are not part of the settings (see secrets).
func newSettings(cfg *config.Config) *Settings {
	return &Settings{fleet.NewSettings(cfg), openai.Limits{
		VocabSize: vocabSize(cfg), ChatTemplate: cfg.Limits.ChatTemplate, MediaHosts: cfg.Limits.MediaHosts,
		Answers: cfg.Limits.Answers, AnswersPerPrompt: cfg.Limits.AnswersPerPrompt, StopStrings: cfg.Limits.StopStrings,
	}}
}

// vocabSize is the smallest vocabulary of the profiles in use, because any engine may get a token
// id; 0: one of them is unknown (0 in its profile), or no profile is in use.
func vocabSize(cfg *config.Config) int {
	smallest := math.MaxInt
	for _, name := range cfg.ProfilesInUse("") { // empty: of all roles
		if size := cfg.Profiles[name].VocabSize; size < smallest {
			smallest = size
		}
	}
	if smallest == math.MaxInt { // no profile is in use
		return 0
	}
	return smallest
}

// secrets are the contents of files with secrets, keys and certificates.
type secrets struct {
	keys                *keys.Set
	token               *token
	promptKey           []byte                 // hashes prompts for the predictor; nil: it does not distinguish prompts
	tls                 [listeners]*certs.Pair // nil: the listener has no TLS
	digests             map[string]digest      // digests of the files as they were read
	filesOfOtherReaders map[string]digest      // digests of the files that other components read: authorities and geo keys
}

// The listeners that may have TLS.
const (
	Public = iota
	Admin
	Peers
	listeners
)

// digest identifies a version of a small file by its contents, because some tools replace a file
// without changing its time.
type digest [sha256.Size]byte

// token is the hash of the token that admin requests need.
type token struct{ sum digest }

// tlsKeys are the config keys of the listeners' certificates.
var tlsKeys = [listeners]string{keyTLS, keyAdminTLS, keyGeoTLS}

type metrics struct {
	reloads  *prometheus.CounterVec
	certEnd  *prometheus.GaugeVec
	ok, hash prometheus.Gauge
}

// Status says which config is in force and where it came from.
func (r *Reloader) Status() *ConfigStatus { return r.status.Load() }

// Keys returns the API keys of clients that are in force. A reload replaces the set.
func (r *Reloader) Keys() *keys.Set { return r.keys.Load() }

// Certificate returns the certificate of a listener; nil: the listener has no TLS.
func (r *Reloader) Certificate(listener int) *certs.Pair { return r.tls[listener] }

// Authority returns the authority that signs the certificates of other proxies; nil: other proxies
// have no certificates.
func (r *Reloader) Authority() *certs.Authority { return r.authority }

// newMetrics registers the metrics of reloads, certificates and the config in force.
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
	// Each counter exists from the start with the value 0, so that its rate shows the first reload,
	// too.
	for _, key := range []string{keyConfig, keyKeys, keyToken, keyTLS, keyAdminTLS, keyAuthority, keyPredictor, keyPromptKey, keyGeoTLS,
		keyGeoCA, keyGeoKeys} {
		for _, outcome := range []string{used, refused} {
			m.reloads.WithLabelValues(key, outcome)
		}
	}
	reg.MustRegister(m.reloads, m.certEnd)
	return m
}

// exportConfig exports which config is in force, and whether the last one was refused.
func (m *metrics) exportConfig(s *source) {
	ok := 1.0
	if s.last != nil && s.last.Outcome == refused {
		ok = 0
	}
	m.ok.Set(ok)
	m.hash.Set(float64(binary.BigEndian.Uint64(s.inForce[:8]) >> 16)) // 48 bits, which a float64 can hold exactly
}

// fitFile is the file from which predictions start. It is read again whenever it changes. If the
// new version cannot be used, the version before stays in force.
type fitFile struct {
	path     string
	lastRead fileState
	kind     predictor.Kind // kind of the fit that was last read
}

// fileState identifies a version of a large file without reading the file.
type fileState struct {
	modified time.Time
	size     int64
}

// Config keys of the files that are read again when they change, as labels of
// evenkeel_reloads_total.
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
