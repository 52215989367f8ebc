package gateway

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"

	"go.uber.org/zap"

	"evenkeel/gateway/certs"
	"evenkeel/gateway/config"
	"evenkeel/gateway/keys"
)

// watched is a file, or some that belong together, that is read again when it
// changes. reload tells whether something new is in force; a version that
// cannot be used is an error once and changes nothing.
type watched struct {
	key    string // in the config
	reload func() (changed bool, err error)
}

// Keys of the files that change by themselves, as reloads_total labels them.
const (
	keyConfig     = "config"
	keyKeys       = "keys_file"
	keyToken      = "admin.token_file"
	keyTLS        = "tls"
	keyAdminTLS   = "admin.tls"
	keyAuthority  = "ca_file"
	keyPredictor  = "predictor.file"
	keyPromptKey  = "predictor.secret_file"
	keyGeoTLS     = "geo.tls"
	keyGeoCA      = "geo.tls.ca"
	keyGeoKeys    = "geo.hmac.keys_file"
	reloadUsed    = "used"
	reloadRefused = "refused"
)

// secrets are what files hold that nobody else should know, or is checked against.
type secrets struct {
	keys    *keys.Set
	token   *token
	prompts *[]byte           // the key of hashes that tell prompts apart; nil: nobody does
	tls     [3]*certs.Pair    // of the public, the admin and the peer listener; nil: clear text
	seen    map[string]digest // as the files were read
	ca      map[string]digest // of authorities; the fleet reads them
}

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
func (g *Gateway) Operator(word string) (known, asked bool) {
	t := g.token.Load()
	if t == nil {
		return true, false
	}
	got := sha256.Sum256([]byte(word))
	return subtle.ConstantTimeCompare(got[:], t.sum[:]) == 1, true
}

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
	listeners := []config.TLS{cfg.TLS, cfg.Admin.TLS}
	if cfg.Geo.On() {
		listeners = append(listeners, config.TLS{CertFile: cfg.Geo.TLS.Cert, KeyFile: cfg.Geo.TLS.Key})
		s.seen[cfg.Geo.TLS.CA], s.seen[cfg.Geo.HMAC.KeysFile] = digestOf(cfg.Geo.TLS.CA), digestOf(cfg.Geo.HMAC.KeysFile)
	}
	for i, t := range listeners {
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
func (g *Gateway) use(s *secrets) {
	if old := g.keys.Load(); old != nil {
		s.keys.Succeed(old)
	}
	g.keys.Store(s.keys)
	g.token.Store(s.token)
	g.promptKey.Store(s.prompts)
	for i, p := range s.tls {
		switch {
		case p == nil:
		case g.tls[i] == nil: // at the start only: listeners read it, and no reload begins TLS
			g.tls[i] = p
		default:
			g.tls[i].Succeed(p)
		}
	}
	for file, now := range s.ca {
		if was, ok := g.seen[file]; ok { // engines that stay have what was read then
			now = was
		}
		s.seen[file] = now
	}
	g.seen = s.seen
	g.noteExpiry()
}

func (g *Gateway) noteExpiry() {
	for i, key := range tlsKeys {
		if p := g.tls[i]; p != nil {
			g.metrics.certEnd.WithLabelValues(key).Set(float64(p.Leaf().NotAfter.Unix()))
		}
	}
}

// tlsKeys are those of the listeners' certificates, and geoTLS is the place of
// the one that other dispatchers are shown.
var tlsKeys = [...]string{keyTLS, keyAdminTLS, keyGeoTLS}

const geoTLS = 2

// watchedFiles are what lookAtFiles looks at, besides the config itself.
func (g *Gateway) watchedFiles() []watched {
	return []watched{
		{keyKeys, g.reloadKeys},
		{keyToken, g.reloadToken},
		{keyTLS, func() (bool, error) { return g.reloadPair(0) }},
		{keyAdminTLS, func() (bool, error) { return g.reloadPair(1) }},
		{keyGeoTLS, func() (bool, error) { return g.reloadPair(geoTLS) }},
		{keyGeoCA, g.reloadGeoCA},
		{keyGeoKeys, g.reloadGeoKeys},
		{keyAuthority, func() (bool, error) { return g.fleet.ReloadTrust(g.other) }},
		{keyPredictor, g.reloadFit},
		{keyPromptKey, g.reloadPromptKey},
	}
}

func (g *Gateway) reloadPair(i int) (bool, error) {
	if g.tls[i] == nil {
		return false, nil
	}
	defer g.noteExpiry()
	return g.tls[i].Reload()
}

// other tells whether a file is another than was read last; of a bad one, too,
// so that it is told once. One that is gone is between two versions, or will be
// told by whoever reads it.
func (g *Gateway) other(file string) bool {
	now := digestOf(file)
	if file == "" || now == g.seen[file] {
		return false
	}
	g.seen[file] = now
	return true
}

func (g *Gateway) reloadKeys() (bool, error) {
	file := g.conf().KeysFile
	if !g.other(file) {
		return false, nil
	}
	set, err := keys.Load(file)
	if err != nil {
		return false, err
	}
	g.warnOfReaders(privateFile{keyKeys, file})
	set.Succeed(g.keys.Load())
	g.keys.Store(set)
	return true, nil
}

func (g *Gateway) reloadToken() (bool, error) {
	file := g.conf().Admin.TokenFile
	if !g.other(file) {
		return false, nil
	}
	t, err := loadToken(file)
	if err != nil {
		return false, err
	}
	g.token.Store(t)
	return true, nil
}

func (g *Gateway) reloadGeoCA() (bool, error) {
	file := g.conf().Geo.TLS.CA
	if g.regions == nil || !g.other(file) {
		return false, nil
	}
	return true, g.regions.authority.Load(file)
}

func (g *Gateway) reloadGeoKeys() (bool, error) {
	c := &g.conf().Geo
	if g.regions == nil || !g.other(c.HMAC.KeysFile) {
		return false, nil
	}
	keys, err := c.ReadKeys()
	if err != nil {
		return false, err
	}
	g.regions.node.SetKeys(keys)
	return true, nil
}

// reloadPromptKey puts another key in force: prompts have other hashes from then
// on, so that none is recognized until it has finished again.
func (g *Gateway) reloadPromptKey() (bool, error) {
	p := g.conf().Predictor
	if g.promptKey.Load() == nil || !g.other(p.SecretFile) {
		return false, nil
	}
	key, err := readPromptKey(p)
	if err != nil {
		return false, err
	}
	g.promptKey.Store(key)
	return true, nil
}

func (g *Gateway) reloadFit() (bool, error) {
	g.fit.path = g.conf().Predictor.File
	fit, err := g.fit.read()
	if errors.Is(err, fs.ErrNotExist) || err == nil && fit == nil {
		return false, nil // between two versions, or none
	}
	if err == nil {
		err = g.dispatcher.SetFit(fit)
	}
	if err == nil {
		g.log.Info("predictions start anew from the fit file", zap.String("predictor.file", g.fit.path), zap.String("kind", string(fit.Kind)), zap.Int("outputs", fit.Outputs.Len()))
	}
	return err == nil, err
}

// secured puts TLS over a listener that has a certificate.
func secured(ln net.Listener, p *certs.Pair) net.Listener {
	if p == nil {
		return ln
	}
	return tls.NewListener(ln, p.Server())
}

// securedBoth has the callers show certificates, too.
func securedBoth(ln net.Listener, p *certs.Pair, a *certs.Authority) net.Listener {
	return tls.NewListener(ln, p.MutualServer(a))
}
