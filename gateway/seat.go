package gateway

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/selftest"
	"evenkeel/pool"
)

// slotTimeout is how long the self-test waits for a slot of a rank.
const slotTimeout = 10 * time.Second

// slotCheckEvery is the time between two checks whether a rank has a free slot.
const slotCheckEvery = 100 * time.Millisecond

// TakeSlot takes a slot of the decode rank with this name for a request of the self-test. tokens is
// the length of its prompt. TakeSlot waits up to slotTimeout for the slot, which is charged and
// counted like that of a client's request. The request carries the epoch in which this proxy owns
// the rank. If another proxy owns the rank, the error is selftest.ErrNotOwned.
func (g *Gateway) TakeSlot(ctx context.Context, name string, tokens int) (selftest.Slot, error) {
	check := time.NewTicker(slotCheckEvery)
	defer check.Stop()
	for deadline := time.Now().Add(slotTimeout); ; { // each round tries once; the engines may change between two rounds
		rank, boardName := g.fleet.Now().RankByName(name)
		switch {
		case rank == nil:
			return selftest.Slot{}, fmt.Errorf("rank %s serves no requests now", name)
		case rank.Scope.CheckOwned() != nil:
			return selftest.Slot{}, selftest.ErrNotOwned
		}
		// the request may only get a slot of this rank, whatever else that rank has to prefill
		rule := &board.Local{Ranks: []board.LocalRank{{Worker: rank.Worker, Tokens: tokens}}, Threshold: tokens, InFlight: math.MaxInt}
		id := 1<<63 | g.slotsTaken.Add(1) // ids of clients' requests do not have the highest bit
		got := <-g.dispatcher.EnqueueLocal(&pool.Entry{ID: id, Model: boardName, Prompt: tokens, Arrival: time.Now()}, rule)
		switch {
		case got.Err == nil:
			return selftest.Slot{Scope: rank.Scope, Release: func() {
				g.dispatcher.Release(got.Slot, board.Outcome{Kind: board.Cancelled}) // Cancelled, so that the predictor does not learn from a test
			}}, nil
		case !errors.Is(got.Err, board.ErrNotLocal): // ErrNotLocal: the rank has no free slot now, so check again
			return selftest.Slot{}, got.Err
		case time.Now().After(deadline):
			return selftest.Slot{}, fmt.Errorf("rank %s has no free slot", name)
		}
		select {
		case <-check.C:
		case <-ctx.Done():
			return selftest.Slot{}, ctx.Err()
		}
	}
}
