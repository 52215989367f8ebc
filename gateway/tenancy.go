package gateway

import (
	"context"
	"time"

	"go.uber.org/zap"

	"evenkeel/lease"
)

// of is the area of an engine; "" is our own region.
func (o *owners) of(region string) *area {
	if region == "" {
		region = o.gw.conf().Geo.Self.Region
	}
	return o.areas[region]
}

// admits says whether an engine of that region gets new work from here.
func (o *owners) admits(region string) bool {
	if o == nil {
		return true
	}
	a := o.of(region)
	return a != nil && a.view.Load().Admits
}

// admitsAny says whether any region's engines get new work from here.
func (o *owners) admitsAny() bool {
	if o == nil {
		return true
	}
	for _, a := range o.areas {
		if a.view.Load().Admits {
			return true
		}
	}
	return false
}

// lost is closed while another's region is not ours to admit to; nil: it is our
// own, whose ranks what waits for them outlasts.
func (o *owners) lost(region string) <-chan struct{} {
	if o == nil || region == "" {
		return nil
	}
	if a := o.areas[region]; a != nil {
		return *a.gone.Load()
	}
	return nil
}

func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// changed takes a view of the area's claim. Once it returns from one that does
// not admit, nothing is bound to the area's engines any more.
func (o *owners) changed(a *area, v lease.View) {
	was := a.view.Load() // each area has one caller at a time
	if was.Admits == v.Admits {
		a.view.Store(&v)
		if was.Phase != v.Phase {
			o.gw.log.Info("ownership", zap.String("region", a.region), zap.String("phase", string(v.Phase)), zap.String("holder", v.Holder), zap.Int64("epoch", v.Epoch))
		}
		return
	}
	// A publish between these lines acts on the view: caution is noted before the view
	// admits, and forgotten only after it no longer admits.
	a.mu.Lock()
	if v.Admits {
		a.adopted, a.gave = time.Now(), false
		a.gone.Store(new(make(chan struct{})))
		a.view.Store(&v)
	} else {
		a.view.Store(&v)
		a.adopted = time.Time{}
		clear(a.residents)
	}
	a.mu.Unlock()
	o.gw.log.Warn("ownership of a region's engines changed", zap.String("region", a.region), zap.Bool("admits", v.Admits),
		zap.String("phase", string(v.Phase)), zap.String("holder", v.Holder), zap.Int64("epoch", v.Epoch))
	o.gw.fleet.publish()
	select {
	case o.poke <- struct{}{}: // what runs there is not known yet
	default:
	}
	if !v.Admits {
		close(*a.gone.Load())
		// The dispatcher has taken the news up once it answers.
		ctx, cancel := context.WithTimeout(o.gw.ctx, areaEvery)
		defer cancel()
		o.gw.dispatcher.Status(ctx)
	}
}

// follow keeps what claims need to know of peers and engines.
func (o *owners) follow(ctx context.Context) {
	tick := time.NewTicker(areaEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-o.poke:
		}
		for _, a := range o.areas {
			o.look(ctx, a, time.Now())
		}
	}
}

func (o *owners) look(ctx context.Context, a *area, now time.Time) {
	if a.claim != nil && !a.home {
		up, all := o.gw.fleet.reach(a.region)
		a.claim.SetFit(all > 0 && 2*up >= all)
		a.claim.SetRank(o.rank(a))
	}
	if a.static != nil {
		o.judge(a, now)
	}
	a.mu.Lock()
	cautious := a.cautious(now)
	ended := !a.adopted.IsZero() && !cautious && len(a.residents) > 0 // before, they are what a taker said on giving back
	if ended {
		clear(a.residents)
	}
	a.mu.Unlock()
	if cautious {
		o.scrapeResidents(ctx, a)
	}
	if cautious || ended {
		o.gw.fleet.publish()
	}
}

// judge asks the static order who owns the area now.
func (o *owners) judge(a *area, now time.Time) {
	o.judging.Lock()
	defer o.judging.Unlock()
	a.mu.Lock()
	v := a.static.View(now)
	a.mu.Unlock()
	if v != *a.view.Load() {
		o.changed(a, v)
	}
}
