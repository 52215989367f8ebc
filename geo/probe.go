package geo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/geo/policy"
	"evenkeel/prefill"
)

// warm is how many idle connections a peer has for traffic: a dial costs two or
// three round trips.
const warm = 2

// probeLoop probes a peer until its stop or the node's. Called with n.mu held.
func (n *Node) probeLoop(p *peer) {
	ctx, cancel := context.WithCancel(n.ctx)
	p.stop = cancel
	n.running.Go(func() {
		defer cancel()
		client := engine.NewClient(engine.Options{MaxIdle: 1, IdleTimeout: max(time.Minute, 4*n.cfg.Interval)}) // its connection is for probes alone
		defer client.Close()
		timer := time.NewTimer(0)
		defer timer.Stop()
		for seq := uint64(1); ; seq++ {
			select {
			case <-ctx.Done():
				return
			case <-timer.C:
			}
			n.probe(ctx, client, p, seq)
			timer.Reset(time.Duration(float64(n.cfg.Interval) * (0.9 + 0.2*rand.Float64())))
		}
	})
}

// probe asks a peer once.
func (n *Node) probe(ctx context.Context, client *engine.Client, p *peer, seq uint64) {
	n.mu.Lock()
	rtt, _ := p.rtt.Ms()
	n.mu.Unlock()
	limit := max(n.cfg.Interval, 500*time.Millisecond, time.Duration(3*rtt*float64(time.Millisecond)))
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	sent := time.Now()
	a, dialled, trip, err := n.ask(ctx, client, p, seq, sent)
	if err == nil {
		err = n.check(p, &a, seq)
	}
	n.mu.Lock()
	if p.gone {
		n.mu.Unlock()
		return
	}
	p.itself = errors.Is(err, errItself)
	var changed bool
	var lost []*Forward
	refused := errors.Is(err, errRefused) && p.fault != err.Error() // said once, as long as it stays so
	if err == nil {
		changed = p.answered(&a, sent, trip, n.at(sent), dialled)
		n.metrics.probe.WithLabelValues(p.id).Observe(trip.Seconds())
	} else if changed = p.missed(err.Error(), n.cfg.Misses); changed {
		for f := range p.inflight {
			lost = append(lost, f)
		}
	}
	up := p.up
	n.judge(p)
	n.mu.Unlock()
	if err == nil && n.cfg.Heard != nil {
		n.cfg.Heard(Heard{Peer: a.ID, Region: a.Region, Tenure: a.Tenure, RTTMs: a.RTTMs})
	}
	if refused {
		n.cfg.Log.Warn("a peer refuses our probes", zap.String("peer", p.id), zap.Error(err))
	}
	if changed && up {
		n.cfg.Log.Info("peer is up", zap.String("peer", p.id), zap.String("boot", a.Boot), zap.String("version", a.Version))
	} else if changed {
		n.cfg.Log.Warn("peer is down", zap.String("peer", p.id), zap.Error(err))
		for _, f := range lost {
			f.abandon(causeDown)
		}
	}
	if up {
		if err := n.traffic.Warm(ctx, p.target, warm); err != nil && !errors.Is(err, context.Canceled) {
			n.cfg.Log.Debug("no idle connection to a peer", zap.String("peer", p.id), zap.Error(err))
		}
	}
	n.cfg.Tier.Wake() // what waits may go now, or has to stay
}

// ask sends the question and reads the answer, which came so long after it was
// written. dialled: the connection was dialled for it, so that this says nothing
// of the way.
func (n *Node) ask(ctx context.Context, client *engine.Client, p *peer, seq uint64, sent time.Time) (a answer, dialled bool, trip time.Duration, err error) {
	body, err := json.Marshal(question{Version: version, ID: n.cfg.ID, Boot: n.boot, Seq: seq, SentUs: sent.UnixMicro()})
	if err != nil {
		return a, false, 0, err
	}
	parts := [][]byte{body}
	call, wrote := client.NewCall(p.target), sent
	call.OnWritten(func() { wrote = time.Now() })
	defer context.AfterFunc(ctx, call.Abort)()
	hdr := n.papersOf(&Message{Method: http.MethodPost, Target: ProbePath}, parts, address{to: p.conf.ID}, nil, "probe-"+n.boot, sent, sent.Add(n.cfg.Interval))
	resp, err := call.Do(http.MethodPost, ProbePath, hdr, parts, engine.Deadlines{})
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: no answer in time", ErrProbe)
		}
		return a, false, 0, err
	}
	defer resp.Close()
	trip, dialled = time.Since(wrote), !resp.Reused()
	text, err := resp.ReadAll(maxProbe)
	switch {
	case err != nil:
		return a, dialled, trip, err
	case resp.StatusCode() != http.StatusOK:
		return a, dialled, trip, refusedProbe(resp.StatusCode(), string(resp.Header(RejectHeader)))
	}
	a, err = readAnswer(text)
	return a, dialled, trip, err
}

// errRefused is a probe that the peer's door refused.
var errRefused = fmt.Errorf("%w: the peer refuses it", ErrProbe)

