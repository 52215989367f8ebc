package gateway

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/config"
	"evenkeel/gateway/files"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/tracing"
	"evenkeel/prefill"
)

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

const (
	reloadUnchanged = "unchanged"
	reloadDry       = "dry"
)

// ConfigStatus is what is in force and where it came from.
type ConfigStatus struct {
	File   string    `json:"file,omitempty"` // empty: flags
	SHA256 string    `json:"sha256,omitempty"`
	Since  time.Time `json:"since"`
	Last   *Reload   `json:"last_reload,omitempty"`
}

// configSource is where the config is read again from.
type configSource struct {
	file string
	load func() (*config.Config, error) // parses, validates and applies what overrules the file
	seen digest                         // looked at last
	used digest
	at   time.Time // since when it is in force
	last *Reload
}

var errEmptyConfig = errors.New("the file is empty, and a proxy without engines is hardly meant; is it being written?")

// ReadsFrom says where another version of the config comes from. Call it before
// Start; without it the config stays as it is.
func (g *Gateway) ReadsFrom(file string, load func() (*config.Config, error)) {
	now := digestOf(file)
	g.source = configSource{file: file, load: load, seen: now, used: now, at: g.started}
	g.noteConfig()
}

// Reload reads the config file again and makes it what runs: all of it or, when
// anything is wrong, nothing. What only a restart changes is told and left. A
// dry one changes nothing and tells what it would. Files that the config names
// are looked at, too.
func (g *Gateway) Reload(dry bool) Reload {
	g.reloading.Lock()
	defer g.reloading.Unlock()
	r := g.reload(dry)
	if !dry {
		g.lookAtSecrets()
	}
	return r
}

func (g *Gateway) reload(dry bool) (r Reload) {
	r = Reload{At: time.Now(), Outcome: reloadUnchanged, Changes: []config.Change{}}
	if g.source.load == nil {
		return r
	}
	seen := digestOf(g.source.file)
	p, err := g.prepare()
	switch {
	case err != nil:
		r.Outcome = reloadRefused
		r.fail(err)
	case len(p.changes) > 0:
		r.Changes = p.changes
		for _, c := range p.changes {
			if c.Restart {
				r.Restart = append(r.Restart, c.Path)
			}
		}
		r.Outcome = reloadDry
		if !dry {
			r.Outcome = reloadUsed
			if err = g.apply(p); err != nil {
				r.Outcome, r.Changes, r.Restart = reloadRefused, []config.Change{}, nil
				r.fail(err)
			}
		}
	}
	if dry {
		return r
	}
	if g.source.seen = seen; err == nil {
		g.source.used, g.source.at = seen, r.At
	}
	g.source.last = &r
	g.tell(&r)
	return r
}

// fail notes what is wrong, and where first.
func (r *Reload) fail(err error) {
	r.Error = err.Error()
	var at *config.Error
	if errors.As(err, &at) {
		r.Line, r.Column = at.Line, at.Column
	}
}

// tell logs and counts what became of a reload.
func (g *Gateway) tell(r *Reload) {
	changes := make([]string, len(r.Changes))
	for i, c := range r.Changes {
		changes[i] = c.String()
	}
	switch r.Outcome {
	case reloadRefused:
		g.log.Error("the new config is not used, what was read before stays in force; put it right", zap.String("file", g.source.file), zap.String("error", r.Error))
	case reloadUnchanged:
		g.log.Info("the config file says what is in force already", zap.String("file", g.source.file))
	case reloadUsed:
		g.log.Info("the new config is in force", zap.String("file", g.source.file), zap.Strings("changes", changes))
		g.doubt(g.conf().Config)
		if len(r.Restart) > 0 {
			g.log.Warn("some of the new config needs a restart", zap.Strings("keys", r.Restart))
		}
	}
	if r.Outcome != reloadUnchanged {
		g.metrics.reloads.WithLabelValues(keyConfig, r.Outcome).Inc()
	}
	g.noteConfig()
}

// noteConfig exports which config is in force. Who asks for it does not wait for
// a reload, which may take long: files may lie on a slow disk.
func (g *Gateway) noteConfig() {
	ok := 1.0
	if g.source.last != nil && g.source.last.Outcome == reloadRefused {
		ok = 0
	}
	g.metrics.configOK.Set(ok)
	g.metrics.configSince.Set(float64(g.source.at.Unix()))
	g.metrics.configHash.Set(float64(binary.BigEndian.Uint64(g.source.used[:8]) >> 16)) // what a float holds
	s := &ConfigStatus{File: g.source.file, Since: g.source.at, Last: g.source.last}
	if g.source.load != nil {
		s.SHA256 = fmt.Sprintf("%x", g.source.used)
	}
	g.configured.Store(s)
}

// prepared is a config that was found good, with everything that may fail done.
type prepared struct {
	set     *settings
	changes []config.Change
	secrets *secrets
	fleet   *fleet.Plan
	tier    prefill.Config
	decide  board.Settings
	fit     fitFile
	traces  tracing.Config
	traced  bool
}

