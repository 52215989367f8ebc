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

// watched is a file, or a group of files, that is read again when it changes. reload says whether a
// new version is in force. For a version that cannot be used it returns an error once, and changes
// nothing.
type watched struct {
	key    string // config key that names the file
	reload func() (changed bool, err error)
}

// Watch reads the config file, and every file that the config names, again when the file changes,
// until ctx ends.
func (r *Reloader) Watch(ctx context.Context) {
	files.Watch(ctx, r.watchedPaths, r.reloadChangedFiles, r.deps.Log)
}

// watchedPaths returns the config file, the files that it names, and the lists of engines.
func (r *Reloader) watchedPaths() []string {
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

// OnChange adds a function that is called when files that the config names may have changed, or a
// new config is in force. Call it before Watch.
func (r *Reloader) OnChange(notify func()) { r.onChange = append(r.onChange, notify) }

// reloadChangedFiles reads each file anew whose content has changed, and calls the functions of
// OnChange. It also reads a refused config file again if a file that it names has changed, because
// the change may make the config valid.
func (r *Reloader) reloadChangedFiles() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.source.load != nil {
		present := digestOf(r.source.file)
		isThere := present != (digest{}) // a zero digest: the file is being replaced
		if isThere && (present != r.source.lastRead || anyChanged(r.source.refusedFiles)) {
			const dry = false
			r.reloadConfig(dry)
		}
	}
	r.reloadNamedFiles()
	r.callOnChange()
}

// callOnChange calls the functions of OnChange, with r.mu held.
func (r *Reloader) callOnChange() {
	for _, notify := range r.onChange {
		notify()
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

// reloadNamedFiles reads the changed files among those that the config names, except lists of
// engines. If a new version cannot be used, the previous one stays in force.
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

// watchedFiles returns the files that reloadNamedFiles checks: all but the config itself and lists
// of engines.
func (r *Reloader) watchedFiles() []watched {
	return []watched{
		{keyKeys, r.reloadKeys},
		{keyToken, r.reloadToken},
		{keyTLS, func() (bool, error) { return r.reloadCertificate(Public) }},
		{keyAdminTLS, func() (bool, error) { return r.reloadCertificate(Admin) }},
		{keyGeoTLS, func() (bool, error) { return r.reloadCertificate(Peers) }},
		{keyGeoCA, r.reloadGeoCA},
		{keyGeoKeys, r.reloadGeoKeys},
		{keyAuthority, r.reloadTrust},
		{keyPredictor, r.reloadFit},
		{keyPromptKey, r.reloadPromptKey},
	}
}

// markReadIfChanged reports whether a file differs from the version that was last read, and
// remembers the present version as read. A version that cannot be used counts as read, too, so that
// its error is logged only once.
func (r *Reloader) markReadIfChanged(file string) (changed bool) {
	return r.markReadIfChangedFor("", file)
}

// markReadIfChangedFor does what markReadIfChanged does, for one of several readers of the same
// file: each of them notices a change. reader is the reader's prefix in lastRead. An empty file
// name stands for no file, which never changes.
func (r *Reloader) markReadIfChangedFor(reader, file string) (changed bool) {
	present := digestOf(file)
	if file == "" || present == r.lastRead[reader+file] {
		return false
	}
	r.lastRead[reader+file] = present
	return true
}

// reloadFile reads a file and puts it in force with use, if the file differs from the version that
// was last read. It returns whether a new version is in force.
func reloadFile[T any](r *Reloader, file string, read func(file string) (T, error), use func(T)) (changed bool, err error) {
	if !r.markReadIfChanged(file) {
		return false, nil
	}
	got, err := read(file)
	if err != nil {
		return false, err
	}
	use(got)
	return true, nil
}

// reloadCertificate reads the certificate of a listener and its key again, if they have changed. It
// returns whether a new pair is in force.
func (r *Reloader) reloadCertificate(listener int) (changed bool, err error) {
	if r.tls[listener] == nil { // the listener has no TLS
		return false, nil
	}
	defer r.exportExpiry() // after Reload, when the new certificate is in force
	return r.tls[listener].Reload()
}

// reloadKeys puts a changed file of API keys in force. Keys keep what they have used of their
// limits.
func (r *Reloader) reloadKeys() (changed bool, err error) {
	file := r.Settings().KeysFile
	return reloadFile(r, file, keys.Load, func(set *keys.Set) {
		r.warnIfWorldReadable(privateFile{keyKeys, file})
		set.KeepUsageOf(r.keys.Load())
		r.keys.Store(set)
	})
}

// reloadToken puts a changed token of operators in force.
func (r *Reloader) reloadToken() (changed bool, err error) {
	return reloadFile(r, r.Settings().Admin.TokenFile, loadToken, r.token.Store)
}

// reloadTrust makes engines trust changed authorities. The engines of a profile use its authority
// together with its client certificate, so an authority is also refused if that certificate cannot
// be used. After a refusal, all authorities are therefore read again as soon as any file of a
// profile has changed since.
func (r *Reloader) reloadTrust() (changed bool, err error) {
	present := digestsOf(filesOfProfiles(r.Settings().Config))
	retry := anyChanged(r.profileFilesAtRefusal) // digests of all these files at the last refusal; nil: nothing is refused, so no retry
	mustRead := func(authority string) bool {    // the fleet is one of the readers of this file
		return r.markReadIfChangedFor(fleetReader, authority) || retry
	}
	changed, err = r.deps.ReloadTrust(mustRead)
	switch {
	case err != nil:
		r.profileFilesAtRefusal = present
	case changed: // without a change nothing was read, so an earlier refusal still stands
		r.profileFilesAtRefusal = nil
	}
	return changed, err
}

// reloadGeoCA puts a changed authority for the certificates of other proxies in force.
func (r *Reloader) reloadGeoCA() (changed bool, err error) {
	file := r.Settings().Geo.TLS.CA
	if r.authority == nil || !r.markReadIfChanged(file) { // nil: other proxies have no certificates
		return false, nil
	}
	return true, r.authority.Load(file)
}

// reloadGeoKeys puts changed keys for calls between proxies in force.
func (r *Reloader) reloadGeoKeys() (changed bool, err error) {
	c := &r.Settings().Geo
	if !c.On() { // there are no other proxies
		return false, nil
	}
	return reloadFile(r, c.HMAC.KeysFile, func(string) (*geo.Keys, error) { return c.ReadKeys() }, r.deps.SetGeoKeys)
}

// reloadPromptKey puts a new key in force. From then on prompts have new hashes, so the predictor
// recognises a prompt only after a request with it has finished again.
func (r *Reloader) reloadPromptKey() (changed bool, err error) {
	p := r.Settings().Predictor
	if r.PromptKey() == nil { // the predictor does not distinguish prompts
		return false, nil
	}
	return reloadFile(r, p.SecretFile, func(string) ([]byte, error) { return readPromptKey(p) }, func(key []byte) { r.promptKey.Store(&key) })
}
