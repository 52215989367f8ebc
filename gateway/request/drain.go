package request

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
	"evenkeel/pool"
)

// What becomes of a hand-off nobody will decode, as drains_total labels it. All
// but the first leave it to the prefiller's hold timeout.
const (
	drainDone     = "drained"
	drainUnplaced = "unplaced" // no rank had room in time
	drainCrowded  = "crowded"  // too many others waited already
	drainExpired  = "expired"
	drainFailed   = "failed"  // the decode engine broke the call
	drainRefused  = "refused" // it refused, and is not known to free anything then
)

// drain releases a hand-off nobody will decode: no call frees a prefiller's
// blocks but a decode that pulls them, so one token is decoded and thrown away
// on the rank the dispatcher picks, charged like any admission.
// Until that has happened, or the engine's hold timeout has, the hand-off stays
// on the prefiller's budget. An engine may have read it before: then the blocks
// that the drain pulls may be another prompt's. So its text is thrown away, and it
// has a cache_salt of its own, under which no other request finds the blocks.
func (srv *Server) drain(h *handoff, m fleet.Route) {
	h.lease.PassOn()
	end := func(outcome string, err error) {
		srv.metrics.drains.WithLabelValues(outcome).Inc()
		if err != nil {
			h.lease.Orphan()
			srv.Log.Warn("hand-off left to the prefiller's hold timeout", zap.Inline(h.job), zap.String("prefill", h.lease.Candidate.ID), zap.Error(err))
		}
	}
	abandoned := h.job.left()
	// Each keeps its request's body: no more of them than the pool has places.
	switch err := srv.drains.begin(srv.Places.Size(), func() {
		outcome, err := srv.drainNow(h, m)
		if err == nil && abandoned {
			h.job.freed()
		}
		end(outcome, err)
	}); {
	case errors.Is(err, errCrowded):
		end(drainCrowded, err)
	case err != nil:
		end(drainUnplaced, err)
	}
}

// drainage is what still runs for requests that are over, such as drains. It
// begins nothing once it is closed.
type drainage struct {
	mu     sync.Mutex
	open   int
	closed bool
	all    sync.WaitGroup
}

// begin runs one, unless so many run already.
func (d *drainage) begin(most int, drain func()) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return errShutDown
	case d.open >= most:
		return errCrowded
	}
	d.open++
	d.all.Go(func() {
		drain()
		d.mu.Lock()
		defer d.mu.Unlock()
		d.open--
	})
	return nil
}

// close has no drain begin any more, and tells when those that run are over.
func (d *drainage) close() (over <-chan struct{}) {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	done := make(chan struct{})
	go func() {
		d.all.Wait()
		close(done)
	}()
	return done
}

var errShutDown = errors.New("the proxy is shutting down")

var errCrowded = errors.New("as many hand-offs as the pool has places are being drained already; raise pool.size or add decode capacity")

// drainTries is how often a hand-off is offered to decode ranks.
const drainTries = 3

// drainNow drains and says what became of it; an error leaves the hand-off to
// the hold timeout.
func (srv *Server) drainNow(h *handoff, m fleet.Route) (outcome string, err error) {
	for try := 1; ; try++ {
		if gone, _ := srv.Fleet.Outlived(h.born); gone {
			return drainExpired, errors.Join(errOutlived, err)
		}
		r := <-srv.Dispatcher.Enqueue(&pool.Entry{
			ID: srv.nextID(), Model: fleet.BoardIn(m.Board, srv.Fleet.RegionFor(h.lease.Candidate.Instance)), Prompt: h.prompt, Arrival: h.job.arrive, Entered: time.Now(),
			Deadline:  h.drainBy(),
			Prefiller: h.lease.Candidate.Instance,
			Avoid:     h.avoid,
			Drain:     true,
		})
		if r.Err != nil {
			return drainUnplaced, errors.Join(r.Err, err)
		}
		var again bool
		if outcome, again, err = srv.drainOn(r.Slot, h, try); err == nil || !again || try == drainTries || h.id != "" && outcome == drainFailed {
			return outcome, err
		}
		h.avoid = srv.Fleet.Beside(r.Slot.Worker, h.avoid)
		select { // a moment for the monitor to hear of it
		case <-time.After(srv.Settings().Prefill.Retry.Base << try):
		case <-srv.Context.Done():
			return outcome, err
		}
	}
}

// drainOn has the rank of a slot decode one token. again: it failed, and another
// rank may still do it. A drain that was silent all its time is the last: if the
// hand-off is the cause, the next drain would hold its slot as long.
func (srv *Server) drainOn(slot *dispatcher.Slot, h *handoff, try int) (outcome string, again bool, err error) {
	j := h.job
	end := dispatcher.Outcome{Kind: dispatcher.Failed}
	defer func() { srv.Dispatcher.Release(slot, end) }()
	now := time.Now()
	if !now.Before(h.drainBy()) { // also of one that comes back from another rank
		return drainExpired, false, mooncake.ErrExpired
	}
	rank := srv.Fleet.Rank(slot.Worker)
	sent, ok := rank.Area.Enter()
	defer sent()
	if !ok {
		end.Kind = dispatcher.Cancelled
		return drainUnplaced, true, owner.ErrNotOwner
	}
	if h.kv == nil {
		if h.kv, err = h.Discard(now); err != nil {
			return drainExpired, false, err
		}
	}
	h.lease.Dispatched()
	rank.Traffic.Sends(blockTokens)
	defer rank.Traffic.Settles(blockTokens, blockTokens)
	body := rank.Profile.DrainBody(&h.body, j.req.Endpoint, h.leg, h.kv, rand.Text(), nil)
	call := srv.Client.NewCall(rank.Target)
	call.OnWritten(sent)
	call.Guard(rank.Area.Ours)
	defer context.AfterFunc(srv.Context, call.Abort)() // shutting down does not wait for it
	resp, err := call.Do(http.MethodPost, j.req.Endpoint.Path(), rank.Area.Mark(h.identify(j.headers(fmt.Sprintf("x%d-", h.attempt), try))), body, engine.Deadlines{
		Connect: srv.Settings().Limits.ConnectTimeout, FirstByte: rank.Profile.FirstEventTimeout, Idle: rank.Profile.FirstEventTimeout,
	})
	switch {
	case errors.Is(err, owner.ErrNotOwner): // nothing was sent
		end.Kind = dispatcher.Cancelled
		return drainUnplaced, true, owner.ErrNotOwner
	case err != nil:
		srv.Monitor.Report(rank.Instance, err)
		end.Lost = srv.drainLost(rank, err)
		return drainFailed, !silent(err), err
	}
	defer resp.Close()
	resp.SetDeadline(now.Add(rank.Profile.FirstEventTimeout))
	if _, err = resp.ReadAll(srv.Settings().Limits.EventBytes); err != nil {
		srv.Monitor.Report(rank.Instance, err)
		end.Lost = srv.drainLost(rank, err)
		return drainFailed, !silent(err), err
	}
	if resp.StatusCode() != http.StatusOK && !srv.Fleet.RejectionFrees(rank) {
		return drainRefused, true, fmt.Errorf("decode engine %s answered %d", rank.Target.ID, resp.StatusCode())
	}
	h.lease.Release()
	if resp.StatusCode() == http.StatusOK {
		slot.Started() // the KV came
		srv.Monitor.Judge(rank.Instance, engine.Served, nil)
	}
	end.Kind = dispatcher.Cancelled
	return drainDone, false, nil
}
