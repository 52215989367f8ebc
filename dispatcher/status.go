package dispatcher

import (
	"cmp"
	"slices"
	"time"
)

// Status is a copy of the boards for people and metrics.
type Status struct {
	Policy string        `json:"policy"` // of barrier groups
	Models []ModelStatus `json:"models"`
	Drift  DriftStatus   `json:"audit_drift"`
}

// DriftStatus is what was charged less what was released and what is held; any
// number but zero is a bug.
type DriftStatus struct {
	Slots    int64 `json:"slots"`
	KVTokens int64 `json:"kv_tokens"`
}

// ModelStatus is one board.
type ModelStatus struct {
	Model         string         `json:"model"`
	Pool          int            `json:"pool"`
	OldestSeconds float64        `json:"oldest_seconds"`
	Ticks         uint64         `json:"ticks"`
	Finished      uint64         `json:"finished"`
	Cancelled     uint64         `json:"cancelled"`
	Failed        uint64         `json:"failed"`
	OutputTokens  int64          `json:"output_tokens"` // of all that left
	Groups        []GroupStatus  `json:"groups"`
	Workers       []WorkerStatus `json:"workers"`
}

// GroupStatus is what one Snapshot shows.
type GroupStatus struct {
	Name            string  `json:"name"` // "" for the ranks without barrier
	Barrier         bool    `json:"barrier"`
	Policy          string  `json:"policy"`
	FallbackRounds  int     `json:"fallback_rounds"` // still decided by the fallback
	KVTokens        int64   `json:"kv_tokens"`
	ImbalanceTokens int64   `json:"imbalance_tokens"` // sum over ranks of the largest load less their own
	IdleShare       float64 `json:"idle_share"`       // of the group's step, for want of balance
}

// WorkerStatus is one decode rank.
type WorkerStatus struct {
	ID           int32  `json:"id"`
	Name         string `json:"name"`
	Group        string `json:"group"`
	Barrier      bool   `json:"barrier"`
	Up           bool   `json:"up"`
	Removed      bool   `json:"removed"` // gone from the fleet, not all its slots released yet
	Slots        int    `json:"slots"`
	Used         int    `json:"used"` // above Slots under an immediate policy
	Running      int    `json:"running"`
	Transferring int    `json:"transferring"` // admitted, no event seen yet
	KVTokens     int64  `json:"kv_tokens"`
	Capacity     int64  `json:"capacity"` // KV tokens, 0 = unlimited
}

func (l *loop) status(now time.Time) Status {
	s := Status{Policy: *l.name.Load(), Models: make([]ModelStatus, 0, len(l.boards))}
	for _, b := range l.boards {
		s.Models = append(s.Models, b.status(now))
		slots, kvTokens := b.ledger.drift()
		s.Drift.Slots += slots
		s.Drift.KVTokens += kvTokens
	}
	slices.SortFunc(s.Models, func(x, y ModelStatus) int { return cmp.Compare(x.Model, y.Model) })
	return s
}

func (b *board) status(now time.Time) ModelStatus {
	m := ModelStatus{
		Model: b.model, Pool: b.pool.Len(), OldestSeconds: b.pool.Oldest(now).Seconds(), Ticks: b.ticks,
		Finished: b.outcomes[Finished], Cancelled: b.outcomes[Cancelled], Failed: b.outcomes[Failed], OutputTokens: b.output,
		Groups: make([]GroupStatus, 0, len(b.groups)), Workers: make([]WorkerStatus, 0, len(b.ranks)),
	}
	for _, r := range b.ranks {
		r.refresh()
		m.Workers = append(m.Workers, r.status())
	}
	slices.SortFunc(m.Workers, func(x, y WorkerStatus) int { return cmp.Compare(x.ID, y.ID) })
	for _, g := range b.groups {
		m.Groups = append(m.Groups, g.status())
	}
	return m
}

func (r *rank) status() WorkerStatus {
	w := WorkerStatus{
		ID: r.ID, Name: r.Name, Group: r.Group, Barrier: r.Barrier, Up: r.Up && r.present, Removed: !r.present,
		Slots: r.Slots, Used: len(r.slots), KVTokens: r.kv, Capacity: r.Capacity,
	}
	for _, s := range r.slots {
		if s.started.Load() {
			w.Running++
		}
	}
	w.Transferring = w.Used - w.Running
	return w
}

// status expects the ranks refreshed.
func (g *group) status() GroupStatus {
	s := GroupStatus{Name: g.name, Barrier: g.barrier, Policy: g.inForce().name, FallbackRounds: g.slow}
	var largest int64
	for _, r := range g.ranks {
		s.KVTokens += r.kv
		largest = max(largest, r.kv)
	}
	if g.barrier && largest > 0 {
		whole := largest * int64(len(g.ranks))
		s.ImbalanceTokens = whole - s.KVTokens
		s.IdleShare = float64(s.ImbalanceTokens) / float64(whole)
	}
	return s
}
