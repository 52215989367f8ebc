// Package reload holds what is in force: the config, and what the files that it names
// hold. It reads them again when they change, checks all of it, and puts it in force
// whole or not at all.
package reload

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway/certs"
	"evenkeel/gateway/config"
	"evenkeel/predictor"
)

var errEmptyConfig = errors.New("the file is empty, so it would remove all engines; write it again, or wait if it is being written")

// New puts a validated config in force, and reads all files that it names but those of
// engines. It returns what predictions start from; nil: there is no fit file.
func New(cfg *config.Config, h Host) (*Reloader, *predictor.Fit, error) {
	r := &Reloader{host: h, metrics: newMetrics(h.Registerer), source: source{at: h.Started}, fit: fitFile{path: cfg.Predictor.File}}
	r.settings.Store(newSettings(cfg))
	r.doubt(cfg)
	s, err := readSecrets(cfg)
	if err != nil {
		return nil, nil, err
	}
	r.use(s)
	r.warnOfReaders(privateFiles(cfg)...)
	r.exportStatus()
	if cfg.Geo.On() && cfg.Geo.TLS.CA != "" {
		if r.authority, err = certs.LoadAuthority(cfg.Geo.TLS.CA); err != nil {
			return nil, nil, fmt.Errorf("geo.tls.ca: %w", err)
		}
	}
	fit, err := r.fit.read()
	if err != nil {
		return nil, nil, fmt.Errorf("predictor.file: %w", err)
	}
	r.doubtFit(cfg)
	return r, fit, nil
}

// ReadsFrom says where another version of the config comes from. Call it before
// Watch; without it the config stays as it is.
func (r *Reloader) ReadsFrom(file string, load func() (*config.Config, error)) {
	now := digestOf(file)
	r.source = source{file: file, load: load, seen: now, used: now, at: r.host.Started}
	r.exportStatus()
}

// Reload reads the config file again and makes it what runs: all of it or, when
// anything is wrong, nothing. What only a restart changes is told and left. A
// dry one changes nothing and tells what it would. Files that the config names
// are looked at, too.
func (r *Reloader) Reload(dry bool) Reload {
	r.mu.Lock()
	defer r.mu.Unlock()
	got := r.reload(dry)
	if !dry {
		r.lookAtSecrets()
	}
	return got
}

func (r *Reloader) reload(dry bool) (got Reload) {
	got = Reload{At: time.Now(), Outcome: unchanged, Changes: []config.Change{}}
	if r.source.load == nil {
		return got
	}
	seen := digestOf(r.source.file)
	p, err := r.prepare()
	switch {
	case err != nil:
		got.Outcome = refused
		got.fail(err)
	case len(p.changes) > 0:
		got.Changes = p.changes
		for _, c := range p.changes {
			if c.Restart {
				got.Restart = append(got.Restart, c.Path)
			}
		}
		got.Outcome = dryRun
		if !dry {
			got.Outcome = used
			if err = p.apply(func() { r.commit(p) }); err != nil {
				got.Outcome, got.Changes, got.Restart = refused, []config.Change{}, nil
				got.fail(err)
			}
		}
	}
	if dry {
		return got
	}
	if r.source.seen = seen; err == nil {
		r.source.used = seen
		if got.Outcome == used {
			r.source.at = got.At
			r.host.LookAtEngines()
		}
	}
	r.source.last = &got
	r.tell(&got)
	return got
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
func (r *Reloader) tell(got *Reload) {
	log := r.host.Log.With(zap.String("file", r.source.file))
	switch got.Outcome {
	case refused:
		log.Error("the new config is not used, and the config before it stays in force; correct the file", zap.String("error", got.Error))
	case unchanged:
		log.Info("the config file was read again, and nothing in it has changed")
	case used:
		changes := make([]string, len(got.Changes))
		for i, c := range got.Changes {
			changes[i] = c.String()
		}
		log.Info("the new config is in force now", zap.Strings("changes", changes))
		r.doubt(r.Settings().Config)
		r.doubtFit(r.Settings().Config)
		if len(got.Restart) > 0 {
			r.host.Log.Warn("some keys of the new config take effect only after a restart", zap.Strings("keys", got.Restart))
		}
	}
	if got.Outcome != unchanged {
		r.metrics.reloads.WithLabelValues(keyConfig, got.Outcome).Inc()
	}
	r.exportStatus()
}

// doubt warns of settings that are valid but probably a mistake.
func (r *Reloader) doubt(cfg *config.Config) {
	for _, d := range cfg.Doubts() {
		at := zap.Skip()
		if d.Line > 0 {
			at = zap.String("at", fmt.Sprintf("%s:%d:%d", d.File, d.Line, d.Column))
		}
		r.host.Log.Warn(d.Msg, zap.String(keyField, d.Path), at)
	}
}

// exportStatus tells which config is in force.
func (r *Reloader) exportStatus() {
	r.metrics.inForce(&r.source)
	s := &ConfigStatus{File: r.source.file, Since: r.source.at, Last: r.source.last}
	if r.source.load != nil {
		s.SHA256 = fmt.Sprintf("%x", r.source.used)
	}
	r.status.Store(s)
}

// prepare reads and checks the file and all that it names. Nothing has changed
// after it.
func (r *Reloader) prepare() (*prepared, error) {
	text, err := os.ReadFile(r.source.file)
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	if strings.TrimSpace(string(text)) == "" {
		return nil, fmt.Errorf("config %s: %w", r.source.file, errEmptyConfig)
	}
	next, err := r.source.load()
	if err != nil {
		return nil, err
	}
	old := r.Settings()
	merged, changes, err := old.Succeed(next)
	if err != nil {
		return nil, err
	}
	p := &prepared{settings: newSettings(merged), changes: changes, fit: fitFile{path: merged.Predictor.File}}
	if p.secrets, err = readSecrets(merged); err != nil {
		return nil, err
	}
	var fit *predictor.Fit
	if merged.Predictor.File == old.Predictor.File {
		p.fit = r.fit
	} else if fit, err = p.fit.read(); err != nil {
		return nil, fmt.Errorf("predictor.file: %w", err)
	}
	p.apply, err = r.host.Prepare(old, p.settings, fit)
	return p, err
}

// commit has a prepared config be the one in force.
func (r *Reloader) commit(p *prepared) {
	r.fit = p.fit
	r.use(p.secrets)
	r.warnOfReaders(privateFiles(p.settings.Config)...)
	r.settings.Store(p.settings)
}
