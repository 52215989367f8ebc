package geo

import (
	"maps"
	"slices"
	"time"

	"evenkeel/geo/policy"
)

// Status is the state of all peers in the admin API.
type Status struct {
	ID      string       `json:"id"`
	Region  string       `json:"region"`
	Central string       `json:"central,omitempty"`
	Policy  string       `json:"policy"`
	QS      float64      `json:"qs"`
	W       float64      `json:"w"`
	Load    float64      `json:"load"`
	MinGain float64      `json:"min_gain_ms"`
	Peers   []PeerStatus `json:"peers"`
}

// PeerStatus is the state of one peer in the admin API.
type PeerStatus struct {
	ID         string                  `json:"id"`
	Name       string                  `json:"name,omitempty"` // the peer's id, by its last answer
	Region     string                  `json:"region"`
	URL        string                  `json:"url"`
	Up         bool                    `json:"up"`
	Draining   bool                    `json:"draining,omitempty"`
	Version    int                     `json:"version"` // the major version of the protocol; -1: unknown
	Fault      string                  `json:"fault,omitempty"`
	RTTMs      float64                 `json:"rtt_ms"`
	AgeMs      float64                 `json:"probe_age_ms"` // -1: no good probe yet
	Reserved   int                     `json:"reserved"`
	InFlight   int                     `json:"in_flight"`
	USDToday   float64                 `json:"usd_today"`
	MinGainUp  float64                 `json:"distrust_ms"` // added to min_gain_ms, because the peer was slower than predicted
	Unanswered int                     `json:"unanswered"`  // requests without a first event
	Window     int                     `json:"window"`      // bound of unanswered; shrinks after late first events
	Circuit    string                  `json:"circuit"`     // closed, or open: after too many failures, the peer gets no forwards for a while
	Models     map[string]policy.Offer `json:"models"`
	Available  map[string]string       `json:"available"` // by model: available, or the reason why not
}

// Status returns a copy of the state of Peers. It first drops reservations that are too old.
func (ps *Peers) Status() Status {
	now := ps.clock.Now()
	ps.mu.Lock()
	defer ps.mu.Unlock()
	s := Status{
		ID: ps.cfg.Self.ID, Region: ps.cfg.Self.Region, Central: ps.cfg.Central, Policy: ps.policyText,
		// The weights have the names that they have in the text of a policy.
		QS: ps.settings.WaitWeight, W: ps.settings.PrefillWeight, Load: ps.settings.BatchWeight, MinGain: ps.settings.MinGainMs,
		Peers: []PeerStatus{},
	}
	for _, p := range ps.peers {
		s.Peers = append(s.Peers, p.status(ps, now))
	}
	return s
}

// status returns the state of the peer. It first drops reservations that are too old. It is called
// with ps.mu held.
func (p *peer) status(ps *Peers, now time.Time) PeerStatus {
	p.expireReservations(ps, now)
	rtt, _ := p.rtt.Ms()
	reserved, _ := p.reserved.Reserved()
	// Distrust is by how much the peer was slower than predicted. A forward there must promise so much
	// more gain. The window is how many requests may be unanswered at the peer; it grows with first
	// events in time, and shrinks with late ones.
	distrustMs, window := p.distrust.Ms(ps.sinceStartMs(now)), p.trust.Window(ps.sinceStartMs(now))
	status := PeerStatus{
		ID: p.id, Name: p.name, Region: p.conf.Region, URL: p.target.URL.String(), Up: p.up, Draining: p.draining, Version: p.major,
		Fault: p.probeError, RTTMs: rtt, AgeMs: -1, Reserved: reserved, InFlight: len(p.inflight), USDToday: p.egress.today(now),
		MinGainUp: distrustMs, Unanswered: p.unanswered, Window: window,
		Circuit: "closed", Models: maps.Clone(p.offers), Available: map[string]string{},
	}
	if p.probed {
		status.AgeMs = ms(now.Sub(p.lastAnsweredAt))
	}
	if !p.circuit.Allows(now) {
		status.Circuit = "open"
	}
	for _, model := range slices.Sorted(maps.Keys(p.offers)) {
		v := p.policyView(ps, model, now)
		status.Available[model] = ps.policy.Judge(&v).String()
	}
	return status
}
