// Package metaserver receives the callbacks of layerwise decode engines: an engine says where the
// KV of a request goes as soon as it has room for it. Each attempt of a request has a URL that ends
// in a token, which the first callback uses up.
package metaserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/gateway/edge"
	"evenkeel/mooncake"
)

// path is the only one that is served; a token follows it.
const path = "/v1/metaserver/"

// These limits of a connection only protect the proxy: the client in an engine waits without limit,
// and accepts any answer.
const (
	headTime  = 5 * time.Second
	bodyTime  = 15 * time.Second // time limit for head and body together
	idleTime  = 90 * time.Second
	headBytes = 8 << 10
)

// Config configures a Server.
type Config struct {
	Listen      string
	Advertise   func() string // without a path; empty: http:// and the listener's address
	Allowed     func(netip.Addr) bool
	Connections int // most connections that may be open at the same time
	Registerer  prometheus.Registerer
	Log         *zap.Logger
}

// Server receives callbacks.
type Server struct {
	Config
	desk      desk
	http      *http.Server
	listener  *edge.Listener
	listening atomic.Bool
	served    chan struct{} // closed when the listener has ended
	results   *prometheus.CounterVec
	warned    atomic.Int64 // Unix time in ns of the last warning that any caller can cause
}

const warnEvery = time.Minute

// Results of a callback, as labels of the metric.
const (
	resultOK        = "ok"
	resultDuplicate = "duplicate"
	resultUnknown   = "unknown"
	resultBad       = "bad"
	resultLate      = "late"
)

// New returns a server that does not listen yet.
func New(c Config) *Server {
	s := &Server{Config: c, desk: newDesk(), served: make(chan struct{}), results: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_bind_callbacks_total",
		Help: "Callbacks of layerwise decode engines, where bind.listen is set. duplicate: a second callback of one request. unknown: of no " +
			"request, or of one that is over. bad: refused for its content, its size or its sender. late: its request was given up, and the " +
			"prefill only frees the blocks.",
	}, []string{"result"})}
	for _, result := range []string{resultOK, resultDuplicate, resultUnknown, resultBad, resultLate} {
		s.results.WithLabelValues(result)
	}
	c.Registerer.MustRegister(s.results, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "evenkeel_bind_callbacks_expected", Help: "Callbacks of layerwise decode engines that the proxy would accept now: one for each " +
			"bound request, until a moment after it has ended. It is 0 while no request runs.",
	}, func() float64 { return float64(s.Expected()) }))
	errorLog, err := zap.NewStdLogAt(c.Log, zap.DebugLevel)
	if err != nil {
		panic(err)
	}
	s.http = &http.Server{
		Handler: http.HandlerFunc(s.serve), ReadHeaderTimeout: headTime, ReadTimeout: bodyTime, WriteTimeout: bodyTime, IdleTimeout: idleTime,
		MaxHeaderBytes: headBytes, ErrorLog: errorLog,
	}
	return s
}

// Start returns once decode engines can call. s may be nil.
func (s *Server) Start() error {
	if s == nil {
		return nil
	}
	var err error
	if s.listener, err = edge.Listen(s.Listen, edge.ListenOptions{MaxConns: s.Connections, Log: s.Log}); err != nil {
		return fmt.Errorf("bind.listen: %w", err)
	}
	s.listening.Store(true)
	go func() {
		defer close(s.served)
		err := s.http.Serve(s.listener)
		s.listening.Store(false)
		if !errors.Is(err, http.ErrServerClosed) {
			s.Log.Error("the listener for callbacks has failed", zap.Error(err))
		}
	}()
	return nil
}

// Listening is true for nil: no callbacks are needed.
func (s *Server) Listening() bool { return s == nil || s.listening.Load() }

// Addr is empty if the server does not listen.
func (s *Server) Addr() string {
	if s == nil || s.listener == nil {
		return ""
	}
	return s.listener.Addr().String()
}

