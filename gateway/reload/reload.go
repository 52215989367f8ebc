// Package reload holds the config in force and the contents of the files that the config names. It
// reads the config and these files again when they change. A new config is checked as a whole, and
// comes into force as a whole or not at all.
package reload

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway/certs"
	"evenkeel/gateway/config"
	"evenkeel/predictor"
)

var errEmptyConfig = errors.New("the file is empty or sets no key, so it would remove all engines; write it again, " +
	"or wait if it is being written")

// New puts a validated config in force, and reads all files that the config names, except those of
// engines. It returns the fit from which predictions start; nil: there is no fit file.
func New(cfg *config.Config, d Deps) (*Reloader, *predictor.Fit, error) {
	r := &Reloader{deps: d, metrics: newMetrics(d.Registerer), source: source{at: d.Started}, fitFile: fitFile{path: cfg.Predictor.File}}
	r.settings.Store(newSettings(cfg))
	r.warnOfDoubts(cfg)
	s, err := readSecrets(cfg)
	if err != nil {
		return nil, nil, err
	}
	r.useSecrets(s)
	r.warnIfWorldReadable(privateFiles(cfg)...)
	r.exportStatus()
	if cfg.Geo.On() && cfg.Geo.TLS.CA != "" {
		if r.authority, err = certs.LoadAuthority(cfg.Geo.TLS.CA); err != nil {
			return nil, nil, fmt.Errorf("geo.tls.ca: %w", err)
		}
	}
	fit, err := r.fitFile.readIfChanged()
	if err != nil {
		return nil, nil, fmt.Errorf("predictor.file: %w", err)
	}
	r.warnOfUnusedFit(cfg)
	return r, fit, nil
}

// SetSource says from where a reload reads the config. It must be called before Watch. Without it
// no reload changes the config.
func (r *Reloader) SetSource(file string, load func() (*config.Config, error)) {
	now := digestOf(file)
	r.source = source{file: file, load: load, lastRead: now, inForce: now, at: r.deps.Started}
	r.exportStatus()
}

// Reload reads the config file again and puts it in force: all of it or, if there is an error,
// nothing. The result names the changed keys that need a restart. With dry, Reload changes nothing,
// and the result says what it would change. Without dry, it also reads changed files that the
// config names.
func (r *Reloader) Reload(dry bool) Reload {
	r.mu.Lock()
	defer r.mu.Unlock()
	result := r.reloadConfig(dry)
	if !dry {
		r.reloadNamedFiles()
	}
	return result
}

// reloadConfig reads the config file again, and puts it in force if it is valid and sets other
// values than before. With dry, it only says what it would change. Otherwise it also remembers
// which version of the config file it has read, and reports the outcome. It does not look for
// changes of the files that the config names.
func (r *Reloader) reloadConfig(dry bool) (result Reload) {
	result = Reload{At: time.Now(), Outcome: unchanged, Changes: []config.Change{}}
	if r.source.load == nil { // SetSource was not called, so there is no file to read
		return result
	}
	present := digestOf(r.source.file) // computed before the file is read: if the file changes meanwhile, the change is noticed later
	p, err := r.prepare()
	if err == nil && len(p.changes) > 0 {
		result.Changes = p.changes
		for _, c := range p.changes {
			if c.Restart {
				result.Restart = append(result.Restart, c.Path)
			}
		}
		if dry {
			result.Outcome = dryRun
		} else {
			result.Outcome = used
			err = p.apply(func() { r.commit(p) })
		}
	}
	if err != nil {
		result.markRefused(err)
	}
	if dry {
		return result
	}
	// The result and the version that was read are stored, so that Watch reads the file again only
	// after the next change.
	r.source.lastRead, r.source.refusedFiles = present, nil
	switch {
	case err != nil:
		r.source.refusedFiles = p.namedFiles // a change of one of these files may make the config valid
	case result.Outcome == used:
		r.source.inForce, r.source.at = present, result.At
		r.callOnChange()
	default: // the file may have changed, but sets the same values
		r.source.inForce = present
	}
	r.source.last = &result
	r.report(&result)
	return result
}

