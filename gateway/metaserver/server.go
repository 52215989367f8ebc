// Package metaserver is where layerwise decode engines call back: they tell where the KV of a
// request goes as soon as they have room for it. Each attempt of a request has a token of its
// own, which the URL ends in, and which is spent by the first callback.
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

// path is what URLs end in, with the token behind it. There is no other.
const path = "/v1/metaserver/"

// An engine's client waits without limit and believes any answer, so all that is bounded here
// is what a connection may cost.
const (
	headTime  = 5 * time.Second
	bodyTime  = 15 * time.Second // for head and body together
	idleTime  = 90 * time.Second
	headBytes = 8 << 10
)

// Config is what a metaserver needs.
type Config struct {
	Listen      string
	Advertise   func() string // URL for decode engines, without a path; empty: http:// and where it listens
	Allowed     func(netip.Addr) bool
	Connections int // at once
	Registerer  prometheus.Registerer
	Log         *zap.Logger
}

// Server takes callbacks.
type Server struct {
	Config
	desk      desk
	http      *http.Server
	listener  *edge.Listener
	listening atomic.Bool
	served    chan struct{} // closed when the listener has ended
	results   *prometheus.CounterVec
	warned    atomic.Int64 // Unix ns of the last warning that any caller can cause
}

const warnEvery = time.Minute

// What became of a callback.
const (
	resultOK        = "ok"
	resultDuplicate = "duplicate"
	resultUnknown   = "unknown"
	resultBad       = "bad"
	resultLate      = "late"
)

// New makes a server that does not listen yet.
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
	if err != nil { // there is such a level
		panic(err)
	}
	s.http = &http.Server{
		Handler: http.HandlerFunc(s.serve), ReadHeaderTimeout: headTime, ReadTimeout: bodyTime, WriteTimeout: bodyTime, IdleTimeout: idleTime,
		MaxHeaderBytes: headBytes, ErrorLog: errorLog,
	}
	return s
}

// Start listens. It returns once decode engines can call.
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

// Listening says whether callbacks can come; it is true of a proxy that wants none.
func (s *Server) Listening() bool { return s == nil || s.listening.Load() }

// Addr is where it listens; empty: nowhere.
func (s *Server) Addr() string {
	if s == nil || s.listener == nil {
		return ""
	}
	return s.listener.Addr().String()
}

// Close takes no more callbacks: what is expected yet is forgotten.
func (s *Server) Close() {
	if s == nil {
		return
	}
	s.desk.close()
	if s.listener == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if s.http.Shutdown(ctx) != nil {
		_ = s.http.Close() // somebody sends for longer than that
	}
	_ = s.listener.Close()
	<-s.served
}

// URL is the one for decode engines, without a path.
func (s *Server) URL() string {
	if u := strings.TrimSuffix(s.Advertise(), "/"); u != "" {
		return u
	}
	return "http://" + s.Addr()
}

// serve answers one call. A caller, path, method or token that is wrong is refused before the body is read.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	token, found := strings.CutPrefix(r.URL.Path, path)
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	var e *Expectation
	switch {
	case err != nil || !s.Allowed(peer.Addr().Unmap().WithZone("")):
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
	if e, err = s.desk.find(token); err != nil {
		s.refuseUnwanted(w, err)
		return
	}
	defer e.doneReading()
	if r.ContentLength > int64(e.wanted.limit()) {
		s.refuseUseless(w, e, http.StatusRequestEntityTooLarge, fmt.Errorf("%w: it has %d bytes", mooncake.ErrBadCallback, r.ContentLength))
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, int64(e.wanted.limit())))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		s.refuseUseless(w, e, http.StatusRequestEntityTooLarge,
			fmt.Errorf("%w: it has more than %d bytes", mooncake.ErrBadCallback, tooLarge.Limit))
		return
	case err != nil: // the connection broke: the engine tries again
		s.refuse(w, http.StatusBadRequest, resultBad)
		return
	}
	s.deliver(w, e, body)
}