// Close ends all expectations.
func (s *Server) Close() {
	if s == nil {
		return
	}
	s.desk.close()
	if s.listener == nil { // not started
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if s.http.Shutdown(ctx) != nil {
		_ = s.http.Close() // a sender takes longer than the second above
	}
	_ = s.listener.Close()
	<-s.served
}

// URL is for decode engines, without a path.
func (s *Server) URL() string {
	if u := strings.TrimSuffix(s.Advertise(), "/"); u != "" {
		return u
	}
	return "http://" + s.Addr()
}

// A wrong caller, path, method or token is refused before the body is read.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	token, found := strings.CutPrefix(r.URL.Path, path)
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	switch {
	case err != nil || !s.Allowed(peer.Addr().Unmap().WithZone("")): // as in bind.allow
		s.refuse(w, http.StatusForbidden, resultBad)
		s.warnOfStranger(r.RemoteAddr)
		return
	case !found:
		s.refuse(w, http.StatusNotFound, resultUnknown)
		return
	case r.Method != http.MethodPost:
		w.Header().Set("Allow", http.MethodPost)
		s.refuse(w, http.StatusMethodNotAllowed, resultBad)
		return
	}
	p, err := s.desk.beginReading(token)
	if err != nil {
		s.refuseUnwanted(w, err)
		return
	}
	defer p.doneReading()
	if r.ContentLength > int64(p.wanted.limit()) {
		s.refuseUseless(w, p, http.StatusRequestEntityTooLarge, fmt.Errorf("%w: it has %d bytes", mooncake.ErrBadCallback, r.ContentLength))
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, int64(p.wanted.limit())))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		s.refuseUseless(w, p, http.StatusRequestEntityTooLarge,
			fmt.Errorf("%w: it has more than %d bytes", mooncake.ErrBadCallback, tooLarge.Limit))
		return
	case err != nil: // the engine will try again
		s.refuse(w, http.StatusBadRequest, resultBad)
		return
	}
	s.deliver(w, p, body)
}

// deliver answers at once: an engine makes only a few callbacks at a time, and the next ones wait.
// A request that was given up still takes one for a while, so that a prefill can free the blocks
// that the decode engine keeps for it.
func (s *Server) deliver(w http.ResponseWriter, p *PendingCallback, body []byte) {
	callback, err := p.wanted.Read(body)
	if err != nil { // the request is told
		s.refuseUseless(w, p, http.StatusBadRequest, err)
		return
	}
	late, err := p.handOver(Callback{Callback: callback})
	switch {
	case err != nil:
		s.refuseUnwanted(w, err)
		return
	case late && !callback.Empty: // delivered all the same; an empty one needs no prefill
		s.results.WithLabelValues(resultLate).Inc()
	default:
		s.results.WithLabelValues(resultOK).Inc()
	}
	if callback.ShortID && s.desk.noteFirstShortID(p.wanted.Rank) { // once per rank
		s.Log.Warn("a decode engine adds no random suffix to the ids of requests, and cuts the end of ours in its callbacks; this works, but "+
			"the proxy could not tell two requests with the same id apart",
			zap.String("engine", p.wanted.Rank))
	}
	s.warnOfKeys(p.wanted.Rank, callback.Unknown)
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"status":"ok"}`) // the engine ignores the body
}

func (s *Server) warnOfKeys(rank string, keys []string) {
	named, full := s.desk.markKeysLogged(keys)
	for _, key := range named {
		s.Log.Warn("a decode engine's callback has a key that this evenkeel does not know; its value is no address, and the prefill engine gets "+
			"it unchanged", zap.String("engine", rank), zap.String("key", key))
	}
	if full {
		s.Log.Warn("callbacks had many keys that this evenkeel does not know; the log names no more of them", zap.Int("keys", mostKeys))
	}
}

// The request needs another rank, because the proxy does not know where this engine expects the KV.
func (s *Server) refuseUseless(w http.ResponseWriter, p *PendingCallback, status int, err error) {
	if _, notWanted := p.handOver(Callback{Err: err}); notWanted != nil {
		s.refuseUnwanted(w, notWanted)
		return
	}
	if errors.Is(err, mooncake.ErrUnknownHost) {
		s.Log.Error("ALARM: a decode engine's callback names a host that does not belong to it; the prefill is not sent there",
			zap.String("engine", p.wanted.Rank), zap.Error(err))
	} else {
		s.Log.Warn("a callback is refused, and its request is tried again", zap.String("engine", p.wanted.Rank), zap.Error(err))
	}
	s.refuse(w, status, resultBad)
}

// why is errCameBefore or errUnknown.
func (s *Server) refuseUnwanted(w http.ResponseWriter, why error) {
	if errors.Is(why, errCameBefore) {
		s.refuse(w, http.StatusConflict, resultDuplicate)
		return
	}
	s.refuse(w, http.StatusNotFound, resultUnknown)
}

// It logs at most once per warnEvery, because any caller can cause it.
func (s *Server) warnOfStranger(peer string) {
	now := time.Now().UnixNano()
	// Of several calls at the same time, one warns.
	if lastWarned := s.warned.Load(); now-lastWarned >= int64(warnEvery) && s.warned.CompareAndSwap(lastWarned, now) {
		s.Log.Warn("a callback is refused, because it came from an address of no decode engine; if a decode engine has this address, add it to "+
			"bind.allow", zap.String("peer", peer))
	}
}

// refuse closes the connection, because the rest of the body is not read.
func (s *Server) refuse(w http.ResponseWriter, status int, result string) {
	s.results.WithLabelValues(result).Inc()
	w.Header().Set("Connection", "close")
	w.Header().Set("Content-Length", strconv.Itoa(0))
	w.WriteHeader(status)
}
