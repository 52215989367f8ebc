package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel/gateway/config"
	"evenkeel/geo"
	"evenkeel/lease"
)

// tenure is what probes tell of us.
func (o *owners) tenure() geo.Tenure {
	t := geo.Tenure{Epochs: map[string]int64{}, Lent: map[string]int{}}
	for _, a := range o.areas {
		if v := a.view.Load(); v.Epoch > 0 {
			t.Epochs[a.region] = v.Epoch
		}
		a.mu.Lock()
		gave := a.gave
		a.mu.Unlock()
		if !gave {
			continue
		}
		n := 0
		for _, r := range o.running(o.gw.ctx, a.region) {
			n += r.Requests
		}
		if n > 0 {
			t.Lent[a.region] = n
			continue
		}
		a.mu.Lock()
		a.gave = false
		a.mu.Unlock()
	}
	return t
}

// heard takes what a peer's probe told.
func (o *owners) heard(h geo.Heard) {
	for region, epoch := range h.Epochs {
		if a := o.areas[region]; a != nil && a.claim != nil {
			a.claim.Claimed(epoch)
		}
	}
	for _, a := range o.areas {
		a.mu.Lock()
		if h.Region == a.region && len(h.RTTMs) > 0 {
			a.nearest[h.Peer] = h.RTTMs
		}
		if a.static != nil {
			a.static.Saw(h.Peer, time.Now())
		}
		a.mu.Unlock()
		if a.static != nil {
			o.judge(a, time.Now())
		}
	}
}

// errNotHome is a dispatcher that asks for another's region.
var errNotHome = errors.New("only a dispatcher whose home the region is may ask for it")

// handBack stops what we admit to a region's engines, says what of ours still
// runs there, and lets the lease go (geo R36).
func (o *owners) handBack(sender string, ask geo.HandBack) (h geo.HandedBack, err error) {
	if o == nil {
		return h, fmt.Errorf("region %s: %w: regions have no owners here; see geo.ownership.engine", ask.Region, lease.ErrNotHolder)
	}
	a := o.areas[ask.Region]
	if a == nil || a.claim == nil {
		return h, fmt.Errorf("region %s: %w", ask.Region, lease.ErrNotHolder)
	}
	if !slices.ContainsFunc(o.gw.conf().Geo.Peers, func(p config.GeoPeer) bool {
		return p.Region == ask.Region && (p.ID == sender || p.Discover != "" && strings.HasPrefix(sender, p.ID+"-"))
	}) {
		return h, errNotHome
	}
	h = geo.HandedBack{HandBack: ask, Ranks: []geo.Resident{}}
	err = a.claim.GiveBack(ask.Epoch, func() {
		a.mu.Lock()
		a.gave = true
		a.mu.Unlock()
		h.Ranks = append(h.Ranks, o.running(o.gw.ctx, a.region)...)
	})
	return h, err
}

// askBack asks the holder for our region, and keeps what it says runs there.
func (o *owners) askBack(ctx context.Context, a *area, holder string, epoch int64) error {
	h, err := o.gw.regions.node.AskBack(ctx, holder, geo.HandBack{Region: a.region, Epoch: epoch})
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.residents)
	for _, r := range h.Ranks {
		a.residents[r.ID] = r
	}
	return nil
}