// deliver hands a whole callback to its request and answers at once, since an engine makes few callbacks
// at a time, and the next ones wait for the answers.
func (s *Server) deliver(w http.ResponseWriter, e *Expectation, body []byte) {
	callback, err := e.wanted.Read(body)
	if err != nil {
		s.refuseUseless(w, e, http.StatusBadRequest, err)
		return
	}
	late, err := e.handOver(Callback{Callback: callback})
	switch {
	case err != nil:
		s.refuseUnwanted(w, err)
		return
	case late && !callback.Empty:
		s.results.WithLabelValues(resultLate).Inc()
	default:
		s.results.WithLabelValues(resultOK).Inc()
	}
	if callback.ShortID && s.desk.firstShortID(e.wanted.Rank) {
		s.Log.Warn("a decode engine adds no random suffix to the ids of requests, and cuts the end of ours in its callbacks; this works, but "+
			"the proxy could not tell two requests with the same id apart",
			zap.String("engine", e.wanted.Rank))
	}
	s.warnOfKeys(e.wanted.Rank, callback.Unknown)
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"status":"ok"}`) // the engine does not look at it
}

// warnOfKeys names each key of callbacks that this evenkeel does not know once in the log, and mostKeys at most.
func (s *Server) warnOfKeys(rank string, keys []string) {
	named, last := s.desk.newKeys(keys)
	for _, key := range named {
		s.Log.Warn("a decode engine's callback has a key that this evenkeel does not know; its value is no address, and the prefill engine gets "+
			"it unchanged", zap.String("engine", rank), zap.String("key", key))
	}
	if last {
		s.Log.Warn("callbacks had many keys that this evenkeel does not know; the log names no more of them", zap.Int("keys", mostKeys))
	}
}

// refuseUseless refuses a callback that cannot be used, and tells its request, which needs another rank: nobody knows where the KV
// goes that this engine waits for.
func (s *Server) refuseUseless(w http.ResponseWriter, e *Expectation, status int, err error) {
	if _, notWanted := e.handOver(Callback{Err: err}); notWanted != nil {
		s.refuseUnwanted(w, notWanted)
		return
	}
	if errors.Is(err, mooncake.ErrUnknownHost) {
		s.Log.Error("ALARM: a decode engine's callback names a host that does not belong to it; the prefill is not sent there",
			zap.String("engine", e.wanted.Rank), zap.Error(err))
	} else {
		s.Log.Warn("a callback is refused, and its request is tried again", zap.String("engine", e.wanted.Rank), zap.Error(err))
	}
	s.refuse(w, status, resultBad)
}

// refuseUnwanted refuses a callback for which nobody waits, or not any more. why is errSpent or errUnknown.
func (s *Server) refuseUnwanted(w http.ResponseWriter, why error) {
	if errors.Is(why, errSpent) {
		s.refuse(w, http.StatusConflict, resultDuplicate)
		return
	}
	s.refuse(w, http.StatusNotFound, resultUnknown)
}

// warnOfStranger warns of a caller whose address is not that of a decode engine, once in warnEvery at most: any caller can cause it.
func (s *Server) warnOfStranger(peer string) {
	now := time.Now().UnixNano()
	if last := s.warned.Load(); now-last >= int64(warnEvery) && s.warned.CompareAndSwap(last, now) {
		s.Log.Warn("a callback is refused, because it came from an address of no decode engine; if a decode engine has this address, add it to "+
			"bind.allow", zap.String("peer", peer))
	}
}

// refuse answers without a word of why, and closes the connection: what is left of the body is not read.
func (s *Server) refuse(w http.ResponseWriter, status int, result string) {
	s.results.WithLabelValues(result).Inc()
	w.Header().Set("Connection", "close")
	w.Header().Set("Content-Length", strconv.Itoa(0))
	w.WriteHeader(status)
}
