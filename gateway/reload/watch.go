package reload

import (
	"context"
	"slices"

	"go.uber.org/zap"

	"evenkeel/gateway/config"
	"evenkeel/gateway/files"
	"evenkeel/gateway/keys"
	"evenkeel/geo"
)

// watched is a file, or a group of files, that is read again when it changes. reload says whether a new version is in force. For a version
// that cannot be used it returns an error once, and changes nothing.
type watched struct {
	key    string // key in the config
	reload func() (changed bool, err error)
}

// Watch reads the config file, and every file that the config names, again when the file changes, until ctx ends.
func (r *Reloader) Watch(ctx context.Context) {
	files.Watch(ctx, r.fileList, r.lookAtFiles, r.deps.Log)
}

func (r *Reloader) fileList() []string {
	cfg := r.Settings().Config
	all := append(filesOf(cfg), cfg.Discovery.Files...)
	if r.source.file != "" {
		all = append(all, r.source.file)
	}
	return all
}

// filesOf returns the files that a config names, except those that list engines.
func filesOf(cfg *config.Config) []string {
	all := []string{
		cfg.KeysFile, cfg.Admin.TokenFile, cfg.TLS.CertFile, cfg.TLS.KeyFile, cfg.Admin.TLS.CertFile, cfg.Admin.TLS.KeyFile,
		cfg.Predictor.File, cfg.Predictor.SecretFile, cfg.Tracing.TLS.CAFile, cfg.Tracing.TLS.CertFile, cfg.Tracing.TLS.KeyFile,
		cfg.Geo.TLS.Cert, cfg.Geo.TLS.Key, cfg.Geo.TLS.CA, cfg.Geo.HMAC.KeysFile,
	}
	all = slices.DeleteFunc(all, func(file string) bool { return file == "" })
	return append(all, filesOfProfiles(cfg)...)
}

// filesOfProfiles returns the files that the profiles of a config name.
func filesOfProfiles(cfg *config.Config) (all []string) {
	for _, p := range cfg.Profiles {
		all = append(all, p.CAFile, p.CertFile, p.KeyFile)
	}
	return slices.DeleteFunc(all, func(file string) bool { return file == "" })
}

// OnLook adds a function that is called when files that the config names may have changed, or a new config is in force. Call it before
// Watch.
func (r *Reloader) OnChange(look func()) { r.looks = append(r.looks, look) }

// lookAtFiles reads each file anew whose content has changed. It reads the config file also if only a file that the config names has
// changed, because the config may have been refused for the old one.
func (r *Reloader) lookAtFiles() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.source.load != nil {
		present := digestOf(r.source.file)
		isThere := present != (digest{}) // otherwise it is being replaced
		if isThere && (present != r.source.seen || anyChanged(r.source.named)) {
			r.reload(false)
		}
	}
	r.reloadNamedFiles()
	r.look()
}

// look calls the functions of OnLook.
func (r *Reloader) look() {
	for _, look := range r.looks {
		look()
	}
}

// anyChanged reports whether one of the files has another digest now.
func anyChanged(files map[string]digest) bool {
	for file, before := range files {
		if digestOf(file) != before {
			return true
		}
	}
	return false
}

// reloadNamedFiles reads the changed files among those that the config names, except lists of engines. If a new version cannot be used, the
// previous one stays in force.
func (r *Reloader) reloadNamedFiles() {
	for _, w := range r.watchedFiles() {
		switch changed, err := w.reload(); {
		case err != nil:
			r.metrics.reloads.WithLabelValues(w.key, refused).Inc()
			r.deps.Log.Error("a changed file is not used, and its content before the change stays in force; correct the file",
				zap.String("key", w.key), zap.Error(err))
		case changed:
			r.metrics.reloads.WithLabelValues(w.key, used).Inc()
			r.deps.Log.Info("a changed file is in force now", zap.String("key", w.key))
		}
	}
}

