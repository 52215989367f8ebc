package gateway

import (
	"context"
	"fmt"
	"slices"
	"time"

	"evenkeel/geo"
	"evenkeel/lease"
	"evenkeel/prefill"
)

// handBack stops what we admit to a group, says what of ours still runs there,
// and lets the lease go (geo R36).
func (s *groups) handBack(sender string, ask geo.HandBack) (h geo.HandedBack, err error) {
	a := s.of(ask.Group)
	if a == nil || ask.Region != s.gw.conf().Geo.Self.Region || ask.Epoch != a.view.Load().Epoch {
		return h, fmt.Errorf("group %s: %w", ask.Group, lease.ErrNotHolder)
	}
	now := time.Now()
	s.see(now)
	s.mu.Lock()
	yields := s.members.Yields(ask.Group, sender, now)
	s.mu.Unlock()
	if !yields {
		return h, fmt.Errorf("group %s: %w, and %s is not before us in its order", ask.Group, lease.ErrNotHolder, sender)
	}
	a.yields.Store(true)
	defer a.yields.Store(false)
	s.finish(s.gw.ctx, a)
	h = geo.HandedBack{HandBack: ask, Ranks: []geo.Resident{}}
	err = a.claim.GiveBack(ask.Epoch, func() { h.Ranks = append(h.Ranks, s.running(s.gw.ctx, a.name)...) })
	return h, err
}

// finish has what was begun here come to a rank before the group goes, where no
// other group of ours could decode it: what does not is prefilled again, and its
// first hand-off stays with the prefiller until the hold timeout.
func (s *groups) finish(ctx context.Context, a *decodeGroup) {
	ctx, cancel := context.WithTimeout(ctx, timesOf(s.leases.duration, 0).RenewDeadline/4) // who asks waits for half of it
	defer cancel()
	s.gw.regions.look(ctx) // from here on what comes waits, or goes elsewhere
	boards := slices.DeleteFunc(s.gw.fleet.boardsOf(a.name), s.gw.fleet.begins)
	for len(boards) > 0 && ctx.Err() == nil && s.underWay(boards) {
		time.Sleep(finishEvery)
	}
}

const finishEvery = 5 * time.Millisecond

// underWay says whether something is prefilled here, or waits for a rank, that
// would be decoded on one of the boards.
func (s *groups) underWay(boards []string) bool {
	return slices.ContainsFunc(s.gw.tier.Status(), func(c prefill.CandidateStatus) bool {
		return c.Inflight+c.Pooled > 0 && slices.ContainsFunc(c.Models, func(m string) bool {
			r, _, _ := s.gw.fleet.lookup(m)
			return slices.Contains(boards, r.board)
		})
	})
}

// askBack asks the holder for a group that should be ours, and keeps what it
// says runs there.
func (s *groups) askBack(ctx context.Context, a *decodeGroup, holder string, epoch int64) error {
	h, err := s.gw.regions.node.AskBack(ctx, holder, geo.HandBack{Region: s.gw.conf().Geo.Self.Region, Group: a.name, Epoch: epoch})
	if err != nil {
		return err
	}
	up := s.gw.fleet.decodes(func(in *instance) bool { return in.conf.Group == a.name })
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.others)
	for _, in := range up { // of those that are not named nothing runs there
		for _, r := range ranksOf(in) {
			a.others[in.target(r).ID] = geo.Resident{}
		}
	}
	note(a.others, h.Ranks, nil)
	return nil
}

// tenure is what probes tell our siblings.
func (s *groups) tenure() geo.Tenure {
	t := geo.Tenure{Groups: map[string]int64{}, Decodes: s.gw.regions.decodes(), Prefill: s.gw.tier.Shares()}
	for name, a := range *s.all.Load() {
		if v := a.view.Load(); v.Admits {
			t.Groups[name] = v.Epoch
		}
	}
	return t
}

// hear takes what a sibling's probe told.
func (s *groups) hear(h geo.Heard) {
	if h.Region != s.gw.conf().Geo.Self.Region {
		return
	}
	s.share(h.Peer, h.Prefill)
	now := time.Now()
	for name, epoch := range h.Groups {
		if a := s.of(name); a != nil {
			s.known.Store(true)
			a.mu.Lock()
			a.heard = now
			a.mu.Unlock()
			a.claim.Claimed(epoch)
		}
	}
}
