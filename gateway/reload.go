package gateway

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway/certs"
	"evenkeel/gateway/keys"
)

// fileCheck is how often files that may change are looked at.
const fileCheck = 2 * time.Second

// watched is a file, or two that belong together, that is read again when it
// changes. reload tells whether something new is in force; a version that
// cannot be used is an error once and changes nothing.
type watched struct {
	key    string // in the config
	reload func() (changed bool, err error)
}

// loadSecrets reads the keys of clients and the certificates of both listeners.
func (g *Gateway) loadSecrets() error {
	file := g.conf().KeysFile
	seen, _ := stateOf(file) // before it is read, so that no change falls between; Load tells what is wrong
	set, err := keys.Load(file)
	if err != nil {
		return err
	}
	g.keys.Store(set)
	if file != "" {
		g.watch("keys_file", func() (bool, error) { return g.reloadKeys(file, &seen) })
	}
	if g.tls, err = g.certificate("tls", g.conf().TLS.CertFile, g.conf().TLS.KeyFile); err != nil {
		return err
	}
	g.adminTLS, err = g.certificate("admin.tls", g.conf().Admin.TLS.CertFile, g.conf().Admin.TLS.KeyFile)
	return err
}

// watch has a file looked at while the proxy runs.
func (g *Gateway) watch(key string, reload func() (bool, error)) {
	for _, outcome := range []string{reloadUsed, reloadRefused} {
		g.metrics.reloads.WithLabelValues(key, outcome)
	}
	g.watched = append(g.watched, &watched{key, reload})
}

// What becomes of a new version of a file.
const (
	reloadUsed    = "used"
	reloadRefused = "refused"
)

// certificate reads a listener's; nil without one.
func (g *Gateway) certificate(key, certFile, keyFile string) (*certs.Pair, error) {
	if certFile == "" {
		return nil, nil
	}
	p, err := certs.Load(certFile, keyFile)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	end := g.metrics.certEnd.WithLabelValues(key)
	end.Set(float64(p.Leaf().NotAfter.Unix()))
	g.watch(key, func() (bool, error) {
		changed, err := p.Reload()
		end.Set(float64(p.Leaf().NotAfter.Unix()))
		return changed, err
	})
	return p, nil
}

// reloadKeys swaps a key file that changed in. Requests that run keep their
// place in the limits of their key, and finish even if it is gone.
func (g *Gateway) reloadKeys(file string, seen *fileState) (bool, error) {
	now, err := stateOf(file)
	if now == *seen {
		return false, nil
	}
	*seen = now // of a bad one, too: it is told once
	if err != nil {
		return false, err
	}
	set, err := keys.Load(file)
	if err != nil {
		return false, err
	}
	set.Succeed(g.keys.Load())
	g.keys.Store(set)
	return true, nil
}

func stateOf(file string) (fileState, error) {
	info, err := os.Stat(file)
	if err != nil {
		return fileState{}, err
	}
	return fileState{info.ModTime(), info.Size()}, nil
}

// watchFiles looks at every file until ctx ends.
func (g *Gateway) watchFiles(ctx context.Context) {
	tick := time.NewTicker(fileCheck)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			for _, w := range g.watched {
				g.look(w)
			}
		case <-ctx.Done():
			return
		}
	}
}

func (g *Gateway) look(w *watched) {
	changed, err := w.reload()
	switch {
	case err != nil:
		g.metrics.reloads.WithLabelValues(w.key, reloadRefused).Inc()
		g.log.Error("a file that changed is not used, what was read before stays in force; put it right", zap.String("key", w.key), zap.Error(err))
	case changed:
		g.metrics.reloads.WithLabelValues(w.key, reloadUsed).Inc()
		g.log.Info("a file that changed is in force", zap.String("key", w.key))
	}
}

// secured puts TLS over a listener that has a certificate.
func secured(ln net.Listener, p *certs.Pair) net.Listener {
	if p == nil {
		return ln
	}
	return tls.NewListener(ln, p.Server())
}
