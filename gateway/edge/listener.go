package edge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"evenkeel/internal/socket"
)

const (
	firstBackoff = 5 * time.Millisecond
	lastBackoff  = time.Second
	// busyWrite is for the answer to a refused client, whose few hundred bytes fit into the empty
	// socket buffer.
	busyWrite             = 100 * time.Millisecond
	minRefusalLogInterval = time.Minute
)

// ListenOptions say how a Listener treats its connections. A limit of 0 means none, unless its
// comment says otherwise.
type ListenOptions struct {
	// WriteTimeout is how long one write of up to 64 KiB may wait for its client (0: 30 s; negative:
	// for ever). After the same time, the kernel gives up a client that acknowledges nothing.
	WriteTimeout time.Duration
	// MaxLag bounds how long all writes of one answer together may wait for the client.
	MaxLag time.Duration
	// SendBuffer is how many bytes the kernel buffers for a slow client (0: the kernel's choice, some
	// megabytes).
	SendBuffer int
	// MaxConns should be below the server's Concurrency, and below half of the limit of open files,
	// because a running request needs a second socket.
	MaxConns int
	// MaxConnsPerIP is per IPv4 address or IPv6 /64 network. Leave it 0 behind a load balancer, whose
	// connections come from one address.
	MaxConnsPerIP int
	// TLS says that clients speak TLS on these sockets: a connection over a limit is then closed
	// without an answer, because one in clear text would be of no use. Otherwise it gets a 503 or 429.
	TLS bool
	Log *zap.Logger // nil: nothing is logged
}

// Stats counts since the Listener was made.
type Stats struct {
	Open          int // connections that are open now
	Accepted      uint64
	AcceptErrors  uint64 // and tried again, for example after "too many open files"
	WatchErrors   uint64 // closed, because the watcher could not watch them
	RefusedTotal  uint64 // connections refused because of MaxConns
	RefusedByAddr uint64 // connections refused because of MaxConnsPerIP
	CutStalled    uint64 // one write, or the data in the kernel, waited for WriteTimeout
	CutLagging    uint64 // clients cut because the writes of one answer waited for MaxLag in all
}

// Listener accepts client connections as *Conn. One goroutine watches whether the clients leave,
// and ends with the listener and its last connection.
type Listener struct {
	net.Listener
	options ListenOptions
	log     *zap.Logger
	watch   *watcher
	done    chan struct{} // closed by Close, to end a wait in pauseAccept

	mu                sync.Mutex
	conns             map[uint64]*Conn
	perIP             map[netip.Addr]int
	lastID            uint64
	closed            bool
	lastRefusalLogged time.Time

	accepted, acceptErrors, watchErrors, refusedTotal, refusedByAddr, cutStalled, cutLagging atomic.Uint64
}

// ListenError adds to an error of net.Listen what the operator can do about it.
func ListenError(addr string, err error) error {
	var name *net.DNSError
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%w; there is another process on %s; stop it, or choose a free port", err, addr)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("%w; no network interface of this machine has the address; write an address of this machine, or 0.0.0.0 for all", err)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%w; a port below 1024 needs a special right; choose a higher port, or grant CAP_NET_BIND_SERVICE", err)
	case errors.As(err, &name):
		return fmt.Errorf("%w; the host to listen on must be a name or an address of this machine", err)
	}
	return err
}

// Listen listens on a TCP address, with TCP keep-alive.
func Listen(addr string, opt ListenOptions) (*Listener, error) {
	// A client that vanished without a FIN is noticed after 30 s: 15 s of silence and three probes, 5
	// s apart.
	lc := net.ListenConfig{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}}
	ln, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, ListenError(addr, err)
	}
	l, err := Wrap(ln, opt)
	if err != nil {
		_ = ln.Close() // the error of Wrap matters more
		return nil, err
	}
	return l, nil
}

