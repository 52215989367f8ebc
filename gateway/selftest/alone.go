package selftest

import (
	"context"
	"fmt"
	"sync"
)

// aggregated is the role of engines that prefill and decode.
const aggregated = "aggregated"

// everyRank sends one request to each rank that prefills and decodes. No engine has two of them at the same time.
func (t *tester) everyRank(ctx context.Context, ranks []subject) {
	engines, n := ofEngines(ranks), 0
	for round := 0; n < len(ranks); round++ {
		var all sync.WaitGroup
		free := make(chan struct{}, pairsOnce)
		for _, ranks := range engines {
			if round >= len(ranks) {
				continue
			}
			s, id := ranks[round], fmt.Sprintf("%s-a%d", t.id(), n)
			n++
			if ctx.Err() != nil {
				continue
			}
			free <- struct{}{}
			all.Go(func() {
				defer func() { <-free }()
				if !t.sits(ctx, &s) {
					return
				}
				defer s.seat.leave()
				if err := t.alone(ctx, s, id); err != nil {
					t.report(s.name, Bad, "%v", err)
				}
			})
		}
		all.Wait()
	}
}

// alone has one rank compute a prompt and answer it.
func (t *tester) alone(ctx context.Context, s subject, id string) error {
	q, err := prompt(s.models[0], id)
	if err != nil {
		return err
	}
	_, err = t.answer(ctx, s, q, id, s.profile.DecodeBody(&q.body, q.endpoint, nil, nil, "", true, nil))
	return err
}