// markRefused turns the result into that of a refused config: the error, and its position in the
// file if it has one. No setting has changed then.
func (r *Reload) markRefused(err error) {
	r.Outcome, r.Changes, r.Restart = refused, []config.Change{}, nil
	r.Error = err.Error()
	var located *config.Error
	if errors.As(err, &located) {
		r.Line, r.Column = located.Line, located.Column
	}
}

// report logs and counts the outcome of a reload, and updates the status. It counts only new
// versions of the config, so not a reload that changed nothing. If the new config is in force,
// report also warns of its doubtful settings.
func (r *Reloader) report(result *Reload) {
	log := r.deps.Log.With(zap.String("file", r.source.file))
	switch result.Outcome {
	case refused:
		log.Error("the new config is not used, and the config before it stays in force; correct the file", zap.String("error", result.Error))
	case unchanged:
		log.Info("the config file was read again, and nothing in it has changed")
	case used:
		changes := make([]string, len(result.Changes))
		for i, c := range result.Changes {
			changes[i] = c.String()
		}
		log.Info("the new config is in force now", zap.Strings("changes", changes))
		r.warnOfDoubts(r.Settings().Config)
		r.warnOfUnusedFit(r.Settings().Config)
		if len(result.Restart) > 0 {
			r.deps.Log.Warn("some keys of the new config take effect only after a restart", zap.Strings("keys", result.Restart))
		}
	}
	if result.Outcome != unchanged {
		r.metrics.reloads.WithLabelValues(keyConfig, result.Outcome).Inc()
	}
	r.exportStatus()
}

// warnOfDoubts warns of settings that are valid but probably a mistake.
func (r *Reloader) warnOfDoubts(cfg *config.Config) {
	for _, d := range cfg.Doubts() {
		at := zap.Skip()
		if d.Line > 0 { // 0: the value is not from the file
			at = zap.String("at", fmt.Sprintf("%s:%d:%d", d.File, d.Line, d.Column))
		}
		r.deps.Log.Warn(d.Msg, zap.String(keyField, d.Path), at)
	}
}

// exportStatus updates the metrics and the status that say which config is in force.
func (r *Reloader) exportStatus() {
	r.metrics.exportConfig(&r.source)
	s := &ConfigStatus{File: r.source.file, Since: r.source.at, Last: r.source.last}
	if r.source.load != nil { // nil: the config does not come from a file
		s.SHA256 = fmt.Sprintf("%x", r.source.inForce)
	}
	r.status.Store(s)
}

// prepare reads and checks the config file and all files that it names. It changes nothing. If it
// returns an error, the result has only namedFiles: the files that the config names. These are nil
// if the error is in the config file itself. If the config names the same fit file as before,
// prepare does not read it, because reloadFit does so whenever its content has changed.
func (r *Reloader) prepare() (*prepared, error) {
	p := &prepared{}
	next, err := r.source.load()
	if err != nil {
		return p, err
	}
	old := r.Settings()
	if next.Blank() && !old.Blank() { // probably by mistake, or the file is being written
		return p, fmt.Errorf("config %s: %w", r.source.file, errEmptyConfig)
	}
	merged, changes, err := old.MergeReload(next)
	if err != nil {
		return p, err
	}
	p.settings, p.changes = newSettings(merged), changes
	p.namedFiles = digestsOf(filesOf(merged)) // computed before the files are read: if one changes meanwhile, the change is noticed later
	if p.secrets, err = readSecrets(merged); err != nil {
		return p, err
	}
	var newFit *predictor.Fit // nil: predictions go on from the present fit
	if merged.Predictor.File == old.Predictor.File {
		p.fitFile = r.fitFile
	} else {
		p.fitFile = fitFile{path: merged.Predictor.File}
		if newFit, err = p.fitFile.readIfChanged(); err != nil {
			return p, fmt.Errorf("predictor.file: %w", err)
		}
	}
	p.apply, err = r.deps.Prepare(old, p.settings, newFit)
	return p, err
}

// commit puts a prepared config in force. It cannot fail.
func (r *Reloader) commit(p *prepared) {
	r.fitFile = p.fitFile
	r.useSecrets(p.secrets)
	r.warnIfWorldReadable(privateFiles(p.settings.Config)...)
	r.settings.Store(p.settings)
}