// watchedFiles returns the files that reloadNamedFiles checks: all but the config itself and lists of engines.
func (r *Reloader) watchedFiles() []watched {
	return []watched{
		{keyKeys, r.reloadKeys},
		{keyToken, r.reloadToken},
		{keyTLS, func() (bool, error) { return r.reloadPair(Public) }},
		{keyAdminTLS, func() (bool, error) { return r.reloadPair(Admin) }},
		{keyGeoTLS, func() (bool, error) { return r.reloadPair(Peers) }},
		{keyGeoCA, r.reloadGeoCA},
		{keyGeoKeys, r.reloadGeoKeys},
		{keyAuthority, r.reloadTrust},
		{keyPredictor, r.reloadFit},
		{keyPromptKey, r.reloadPromptKey},
	}
}

// changed reports whether a file differs from the version that was last read. A version that could not be used counts as read, so that its
// error is logged only once.
func (r *Reloader) changed(file string) bool { return r.changedFor("", file) }

// changedFor is changed for one of several readers of the same file. reader is the reader's prefix in r.seen.
func (r *Reloader) changedFor(reader, file string) bool {
	present := digestOf(file)
	if file == "" || present == r.seen[reader+file] {
		return false
	}
	r.seen[reader+file] = present
	return true
}

// reread reads a file and puts it in force, if the file differs from the version that was last read.
func reread[T any](r *Reloader, file string, read func(file string) (T, error), use func(T)) (bool, error) {
	if !r.changed(file) {
		return false, nil
	}
	got, err := read(file)
	if err != nil {
		return false, err
	}
	use(got)
	return true, nil
}

func (r *Reloader) reloadPair(i int) (bool, error) {
	if r.tls[i] == nil {
		return false, nil
	}
	defer r.exportExpiry()
	return r.tls[i].Reload()
}

func (r *Reloader) reloadKeys() (bool, error) {
	file := r.Settings().KeysFile
	return reread(r, file, keys.Load, func(set *keys.Set) {
		r.warnOfReaders(privateFile{keyKeys, file})
		set.Succeed(r.keys.Load())
		r.keys.Store(set)
	})
}

func (r *Reloader) reloadToken() (bool, error) {
	return reread(r, r.Settings().Admin.TokenFile, loadToken, r.token.Store)
}

// reloadTrust makes engines trust changed authorities. An authority is refused together with a client certificate that cannot be used, so
// it is tried again when any file of a profile changes.
func (r *Reloader) reloadTrust() (bool, error) {
	present := digestsOf(filesOfProfiles(r.Settings().Config))
	retry := anyChanged(r.distrusted)
	changed, err := r.deps.ReloadTrust(func(file string) bool { return r.changedFor(ofEngines, file) || retry })
	switch {
	case err != nil:
		r.distrusted = present
	case changed:
		r.distrusted = nil
	}
	return changed, err
}

func (r *Reloader) reloadGeoCA() (bool, error) {
	file := r.Settings().Geo.TLS.CA
	if r.authority == nil || !r.changed(file) {
		return false, nil
	}
	return true, r.authority.Load(file)
}

func (r *Reloader) reloadGeoKeys() (bool, error) {
	c := &r.Settings().Geo
	if !c.On() {
		return false, nil
	}
	return reread(r, c.HMAC.KeysFile, func(string) (*geo.Keys, error) { return c.ReadKeys() }, r.deps.SetGeoKeys)
}

// reloadPromptKey puts a new key in force. From then on prompts have new hashes, so the predictor recognises a prompt only after it has
// finished again.
func (r *Reloader) reloadPromptKey() (bool, error) {
	p := r.Settings().Predictor
	if r.PromptKey() == nil {
		return false, nil
	}
	return reread(r, p.SecretFile, func(string) ([]byte, error) { return readPromptKey(p) }, func(key []byte) { r.promptKey.Store(&key) })
}