// prepare reads and checks the file and all that it names. Nothing has changed
// after it.
func (g *Gateway) prepare() (*prepared, error) {
	text, err := os.ReadFile(g.source.file)
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	if strings.TrimSpace(string(text)) == "" {
		return nil, fmt.Errorf("config %s: %w", g.source.file, errEmptyConfig)
	}
	next, err := g.source.load()
	if err != nil {
		return nil, err
	}
	old := g.conf()
	merged, changes, err := old.Succeed(next)
	if err != nil {
		return nil, err
	}
	p := &prepared{changes: changes, set: newSettings(merged)}
	if p.secrets, err = readSecrets(merged); err != nil {
		return nil, err
	}
	if p.fleet, err = g.fleet.Plan(old.Settings, p.set.Settings); err != nil {
		return nil, err
	}
	if p.traces, p.traced, err = g.tracerConfig(merged); err != nil {
		return nil, err
	}
	p.tier = g.prefillConfig(p.set)
	if p.tier.Policy == g.prefillConfig(old).Policy {
		p.tier.Policy = g.tier.Policy() // an operator may have set another since
	}
	if err := p.tier.Validate(); err != nil {
		return nil, err
	}
	p.decide = p.set.decision()
	p.fit = fitFile{path: merged.Predictor.File}
	if merged.Predictor.File != old.Predictor.File {
		if p.decide.Predictor.Fit, err = p.fit.read(); err != nil {
			return nil, fmt.Errorf("predictor.file: %w", err)
		}
	} else {
		p.fit.seen = g.fit.seen
	}
	if merged.Dispatch.Policy == old.Dispatch.Policy {
		p.decide.Policy = "" // as above
	}
	return p, g.dispatcher.Accepts(p.decide)
}

// apply puts a prepared config in force. An operator's policy may have come in
// between, so the dispatcher, which may still refuse, is told first.
func (g *Gateway) apply(p *prepared) error {
	if err := g.dispatcher.Configure(p.decide); err != nil {
		return err
	}
	if err := g.tier.Configure(p.tier); err != nil {
		return err
	}
	g.fit = p.fit
	g.use(p.secrets)
	g.warnOfReaders(privateFiles(p.set.Config)...)
	g.retrace(g.conf().Config, p.set.Config, p.traces, p.traced)
	g.current.Store(p.set)
	g.places.Resize(p.set.Pool.Size)
	g.fleet.Apply(p.fleet)
	g.discovery.recheck()
	return nil
}

// decision is what the dispatcher is told of the settings.
func (s *settings) decision() board.Settings {
	d := &s.Dispatch
	return board.Settings{
		Policy: d.Policy, Window: d.Window, TickLimit: d.TickLimit, TTL: s.PoolTTL(), StepModel: d.StepModel, Predictor: s.Predictor,
	}
}

// watchFiles has every file the proxy was given looked at when it changes, until
// ctx ends.
func (g *Gateway) watchFiles(ctx context.Context) {
	files.Watch(ctx, g.fileList, g.lookAtFiles, g.log)
}

func (g *Gateway) fileList() (list []string) {
	cfg := g.conf()
	all := []string{
		g.source.file, cfg.KeysFile, cfg.Admin.TokenFile, cfg.TLS.CertFile, cfg.TLS.KeyFile, cfg.Admin.TLS.CertFile, cfg.Admin.TLS.KeyFile, cfg.Predictor.File, cfg.Predictor.SecretFile,
		cfg.Geo.TLS.Cert, cfg.Geo.TLS.Key, cfg.Geo.TLS.CA, cfg.Geo.HMAC.KeysFile,
	}
	all = append(all, cfg.Discovery.Files...)
	for _, p := range cfg.Profiles {
		all = append(all, p.CAFile)
	}
	for _, f := range all {
		if f != "" {
			list = append(list, f)
		}
	}
	return list
}

// lookAtFiles reads again what changed.
func (g *Gateway) lookAtFiles() {
	g.reloading.Lock()
	defer g.reloading.Unlock()
	if g.source.load != nil {
		if now := digestOf(g.source.file); now != g.source.seen && now != (digest{}) { // zero: between two versions
			g.reload(false)
		}
	}
	g.lookAtSecrets()
	g.discovery.lookAtFiles()
}

func (g *Gateway) lookAtSecrets() {
	for _, w := range g.watchedFiles() {
		switch changed, err := w.reload(); {
		case err != nil:
			g.metrics.reloads.WithLabelValues(w.key, reloadRefused).Inc()
			g.log.Error("a file that changed is not used, what was read before stays in force; put it right", zap.String("key", w.key), zap.Error(err))
		case changed:
			g.metrics.reloads.WithLabelValues(w.key, reloadUsed).Inc()
			g.log.Info("a file that changed is in force", zap.String("key", w.key))
		}
	}
}