// Wrap takes a listener of sockets, or of what wraps them, so that they can be watched.
func Wrap(ln net.Listener, opt ListenOptions) (*Listener, error) {
	opt.WriteTimeout = cmp.Or(opt.WriteTimeout, 30*time.Second)
	opt.Log = cmp.Or(opt.Log, zap.NewNop())
	l := &Listener{
		Listener: ln, options: opt, log: opt.Log, done: make(chan struct{}),
		conns: make(map[uint64]*Conn), perIP: make(map[netip.Addr]int),
	}
	w, err := newWatcher(l.markGone)
	if err != nil {
		return nil, fmt.Errorf("watch connections of %s: %w; raise the limit of open files", ln.Addr(), err)
	}
	l.watch = w
	return l, nil
}

// Accept retries after any error, and fails only with net.ErrClosed, because fasthttp ends Serve on
// any error: a single "too many open files" would end the proxy.
func (l *Listener) Accept() (net.Conn, error) {
	backoff := firstBackoff
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) || !l.pauseAccept(err, backoff) {
				return nil, net.ErrClosed
			}
			backoff = min(2*backoff, lastBackoff)
			continue
		}
		backoff = firstBackoff
		c, err := l.admit(raw)
		if err == nil {
			l.accepted.Add(1)
			return c, nil
		}
		_ = raw.Close()
		if errors.Is(err, net.ErrClosed) { // closed while this one was admitted
			return nil, net.ErrClosed
		}
	}
}

// pauseAccept returns false if the listener was closed meanwhile.
func (l *Listener) pauseAccept(err error, d time.Duration) bool {
	l.acceptErrors.Add(1)
	l.log.Warn("a connection could not be accepted; the listener goes on", zap.Error(err), zap.Duration("in", d),
		zap.Stringer("listen", l.Addr()))
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-l.done:
		return false
	}
}

var (
	errFull  = errors.New("edge: too many connections")
	errPerIP = errors.New("edge: too many connections from one address")
)

// A refused client gets an answer.
func (l *Listener) admit(raw net.Conn) (*Conn, error) {
	c := &Conn{Conn: raw, socket: socket.Of(raw), CloseNotifier: NewCloseNotifier(l.log), ln: l, ip: countedAddr(raw)}
	if err := l.register(c); err != nil {
		l.refuseConn(raw, err)
		return nil, err
	}
	if t, ok := raw.(*net.TCPConn); ok && l.options.SendBuffer > 0 {
		_ = t.SetWriteBuffer(l.options.SendBuffer) // fails only if closed, which the watcher notices
	}
	err := errors.ErrUnsupported // it cannot be watched
	if sock, ok := raw.(syscall.Conn); ok {
		err = l.watch.add(sock, c.id, l.options.WriteTimeout)
	}
	if err != nil {
		l.unregister(c)
		l.watchErrors.Add(1)
		l.log.Warn("a connection was closed, because the proxy could not watch whether its client leaves", zap.Error(err))
		return nil, err
	}
	return c, nil
}

func (l *Listener) register(c *Conn) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	countsIP := l.options.MaxConnsPerIP > 0 && c.ip.IsValid() // a Unix socket has no address
	switch {
	case l.closed:
		return net.ErrClosed
	case l.options.MaxConns > 0 && len(l.conns) >= l.options.MaxConns:
		return errFull
	case countsIP && l.perIP[c.ip] >= l.options.MaxConnsPerIP:
		return errPerIP
	}
	l.lastID++ // 0 is the watcher's stopID
	c.id = l.lastID
	l.conns[c.id] = c
	if countsIP {
		l.perIP[c.ip]++
	}
	return nil
}

func (l *Listener) refuseConn(raw net.Conn, why error) {
	var answer string
	switch {
	case errors.Is(why, errFull):
		l.refusedTotal.Add(1)
		answer = busyAnswer
	case errors.Is(why, errPerIP):
		l.refusedByAddr.Add(1)
		answer = perIPAnswer
	default: // closed; nothing is counted
		return
	}
	l.logRefusal(why)
	if !l.options.TLS && raw.SetWriteDeadline(time.Now().Add(busyWrite)) == nil {
		_, _ = raw.Write([]byte(answer)) // best effort
	}
}

