package reload

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"io"
	"iter"
	"os"
	"runtime"
	"slices"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/certs"
	"evenkeel/gateway/config"
	"evenkeel/gateway/keys"
	"evenkeel/internal/smallfile"
	"evenkeel/predictor"
)

// digestOf returns the digest of a file; zero: the file cannot be read.
func digestOf(file string) digest {
	f, err := os.Open(file)
	if err != nil {
		return digest{}
	}
	defer func() { _ = f.Close() }() // an error loses nothing, because the file was only read
	hash := sha256.New()
	if _, err := io.Copy(hash, f); err != nil { // read in pieces, because the file may be very large by mistake
		return digest{}
	}
	return digest(hash.Sum(nil))
}

// digestsOf returns the digests of files by their paths; zero: a file cannot be read.
func digestsOf(files []string) map[string]digest {
	all := make(map[string]digest, len(files))
	for _, file := range files {
		all[file] = digestOf(file)
	}
	return all
}

// loadToken reads the token that admin requests need; nil: no file is configured, so they need
// none.
func loadToken(file string) (*token, error) {
	if file == "" {
		return nil, nil
	}
	word, err := readSecret(file)
	switch {
	case err != nil:
		return nil, fmt.Errorf("admin.token_file: %w", err)
	case len(word) == 0:
		return nil, fmt.Errorf("admin.token_file %s is empty; write the token into it", file)
	case bytes.ContainsAny(word, "\r\n"): // a header cannot contain a line end, so no request could send this token
		return nil, fmt.Errorf("admin.token_file %s has more than one line; write the token alone", file)
	}
	return &token{sha256.Sum256(word)}, nil
}

// maxSecret bounds a file with a token or a key, in bytes.
const maxSecret = 64 << 10

// readSecret returns the text of a file with a token or a key, without blanks and line ends around
// it.
func readSecret(file string) ([]byte, error) {
	text, err := smallfile.Read(file, maxSecret)
	return bytes.TrimSpace(text), err
}

// CheckToken says whether a token is that of admin.token_file (known), and whether admin requests
// need a token at all (required). If admin requests need no token, every token is known.
func (r *Reloader) CheckToken(word string) (known, required bool) {
	t := r.token.Load()
	if t == nil {
		return true, false
	}
	got := sha256.Sum256([]byte(word))
	return subtle.ConstantTimeCompare(got[:], t.sum[:]) == 1, true
}

// readPromptKey reads the key with which prompts are hashed for the predictor; nil: the predictor
// does not distinguish prompts.
func readPromptKey(p board.PredictorConfig) ([]byte, error) {
	if p.Kind != predictor.KindExact {
		return nil, nil
	}
	text, err := readSecret(p.SecretFile)
	if err != nil {
		return nil, fmt.Errorf("predictor.secret_file: %w", err)
	}
	if len(text) < leastSecret {
		return nil, fmt.Errorf("predictor.secret_file: %s has %d bytes; write at least %d random bytes, as `head -c 32 /dev/urandom | base64 > "+
			"%[1]s` does", p.SecretFile, len(text), leastSecret)
	}
	return text, nil
}

// leastSecret is the least length of a key in bytes: 128 bits.
const leastSecret = 16

// fleetReader marks a file that the fleet reads, in lastRead and in secrets.filesOfOtherReaders.
// The listener for other proxies may read the same file, and each of the two readers must notice a
// change.
const fleetReader = "ca_file "

// readSecrets reads all files with tokens, keys and certificates that a config names. Of files that
// other components read later, it only notes the digest. The keys of these notes say which
// component reads the file: fleetReader and the path for an authority that the fleet reads, the
// plain path for a file for calls between proxies. If both read the same file, it has two notes, so
// that each of the two notices a change.
func readSecrets(cfg *config.Config) (*secrets, error) {
	s := &secrets{ // the digests come first: if a file changes while it is read, the change is noticed later
		digests: map[string]digest{cfg.KeysFile: digestOf(cfg.KeysFile), cfg.Admin.TokenFile: digestOf(cfg.Admin.TokenFile),
			cfg.Predictor.SecretFile: digestOf(cfg.Predictor.SecretFile)},
		filesOfOtherReaders: map[string]digest{},
	}
	for _, p := range cfg.Profiles { // the fleet reads these authorities when it builds engines
		s.filesOfOtherReaders[fleetReader+p.CAFile] = digestOf(p.CAFile)
	}
	var err error
	if s.keys, err = keys.Load(cfg.KeysFile); err != nil {
		return nil, err
	}
	if s.token, err = loadToken(cfg.Admin.TokenFile); err != nil {
		return nil, err
	}
	if s.promptKey, err = readPromptKey(cfg.Predictor); err != nil {
		return nil, err
	}
	pairs := [listeners]config.TLS{Public: cfg.TLS, Admin: cfg.Admin.TLS}
	if cfg.Geo.On() {
		pairs[Peers] = config.TLS{CertFile: cfg.Geo.TLS.Cert, KeyFile: cfg.Geo.TLS.Key}
		for _, file := range []string{cfg.Geo.TLS.CA, cfg.Geo.HMAC.KeysFile} { // the components for other proxies read these files
			s.filesOfOtherReaders[file] = digestOf(file)
		}
	}
	for listener, t := range pairs {
		if !t.On() { // the listener has no TLS, or does not exist
			continue
		}
		if s.tls[listener], err = certs.Load(t.CertFile, t.KeyFile); err != nil {
			return nil, fmt.Errorf("%s: %w", tlsKeys[listener], err)
		}
	}
	return s, nil
}