// refusedProbe says why, and what to do.
func refusedProbe(status int, reject string) error {
	switch reject {
	case RejectVersion:
		return fmt.Errorf("%w with status %d: its evenkeel is of another version; run the same on both sides", errRefused, status)
	case RejectHop: // the version before answers so to a hop header that it cannot read
		return fmt.Errorf("%w with status %d: it does not take our hop header; run the same version of evenkeel on both sides, and set geo.max_hops alike", errRefused, status)
	case RejectRecipient:
		return fmt.Errorf("%w with status %d: it has another name; set geo.self.id there or the peer's id here", errRefused, status)
	}
	if !slices.Contains(causes, reject) {
		reject = "without a reason that we know"
	}
	return fmt.Errorf("%w with status %d, %s; see the peer's log", errRefused, status, reject)
}

var errItself = fmt.Errorf("%w: it is ourselves", ErrProbe)

// check tells whether the answer is that of this peer to this question.
func (n *Node) check(p *peer, a *answer, seq uint64) error {
	switch {
	case a.Boot == n.boot || a.ID == n.cfg.ID:
		return errItself
	case !p.conf.answersTo(a.ID):
		return fmt.Errorf("%w: it calls itself %q, and geo.peers %q; set geo.self.id there or the peer's id here", ErrProbe, a.ID, p.conf.ID)
	case a.Seq != seq:
		return fmt.Errorf("%w: to question %d, not %d", ErrProbe, a.Seq, seq)
	}
	return nil
}

// address is the run of a dispatcher that a request is for.
type address struct{ to, boot string }

// addressOf is that of a peer, as its last probe told.
func (n *Node) addressOf(p *peer) address {
	n.mu.Lock()
	defer n.mu.Unlock()
	return address{p.name, p.boot}
}

// papersOf are the headers that another dispatcher believes; came is how the
// request came here from one, nil if it did not.
func (n *Node) papersOf(m *Message, body [][]byte, at address, came *Hop, rid string, now, deadline time.Time) []engine.Header {
	h := Hop{
		N: 1, Max: n.cfg.MaxHops, Origin: n.cfg.ID, Via: []string{n.cfg.ID}, RID: rid,
		Time: now.UnixMilli(), Nonce: newBoot(), Deadline: deadline.UnixMilli(),
		To: at.to, Boot: at.boot, Digest: DigestOf(body...),
	}
	if came != nil {
		h.N, h.Max, h.Origin, h.Via = came.N+1, came.Max, came.Origin, append(slices.Clone(came.Via), n.cfg.ID)
	}
	hdr := []engine.Header{{Name: HopHeader, Value: h.String()}, {Name: TenantHeader, Value: m.Tenant}, {Name: "Content-Type", Value: "application/json"}}
	if k := n.door.keys.Load(); k != nil {
		hdr = append(hdr, engine.Header{Name: SignatureHeader, Value: k.Sign(m, &h)})
	}
	return hdr
}

// Answer answers a probe of a peer, which came at that time. The peer's own
// version is its business: it sees ours.
func (n *Node) Answer(body []byte, came time.Time) ([]byte, *Refusal) {
	var q question
	if len(body) > maxProbe || json.Unmarshal(body, &q) != nil || major(q.Version) < 0 {
		return nil, refuse(http.StatusBadRequest, RejectVersion, "this is no probe of a dispatcher")
	}
	a := answer{Version: version, ID: n.cfg.ID, Region: n.cfg.Region, Boot: n.boot, Seq: q.Seq, Draining: n.cfg.Draining(), Models: n.offers()}
	if n.cfg.Tenure != nil {
		a.Tenure = n.cfg.Tenure()
		n.mu.Lock()
		a.RTTMs = n.rtts()
		n.mu.Unlock()
	}
	a.ProcUs = us(time.Since(came))
	text, err := json.Marshal(a)
	if err != nil || len(text) > maxProbe {
		return nil, refuse(http.StatusInternalServerError, RejectVersion, "the answer is over %d bytes; serve fewer models here", maxProbe)
	}
	return text, nil
}

// offers is what this region has for requests of others.
func (n *Node) offers() map[string]policy.Offer {
	all := map[string]policy.Offer{}
	n.cfg.Tier.Offers(func(model string, l *prefill.Local) {
		running, seqs := n.cfg.Running(model)
		n.mu.Lock()
		defer n.mu.Unlock()
		s := n.model(model)
		if s == nil {
			return
		}
		push := pushOf(s.policy, l)
		places := localPlaces(nil, &push, l, running, seqs > 0)
		o := policy.NewOffer(places, l.Waiting, float64(l.Tokens), s.drain.Ms(), seqs)
		for i := range l.Prefillers {
			o.FitN = max(o.FitN, l.Prefillers[i].Samples)
		}
		all[model] = o
		n.metrics.available.WithLabelValues(model).Set(float64(o.NAvail))
		n.metrics.queue.WithLabelValues(model).Set(float64(l.Waiting))
	})
	return all
}