// There may be thousands of refusals per second during an attack.
func (l *Listener) logRefusal(why error) {
	l.mu.Lock()
	due := time.Since(l.lastRefusalLogged) >= minRefusalLogInterval
	if due {
		l.lastRefusalLogged = time.Now()
	}
	l.mu.Unlock()
	if due {
		s := l.Stats()
		l.log.Warn("connections are refused, because their limit is reached; raise limits.connections or limits.connections_per_ip, or find out "+
			"who opens them", zap.Error(why),
			zap.Int("open", s.Open), zap.Uint64("refused_total", s.RefusedTotal), zap.Uint64("refused_by_address", s.RefusedByAddr))
	}
}

// The watcher calls markGone for each client that leaves.
func (l *Listener) markGone(id uint64) {
	l.mu.Lock()
	c := l.conns[id]
	l.mu.Unlock()
	if c != nil { // else closed after the watcher saw the event
		if c.kernelTimedOut() {
			c.countOnce(&l.cutStalled)
		}
		c.MarkGone()
	}
}

// After Close, the last connection ends the watcher.
func (l *Listener) unregister(c *Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.conns[c.id]; !ok {
		return
	}
	delete(l.conns, c.id)
	l.perIP[c.ip]--
	if l.perIP[c.ip] <= 0 { // below 0 for an address that register did not count
		delete(l.perIP, c.ip)
	}
	if l.closed && len(l.conns) == 0 {
		l.watch.close()
	}
}

// Close makes Accept fail. Open connections stay open and watched.
func (l *Listener) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return net.ErrClosed
	}
	l.closed = true
	if len(l.conns) == 0 { // else unregister does it
		l.watch.close()
	}
	l.mu.Unlock()
	close(l.done)
	return l.Listener.Close()
}

// CloseConns closes all sockets and returns their number. Their handlers notice it by Gone.
func (l *Listener) CloseConns() int {
	l.mu.Lock()
	open := slices.Collect(maps.Values(l.conns))
	l.mu.Unlock()
	for _, c := range open {
		c.closeSocket()
	}
	return len(open)
}

// closeIdle closes the idle connections of a Hijacked; fasthttp closes the others.
func (l *Listener) closeIdle() {
	l.mu.Lock()
	open := slices.Collect(maps.Values(l.conns))
	l.mu.Unlock()
	for _, c := range open {
		if c.waitsForRequest.Load() {
			c.closeSocket()
		}
	}
}

// Stats is not an exact snapshot: each count is read by itself.
func (l *Listener) Stats() Stats {
	l.mu.Lock()
	open := len(l.conns)
	l.mu.Unlock()
	return Stats{
		Open: open, Accepted: l.accepted.Load(), AcceptErrors: l.acceptErrors.Load(), WatchErrors: l.watchErrors.Load(),
		RefusedTotal: l.refusedTotal.Load(), RefusedByAddr: l.refusedByAddr.Load(),
		CutStalled: l.cutStalled.Load(), CutLagging: l.cutLagging.Load(),
	}
}

// countedAddr is the IPv4 address, or the IPv6 /64 network, which is what one customer usually
// gets. It is invalid for a Unix socket.
func countedAddr(c net.Conn) netip.Addr {
	t, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	// Without Unmap, an IPv4 client of an IPv6 socket would count as IPv6.
	a := t.AddrPort().Addr().Unmap().WithZone("")
	if a.Is6() {
		return netip.PrefixFrom(a, 64).Masked().Addr()
	}
	return a
}

// headConnOf is nil if Server.Serve did not accept the connection.
func headConnOf(ctx *fasthttp.RequestCtx) *headConn {
	if w, ok := ctx.Conn().(interface{ self() *headConn }); ok {
		return w.self()
	}
	return nil
}
