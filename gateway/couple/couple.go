// Package couple runs the prefill leg of a request whose decode rank was bound before it.
// Both legs are under way at once, and each needs the other. An engine whose counterpart is
// gone may wait for minutes or for ever, so the loss of one leg ends the other one here.
package couple

import (
	"context"
	"errors"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/service"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// Config is what a Maker needs of the proxy.
type Config struct {
	Settings   func() *fleet.Settings
	Serving    func() context.Context // ends when what has no answer yet must end
	Client     *engine.Client
	Monitor    Monitor
	Fleet      Fleet
	Engines    func() Engines // as they are now
	Dispatcher Dispatcher
	Meta       *metaserver.Server // nil: no decode engine calls back
	Registerer prometheus.Registerer
	Log        *zap.Logger
}

// Monitor is told how prefill engines did.
type Monitor interface {
	Answered(instance string)
	Report(instance string, err error)
}

// Engines is what is known of engines at a moment.
type Engines interface {
	Ranks(instance string) int
	HostsOf(instance string) func(host string) bool
	Born(instance string) fleet.Birth
}

// Fleet says where engines reach each other, and keeps the calls that may have to end.
type Fleet interface {
	KnownHost(host string) bool
	Coordinates(c prefill.Candidate) *mooncake.Coordinates
	Learn(c prefill.Candidate, b fleet.Birth, at *mooncake.Coordinates)
	TrackProbe(c *prefill.Candidate, call *engine.Call) *fleet.Run
	Untrack(r *fleet.Run)
}

// Dispatcher knows between which engines KV lately did not arrive, and who prefills for a slot.
type Dispatcher interface {
	Blocked(board string) (prefillers []string)
	Shunned(s *dispatcher.Slot) (prefillers []string)
	Rerouted(s *dispatcher.Slot, prefiller string)
}

// A Maker couples legs.
type Maker struct {
	Config
	service.Leftovers // prefill legs
	drains, rebinds   *prometheus.CounterVec
}

// Why a prefill was run to its end although nobody wants its answer, as drains are labelled.
const (
	drainLeft = "client_left"
	drainLate = "late_callback"
)

// NewMaker makes the one of a proxy.
func NewMaker(c Config) *Maker {
	m := &Maker{Config: c, drains: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_bind_drains_total", Help: "Prefills that ran although no client waits for the answer any more, because only the end of the prefill frees the blocks of the decode engine that the request was bound to. client_left: the client left. late_callback: the request was given up before its callback came.",
	}, []string{"cause"})}
	for _, cause := range []string{drainLeft, drainLate} {
		m.drains.WithLabelValues(cause)
	}
	m.rebinds = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_bind_rebinds_total", Help: "Requests that were bound to a decode rank before their prefill and lost it before their first token. decode: the decode engine refused or broke off. prefill: the prefill engine did. callback: no callback came, or a bad one. silent: the prefill ended, and no event came.",
	}, []string{"cause"})
	for _, cause := range causes {
		m.rebinds.WithLabelValues(cause)
	}
	c.Registerer.MustRegister(m.drains, m.rebinds)
	return m
}

// Why a rank is lost again before the first token, as rebinds are labelled.
const (
	causeDecode   = "decode"   // its engine took nothing, or broke off
	causePrefill  = "prefill"  // the prefill engine did
	causeCallback = "callback" // none came, or one that names no place for the KV
	causeSilent   = "silent"   // the prefill has ended, and no event came
)

var causes = []string{causeDecode, causePrefill, causeCallback, causeSilent}

// lost counts a rank that a request was bound to and has lost; f is why the prefill leg ended the
// decode leg, nil if that has ended by itself.
func (m *Maker) lost(f *failure.Fault) {
	cause := causePrefill
	switch {
	case f == nil:
		cause = causeDecode
	case f.Verdict().Next == lifecycle.Over:
		return
	case f.Why == lifecycle.Unbegun:
		cause = causeSilent
	case f.Leg == lifecycle.Decode:
		cause = causeCallback
	}
	m.rebinds.WithLabelValues(cause).Inc()
}

// Prefer returns the lease of another prefill engine that ends the prefill at most bind.lead later, where KV from the
// chosen one lately did not arrive at every decode engine: the best rank may be of one that it does not reach.
func (m *Maker) Prefer(lease *prefill.Lease) *prefill.Lease {
	if !lease.Candidate.Profile.Early() {
		return lease
	}
	blocked := m.Dispatcher.Blocked(lease.Candidate.Board)
	if slices.Contains(blocked, lease.Candidate.Instance) {
		if other := lease.Sooner(-m.Settings().Bind.Lead, blocked); other != nil {
			return other
		}
	}
	return lease
}

// Plan is what a request tells of its two legs.
type Plan struct {
	Request   zapcore.ObjectMarshaler // names it in the log
	ID        string                  // X-Request-Id of both legs, never used before
	Lease     *prefill.Lease          // not sent yet; the partner settles it
	Rank      *fleet.Rank             // that decodes
	Slot      *dispatcher.Slot        // there
	Endpoint  mooncake.Endpoint
	Headers   []engine.Header                                         // of the prefill leg
	Prompt    int                                                     // tokens, as estimated
	Body      func(p *mooncake.Profile, m *mooncake.Meeting) [][]byte // of the prefill leg
	EndDecode func()                                                  // ends the decode leg, from any goroutine; may come more than once
	Dials     bool                                                    // its calls take new connections only
	Whole     bool                                                    // its answer comes in one piece, or may say nothing before its end
	Most      int                                                     // tokens that the answer may have
}

// Why the legs of a request did not come together.
var (
	ErrUnknown     = errors.New("it is not known yet at which address decode engines reach the prefill engine")
	ErrUnheard     = errors.New("evenkeel does not listen for callbacks of decode engines yet; bind.listen takes effect with a restart")
	ErrNoCallback  = errors.New("the decode engine did not say in time where the KV goes")
	ErrRestarted   = errors.New("the prefill engine restarted after the decode engine had got its address")
	ErrSilent      = errors.New("the prompt was prefilled, but the decode engine did not begin its answer")
	ErrLate        = errors.New("the decode engine did not begin its answer while the prefill engine certainly kept the KV; a later answer could be made of another prompt's KV")
	ErrUnconfirmed = errors.New("the prefill engine did not say in time whether the KV is complete")
	ErrBroken      = errors.New("the prefill engine broke off while it handed the KV over")
	errLeft        = errors.New("the client left")
)