// useSecrets puts secrets in force, and stores the digests of their files in lastRead, from which
// changes of these files are noticed. Requests that run still count in the limits of their API key,
// and finish even if the key is gone.
func (r *Reloader) useSecrets(s *secrets) {
	if old := r.keys.Load(); old != nil { // nil: the proxy starts, and has no keys before
		s.keys.KeepUsageOf(old)
	}
	r.keys.Store(s.keys)
	r.token.Store(s.token)
	r.promptKey.Store(&s.promptKey)
	for i, p := range s.tls {
		switch {
		case p == nil: // the listener has no TLS in the config
		case r.tls[i] == nil: // at the start only: later the listeners keep this pair, and a reload cannot begin TLS
			r.tls[i] = p
		default:
			r.tls[i].ReplaceBy(p)
		}
	}
	r.addDigestsOfOtherReaders(s)
	r.lastRead = s.digests
	r.exportExpiry()
}

// addDigestsOfOtherReaders adds to the digests of s those of the files that other components read.
// If a component has read its file already, the digest stays that of the version which it uses. So
// the next reload of that component (reloadTrust, reloadGeoCA or reloadGeoKeys) notices a newer
// version.
func (r *Reloader) addDigestsOfOtherReaders(s *secrets) {
	for file, version := range s.filesOfOtherReaders {
		if usedByReader, wasRead := r.lastRead[file]; wasRead {
			version = usedByReader
		}
		s.digests[file] = version
	}
}

// exportExpiry sets the metric with the time at which the certificate of each listener expires.
func (r *Reloader) exportExpiry() {
	for key, ends := range r.Certificates() {
		r.metrics.certEnd.WithLabelValues(key).Set(float64(ends.Unix()))
	}
}

// Certificates yields, for each listener with TLS, the config key and the time at which its present
// certificate ends.
func (r *Reloader) Certificates() iter.Seq2[string, time.Time] {
	return func(yield func(key string, ends time.Time) bool) {
		for i, key := range tlsKeys {
			if p := r.tls[i]; p != nil && !yield(key, p.Leaf().NotAfter) {
				return
			}
		}
	}
}

// warnIfWorldReadable warns of private files that every user of the machine can read.
func (r *Reloader) warnIfWorldReadable(files ...privateFile) {
	for _, f := range files {
		info, err := os.Stat(f.path) // a missing file is reported where it is read
		const othersMayRead = 0o004
		if err == nil && info.Mode().Perm()&othersMayRead != 0 && runtime.GOOS != "windows" {
			r.deps.Log.Warn("every user of this machine can read a private file; take the right from others with chmod o-r, or set defaultMode: "+
				"0440 where Kubernetes mounts it",
				zap.String("config", f.key), zap.String("file", f.path))
		}
	}
}

// PromptKey returns the key with which prompts are hashed for the predictor; nil: the predictor
// does not distinguish prompts.
func (r *Reloader) PromptKey() []byte {
	if key := r.promptKey.Load(); key != nil {
		return *key
	}
	return nil
}

// privateFile is a file that only this proxy should be able to read.
type privateFile struct {
	key  string // config key that names the file
	path string
}

// privateFiles returns the private files that a config names.
func privateFiles(cfg *config.Config) []privateFile {
	all := []privateFile{
		{keyKeys, cfg.KeysFile}, {keyToken, cfg.Admin.TokenFile}, {keyPromptKey, cfg.Predictor.SecretFile},
		{keyTLS + ".key_file", cfg.TLS.KeyFile}, {keyAdminTLS + ".key_file", cfg.Admin.TLS.KeyFile},
		{keyGeoTLS + ".key", cfg.Geo.TLS.Key}, {keyGeoKeys, cfg.Geo.HMAC.KeysFile},
	}
	for name, p := range cfg.Profiles {
		all = append(all, privateFile{"profiles." + name + ".key_file", p.KeyFile})
	}
	return slices.DeleteFunc(all, func(f privateFile) bool { return f.path == "" })
}
