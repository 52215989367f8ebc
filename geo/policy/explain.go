package policy

import (
	"cmp"
	"slices"
)

// Row is one place in the table that explains a decision.
type Row struct {
	Place  string  `json:"place"`
	Peer   bool    `json:"peer,omitempty"`
	Terms  Terms   `json:"terms"`
	CostMs float64 `json:"cost_ms"`
	Hit    int     `json:"hit_tokens"`
	Why    string  `json:"why"` // available, or why not
	Chosen bool    `json:"chosen,omitempty"`
}

// Explain is the table behind the decision that Next would make now, the chosen
// place first and then by cost, at most so many rows. It charges nothing, but
// it allocates: it is for receipts and for people.
func (p *Policy) Explain(r *Request, rows int) []Row {
	turn, blocked := p.turn, p.blocked
	d := p.decide(r)
	p.turn, p.blocked = turn, blocked
	table := make([]Row, 0, len(p.places))
	for i := range p.places {
		x, t := &p.places[i], p.terms(r, i)
		why := x.Why
		switch {
		case x.Peer && (r.Stay || r.barred(i)):
			why = Barred
		case why == Available && p.charges[i].left <= 0:
			why = Full
		}
		table = append(table, Row{
			Place: x.ID, Peer: x.Peer, Terms: t, CostMs: t.Total(), Hit: int(r.hit(i)), Why: why.String(), Chosen: i == d.Place,
		})
	}
	slices.SortStableFunc(table, func(a, b Row) int {
		if a.Chosen != b.Chosen {
			if a.Chosen {
				return -1
			}
			return 1
		}
		return cmp.Compare(a.CostMs, b.CostMs)
	})
	return table[:min(rows, len(table))]
}
