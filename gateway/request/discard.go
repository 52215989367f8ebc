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
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
	"evenkeel/pool"
)

// What becomes of a hand-off that is discarded, as drains_total labels it. All but
// the first leave it to the prefiller's hold timeout.
const (
	discardDone     = "drained"
	discardUnplaced = "unplaced" // no rank had room in time
	discardCrowded  = "crowded"  // too many others waited already
	discardExpired  = "expired"
	discardFailed   = "failed"  // the decode engine broke the call
	discardRefused  = "refused" // it refused, and is not known to free anything then
)

// discard throws a hand-off away from which no answer is made. No call frees a
// prefiller's blocks but a decode that pulls them. So one token is decoded on a rank that
// the dispatcher picks, charged like any admission, and the token is thrown away.
// Until that has happened, or the engine's hold timeout has, the hand-off stays
// on the prefiller's budget. An engine may have read it before: then the blocks
// that this decode pulls may be another prompt's. So its text is thrown away, and it
// has a cache_salt of its own, under which no other request finds the blocks.
func (srv *Server) discard(h *handoff, m fleet.Route) {
	h.lease.PassOn()
	end := func(outcome string, err error) {
		srv.metrics.discards.WithLabelValues(outcome).Inc()
		if err != nil {
			h.lease.Orphan()
			srv.Log.Warn("hand-off left to the prefiller's hold timeout", zap.Inline(h.job), zap.String("prefill", h.lease.Candidate.ID), zap.Error(err))
		}
	}
	abandoned := h.job.left()
	// Each keeps its request's body: no more of them than the pool has places.
	switch err := srv.discards.run(srv.Places.Size(), func() {
		outcome, err := srv.discardNow(h, m)
		if err == nil && abandoned {
			h.job.freed()
		}
		end(outcome, err)
	}); {
	case errors.Is(err, errCrowded):
		end(discardCrowded, err)
	case err != nil:
		end(discardUnplaced, err)
	}
}

// leftovers are what still runs for requests that are over. Nothing begins once they
// are closed.
type leftovers struct {
	mu     sync.Mutex
	open   int
	closed bool
	all    sync.WaitGroup
}

// run runs one, unless so many run already.
func (l *leftovers) run(most int, one func()) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return errShutDown
	case l.open >= most:
		return errCrowded
	}
	l.open++
	l.all.Go(func() {
		one()
		l.mu.Lock()
		defer l.mu.Unlock()
		l.open--
	})
	return nil
}

// close has nothing begin any more, and tells when those that run are over.
func (l *leftovers) close() (over <-chan struct{}) {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	done := make(chan struct{})
	go func() {
		l.all.Wait()
		close(done)
	}()
	return done
}

var errShutDown = errors.New("the proxy is shutting down")

var errCrowded = errors.New("as many hand-offs as the pool has places are being drained already; raise pool.size or add decode capacity")

// discardTries is how often a hand-off is offered to decode ranks.
const discardTries = 3

// discardNow discards and says what became of it; an error leaves the hand-off to
// the hold timeout.
func (srv *Server) discardNow(h *handoff, m fleet.Route) (outcome string, err error) {
	for try := 1; ; try++ {
		if gone, _ := srv.Fleet.Outlived(h.born); gone {
			return discardExpired, errors.Join(errOutlived, err)
		}
		r := <-srv.Dispatcher.Enqueue(&pool.Entry{
			ID: srv.nextID(), Model: fleet.BoardIn(m.Board, srv.Fleet.RegionFor(h.lease.Candidate.Instance)), Prompt: h.prompt, Arrival: h.job.arrive, Entered: time.Now(),
			Deadline:  h.discardBy(),
			Prefiller: h.lease.Candidate.Instance,
			Avoid:     h.avoid,
			Discard:   true,
		})
		if r.Err != nil {
			return discardUnplaced, errors.Join(r.Err, err)
		}
		var again bool
		if outcome, again, err = srv.discardOn(r.Slot, h, try); err == nil || !again || try == discardTries || h.id != "" && outcome == discardFailed {
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

// discardOn has the rank of a slot decode one token. again: it failed, and another
// rank may still do it. One that was silent all its time is the last: if the hand-off
// is the cause, the next decode would hold its slot as long.
func (srv *Server) discardOn(slot *dispatcher.Slot, h *handoff, try int) (outcome string, again bool, err error) {
	j := h.job
	end := board.Outcome{Kind: board.Failed}
	defer func() { srv.Dispatcher.Release(slot, end) }()
	now := time.Now()
	if !now.Before(h.discardBy()) { // also of one that comes back from another rank
		return discardExpired, false, mooncake.ErrExpired
	}
	rank := srv.Fleet.Rank(slot.Worker)
	sent, ok := rank.Area.Enter()
	defer sent()
	if !ok {
		end.Kind = board.Cancelled
		return discardUnplaced, true, owner.ErrNotOwner
	}
	if h.kv == nil {
		if h.kv, err = h.Discard(now); err != nil {
			return discardExpired, false, err
		}
	}
	h.lease.Dispatched()
	rank.Traffic.Sends(blockTokens)
	defer rank.Traffic.Settles(blockTokens, blockTokens)
	body := rank.Profile.DiscardBody(&h.body, j.req.Endpoint, h.leg, h.kv, rand.Text(), nil)
	call := srv.Client.NewCall(rank.Target)
	call.OnWritten(sent)
	call.Guard(rank.Area.Ours)
	defer context.AfterFunc(srv.Context, call.Abort)() // shutting down does not wait for it
	resp, err := call.Do(http.MethodPost, j.req.Endpoint.Path(), rank.Area.Mark(h.identify(j.headers(fmt.Sprintf("x%d-", h.attempt), try))), body, engine.Deadlines{
		Connect: srv.Settings().Limits.ConnectTimeout, FirstByte: rank.Profile.FirstEventTimeout, Idle: rank.Profile.FirstEventTimeout,
	})
	switch {
	case errors.Is(err, owner.ErrNotOwner): // nothing was sent
		end.Kind = board.Cancelled
		return discardUnplaced, true, owner.ErrNotOwner
	case err != nil:
		srv.Monitor.Report(rank.Instance, err)
		end.Lost = srv.discardLost(rank, err)
		return discardFailed, !silent(err), err
	}
	defer resp.Close()
	resp.SetDeadline(now.Add(rank.Profile.FirstEventTimeout))
	if _, err = resp.ReadAll(srv.Settings().Limits.EventBytes); err != nil {
		srv.Monitor.Report(rank.Instance, err)
		end.Lost = srv.discardLost(rank, err)
		return discardFailed, !silent(err), err
	}
	if resp.StatusCode() != http.StatusOK && !srv.Fleet.RejectionFrees(rank) {
		return discardRefused, true, fmt.Errorf("decode engine %s answered %d", rank.Target.ID, resp.StatusCode())
	}
	h.lease.Release()
	if resp.StatusCode() == http.StatusOK {
		slot.Started() // the KV came
		srv.Monitor.Judge(rank.Instance, engine.Served, nil)
	}
	end.Kind = board.Cancelled
	return discardDone, false, nil
}
