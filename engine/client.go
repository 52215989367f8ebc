// Package engine is the HTTP/1.1 client for prefill and decode engines. Its calls can be aborted in
// any phase, and their errors say how much of the request the engine may have seen. The package
// also scrapes metrics and monitors which engines are alive.
//
// It does not use the client of net/http, because a stream that breaks off must never look
// complete, and because a POST must never be repeated without the caller's knowledge.
package engine

import (
	"cmp"
	"context"
	"crypto/tls"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Options has the settings of a Client; the zero value uses the defaults.
type Options struct {
	MaxIdle     int           // most idle connections that are kept for each host; default 1024
	IdleTimeout time.Duration // how long an idle connection may be used again; default 4 s
	// ReadBuffer is in bytes. It also bounds the response head; default 8 KiB.
	ReadBuffer int
	Dial       func(ctx context.Context, network, address string) (net.Conn, error)
	// Lookup resolves the name of an engine, to notice when the name gets another address. nil: the
	// system's resolver, or no look-ups if Dial is set.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)
}

// Client makes calls to any number of engines and keeps idle connections for later calls.
type Client struct {
	opts    Options
	idle    *idlePool
	readers *sync.Pool
}

// NewClient returns a client. The caller must call Close.
func NewClient(o Options) *Client {
	o.MaxIdle = cmp.Or(o.MaxIdle, 1024)
	o.IdleTimeout = cmp.Or(o.IdleTimeout, 4*time.Second)
	o.ReadBuffer = cmp.Or(o.ReadBuffer, 8<<10)
	if o.Dial == nil {
		o.Dial = new(net.Dialer).DialContext
		// The caller's Dial may reach other addresses than the system's resolver finds.
		if o.Lookup == nil {
			o.Lookup = func(ctx context.Context, host string) ([]netip.Addr, error) {
				return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
			}
		}
	}
	return &Client{opts: o, idle: newIdlePool(o.IdleTimeout, o.MaxIdle), readers: newReaders(o.ReadBuffer)}
}

// Warm dials until at least n connections to a target are idle, or as many as the client keeps, so
// that the next calls need not dial. ctx bounds each dial.
func (c *Client) Warm(ctx context.Context, t *Target, n int) error {
	for c.idle.count(t.key()) < n && !c.idle.isClosed() {
		nc, err := c.dial(ctx, t)
		if err != nil {
			return err
		}
		nc.releaseReader()
		if !c.idle.put(nc) { // the client keeps no more, or was closed
			return nil
		}
	}
	return nil
}

// Close closes the idle connections and refuses new calls. Calls in flight continue,
// and their connections are closed when they end.
func (c *Client) Close() { c.idle.close() }

// dial connects and makes the TLS handshake, if the target uses TLS. ctx bounds both.
func (c *Client) dial(ctx context.Context, t *Target) (*conn, error) {
	raw, err := c.opts.Dial(ctx, "tcp", t.address())
	if err != nil {
		return nil, err
	}
	nc := raw
	if t.URL.Scheme == "https" {
		secure := tls.Client(raw, t.tlsConfig())
		if err := secure.HandshakeContext(ctx); err != nil {
			_ = raw.Close() // the error of the handshake is the one to return
			return nil, err
		}
		nc = secure
	}
	return newConn(raw, nc, t.key(), c.readers), nil
}

const (
	answerLimit = 1 << 20 // most bytes of an answer about health
	// modelsLimit is the most bytes of a list of models, which may have 20,000 LoRA adapters of vLLM,
	// with 500 bytes for each.
	modelsLimit = 16 << 20
	// perRankLimit is the most bytes of an answer of SGLang about each rank, such as the rank's
	// settings or load.
	perRankLimit = 16 << 20
)
