package reload

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"os"
	"strings"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/certs"
	"evenkeel/gateway/config"
	"evenkeel/gateway/keys"
	"evenkeel/predictor"
)

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

// tlsKeys are those of the listeners' certificates.
var tlsKeys = [listeners]string{keyTLS, keyAdminTLS, keyGeoTLS}

// digest tells versions of a small file apart by their contents: some tools
// keep a file's time when they replace it.
type digest [sha256.Size]byte

// digestOf is zero for a file that cannot be read.
func digestOf(file string) digest {
	text, err := os.ReadFile(file)
	if err != nil {
		return digest{}
	}
	return sha256.Sum256(text)
}

// token is what admin requests are let in with; nil: nothing is asked for.
type token struct{ sum digest }

func loadToken(file string) (*token, error) {
	if file == "" {
		return nil, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("admin.token_file: %w", err)
	}
	word := strings.TrimSpace(string(text))
	if word == "" {
		return nil, fmt.Errorf("admin.token_file %s is empty; write the token on its first line", file)
	}
	return &token{sha256.Sum256([]byte(word))}, nil
}

// Operator tells whether a token is that of admin.token_file, and whether one is
// asked for at all.
func (r *Reloader) Operator(word string) (known, asked bool) {
	t := r.token.Load()
	if t == nil {
		return true, false
	}
	got := sha256.Sum256([]byte(word))
	return subtle.ConstantTimeCompare(got[:], t.sum[:]) == 1, true
}

// readPromptKey reads what keys the hashes that tell prompts apart; nil: nobody does.
func readPromptKey(p board.PredictorConfig) ([]byte, error) {
	if p.Kind != predictor.KindExact {
		return nil, nil
	}
	text, err := os.ReadFile(p.SecretFile)
	if err != nil {
		return nil, fmt.Errorf("predictor.secret_file: %w", err)
	}
	if text = bytes.TrimSpace(text); len(text) < leastSecret {
		return nil, fmt.Errorf("predictor.secret_file: %s has %d bytes, at least %d are needed that nobody guesses: head -c 32 /dev/urandom | base64 > %[1]s", p.SecretFile, len(text), leastSecret)
	}
	return text, nil
}

// leastSecret is 128 bits.
const leastSecret = 16

// readSecrets reads every secret a config names.
func readSecrets(cfg *config.Config) (*secrets, error) {
	s := &secrets{ // digests first, so that no change falls between
		seen: map[string]digest{cfg.KeysFile: digestOf(cfg.KeysFile), cfg.Admin.TokenFile: digestOf(cfg.Admin.TokenFile), cfg.Predictor.SecretFile: digestOf(cfg.Predictor.SecretFile)},
		ca:   map[string]digest{},
	}
	for _, p := range cfg.Profiles {
		s.ca[p.CAFile] = digestOf(p.CAFile)
	}
	var err error
	if s.keys, err = keys.Load(cfg.KeysFile); err != nil {
		return nil, err
	}
	if s.token, err = loadToken(cfg.Admin.TokenFile); err != nil {
		return nil, err
	}
	if s.prompts, err = readPromptKey(cfg.Predictor); err != nil {
		return nil, err
	}
	pairs := []config.TLS{cfg.TLS, cfg.Admin.TLS}
	if cfg.Geo.On() {
		pairs = append(pairs, config.TLS{CertFile: cfg.Geo.TLS.Cert, KeyFile: cfg.Geo.TLS.Key})
		s.seen[cfg.Geo.TLS.CA], s.seen[cfg.Geo.HMAC.KeysFile] = digestOf(cfg.Geo.TLS.CA), digestOf(cfg.Geo.HMAC.KeysFile)
	}
	for i, t := range pairs {
		if !t.On() {
			continue
		}
		if s.tls[i], err = certs.Load(t.CertFile, t.KeyFile); err != nil {
			return nil, fmt.Errorf("%s: %w", tlsKeys[i], err)
		}
	}
	return s, nil
}

// use puts secrets in force. Requests that run keep their place in the limits of
// their key, and finish even if it is gone.
func (r *Reloader) use(s *secrets) {
	if old := r.keys.Load(); old != nil {
		s.keys.Succeed(old)
	}
	r.keys.Store(s.keys)
	r.token.Store(s.token)
	r.promptKey.Store(&s.prompts)
	for i, p := range s.tls {
		switch {
		case p == nil:
		case r.tls[i] == nil: // at the start only: listeners read it, and no reload begins TLS
			r.tls[i] = p
		default:
			r.tls[i].Succeed(p)
		}
	}
	for file, now := range s.ca {
		if was, ok := r.seen[file]; ok { // engines that stay have what was read then
			now = was
		}
		s.seen[file] = now
	}
	r.seen = s.seen
	r.exportExpiry()
}

func (r *Reloader) exportExpiry() {
	for i, key := range tlsKeys {
		if p := r.tls[i]; p != nil {
			r.metrics.certEnd.WithLabelValues(key).Set(float64(p.Leaf().NotAfter.Unix()))
		}
	}
}
