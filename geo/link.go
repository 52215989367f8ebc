package geo

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"evenkeel/engine"
)

// httpLink is the Link to a peer's listener. It has its own connection for probes, so that a probe
// never waits behind a request.
type httpLink struct {
	peers  *Peers
	to     string // id of the peer's entry in geo.peers
	target *engine.Target
	client *engine.Client
}

// linkOverHTTP makes the Link to a peer over HTTP.
func (ps *Peers) linkOverHTTP(p *peer) Link {
	return &httpLink{peers: ps, to: p.conf.ID, target: p.target,
		client: engine.NewClient(engine.Options{MaxIdle: 1, IdleTimeout: max(time.Minute, 4*ps.cfg.Probe.Interval)})}
}

// Close closes the connection for probes.
func (l *httpLink) Close() { l.client.Close() }

// warmConnections is the number of idle connections to a peer that are kept ready for requests.
// Without them a request would wait two or three round trips for a dial.
const warmConnections = 2

// Warm keeps idle connections for requests ready, see Link.
func (l *httpLink) Warm(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return l.peers.traffic.Warm(ctx, l.target, warmConnections)
}

// Ask sends a question to the peer, see Link.
func (l *httpLink) Ask(ctx context.Context, question []byte, limit time.Duration, answered func(ProbeOutcome)) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	outcome := l.postProbe(ctx, question)
	// The end of ctx aborted the call, so the call's own error says nothing.
	if outcome.Err != nil && ctx.Err() != nil {
		outcome.Err = fmt.Errorf("%w: no answer in time", ErrProbe)
	}
	answered(outcome)
}

// postProbe posts a question to the peer's listener and returns the answer. The round trip counts
// from when the question was written, without a dial.
func (l *httpLink) postProbe(ctx context.Context, question []byte) (outcome ProbeOutcome) {
	body, began := [][]byte{question}, time.Now()
	call, writtenAt := l.client.NewCall(l.target), began
	call.OnWritten(func() { writtenAt = time.Now() })
	stopAbort := context.AfterFunc(ctx, call.Abort)
	defer stopAbort()
	headers := l.probeHeaders(body, began)
	// There are no time limits, because ctx aborts the call.
	resp, err := call.Do(http.MethodPost, ProbePath, headers, body, engine.Deadlines{})
	if err != nil {
		return ProbeOutcome{Err: err}
	}
	defer resp.Close()
	outcome.RoundTrip, outcome.Dialled = time.Since(writtenAt), !resp.Reused()
	if outcome.Text, outcome.Err = resp.ReadAll(maxProbe); outcome.Err == nil && resp.StatusCode() != http.StatusOK {
		outcome.Err = refusedProbe(resp.StatusCode(), string(resp.Header(RejectHeader)))
	}
	return outcome
}

// probeHeaders returns the headers of a probe, by which the peer checks who has sent it: the hop
// and, if there are keys, the signature.
func (l *httpLink) probeHeaders(body [][]byte, now time.Time) []engine.Header {
	ps := l.peers
	// The signature covers this besides the body and the hop.
	signed := &Message{Method: http.MethodPost, Target: ProbePath}
	// Only the answer to the probe tells the process.
	recipient := hopRecipient{proxy: l.to}
	// This proxy itself asks, so no request came here before.
	var noInbound *Hop
	// Every hop must have the id of a request.
	rid := "probe-" + ps.process.nameAt(now)
	// Every hop must have a deadline, too, but only ctx ends the call.
	deadline := now.Add(ps.cfg.Probe.Interval)
	return ps.hopHeaders(signed, body, recipient, noInbound, rid, now, deadline)
}

// errRefused is the error for a probe that the peer's listener refused.
var errRefused = fmt.Errorf("%w: the peer refuses it", ErrProbe)

// refusedProbe returns an error with the reason why a probe was refused, and with advice.
func refusedProbe(status int, reject string) error {
	switch reject {
	case RejectVersion:
		return fmt.Errorf("%w with status %d: its evenkeel is of another version; run the same on both sides", errRefused, status)
	case RejectHop: // the answer of an older evenkeel to a hop header that it cannot read
		return fmt.Errorf("%w with status %d: it does not take our hop header; run the same version of evenkeel on both sides, and set "+
			"geo.max_hops alike", errRefused, status)
	case RejectRecipient:
		return fmt.Errorf("%w with status %d: it has another name; set geo.self.id there or the peer's id here", errRefused, status)
	}
	// The text comes from the peer, so only known reasons are repeated.
	if !slices.Contains(causes, reject) {
		reject = "without a reason that we know"
	}
	return fmt.Errorf("%w with status %d, %s; see the peer's log", errRefused, status, reject)
}
