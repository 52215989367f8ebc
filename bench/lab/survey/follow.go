// Package survey looks at engines that serve already, behind whatever router, and says what
// levelling their ranks could gain. It reads their pages of metrics and changes nothing.
package survey

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"evenkeel/engine"
)

// Watch asks all engines for their metrics, once in each interval, until the time is over or ctx
// ends. Each engine has one request at a time. One that is silent in the first round is an error:
// its address may be wrong.
func Watch(ctx context.Context, client *engine.Client, targets []*engine.Target, every, lasts time.Duration,
	told func(gone time.Duration)) ([]*Series, error) {
	all, began := seriesOf(targets), time.Now()
	err := rounds(ctx, client, targets, all, every, func(round int) (over bool, fail error) {
		if round == 0 && ctx.Err() == nil {
			var errs []error
			for _, s := range all {
				errs = append(errs, s.Err)
			}
			if err := errors.Join(errs...); err != nil {
				return true, err
			}
		}
		told(time.Since(began))
		return time.Since(began) >= lasts, nil
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// Follow is Watch until ctx ends, for engines that are known to serve: one that is silent at first
// is asked again in the next round.
func Follow(ctx context.Context, client *engine.Client, targets []*engine.Target, every time.Duration) []*Series {
	all := seriesOf(targets)
	_ = rounds(ctx, client, targets, all, every, func(int) (bool, error) { return false, nil }) // which never fails
	return all
}

func seriesOf(targets []*engine.Target) []*Series {
	all := make([]*Series, len(targets))
	for i, t := range targets {
		all[i] = &Series{Address: t.ID}
	}
	return all
}

// rounds asks all engines in each interval, until ctx ends or what is done after a round says that
// it is over.
func rounds(ctx context.Context, client *engine.Client, targets []*engine.Target, all []*Series, every time.Duration,
	after func(round int) (over bool, fail error),
) error {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for round := 0; ; round++ {
		ask(ctx, client, targets, all, round, time.Now(), max(every, leastPatience))
		if over, err := after(round); over || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

const (
	leastPatience = 2 * time.Second // with an engine's page
	atOnce        = 256             // engines that are asked
)

// ask asks each engine once.
func ask(ctx context.Context, client *engine.Client, targets []*engine.Target, all []*Series, round int, now time.Time,
	patience time.Duration) {
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var workers sync.WaitGroup
	free := make(chan struct{}, atOnce)
	for i, t := range targets {
		free <- struct{}{}
		workers.Go(func() {
			defer func() { <-free }()
			s := all[i]
			p, err := get(within, client, t)
			if ctx.Err() != nil {
				return // nobody waits for it any more
			}
			if err == nil {
				if round == 0 { // it tells its context once, or is believed
					models, _ := engine.Models(within, client, t)
					s.context = engine.LongestContext(models)
				}
				p.fit(s.context)
				err = s.Add(round, now, p)
			}
			if err != nil {
				s.Silent, s.Err = s.Silent+1, err
			}
		})
	}
	workers.Wait()
}

func get(ctx context.Context, client *engine.Client, t *engine.Target) (Page, error) {
	text, err := engine.Metrics(ctx, client, t)
	if answered := (*engine.StatusError)(nil); errors.As(err, &answered) {
		err = fmt.Errorf("%w; SGLang has metrics with --enable-metrics, and an API key is taken from OPENAI_API_KEY", err)
	}
	if err != nil {
		return Page{}, err
	}
	p, err := Read(text)
	if err != nil {
		return Page{}, fmt.Errorf("engine %s: %w", t.ID, err)
	}
	return p, nil
}
