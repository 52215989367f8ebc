package policy

// bestFit is the worked example of CONTRIBUTING.md: a policy of its own, small and whole. It
// gives each entry, oldest first, to the fullest rank that stays below the fullest of the
// group with it, and where there is none to the rank with the fewest KV tokens.
type bestFit struct {
	name      string
	maxAgeMs  float32
	watermark float64

	ranks ranks    // free slots and KV room of the ranks in this round
	env   envelope // KV tokens that they hold
}

// bestFitForm is the line that spec.go gets: the name, the keys that a user may set, their
// defaults.
var bestFitForm = namedPolicy{
	name: "bestfit", keys: keysNamed("max_age_ms", "watermark"), defaults: commonDefaults,
	build: func(name string, v *settings) Policy {
		return &bestFit{name: name, maxAgeMs: float32(v.maxAgeMs), watermark: v.watermark}
	},
}

func (p *bestFit) Name() string      { return p.name }
func (p *bestFit) Immediate() bool   { return false }
func (p *bestFit) MaxAgeMs() float32 { return p.maxAgeMs }
func (p *bestFit) limits() limits {
	return limits{watermark: p.watermark, reserved: p.ranks.reserved, reservedFor: p.ranks.reservedFor}
}

// Decide appends the round's admissions to dst.
func (p *bestFit) Decide(s *Snapshot, dst []Assignment) []Assignment {
	p.env.build(s, 0)
	p.ranks.load(s, p.env.heldTokens, p.watermark, 0)
	for i := range s.Pool {
		e := &s.Pool[i]
		g := p.choose(int64(e.Prompt))
		if g == none {
			if isOverdue(s, e) { // keep a rank for it, or small requests would fill every gap for ever
				p.ranks.reserveOnce(s, i)
			}
			continue
		}
		p.ranks.charge(g, int64(e.Prompt))
		p.env.heldTokens[g] += int64(e.Prompt)
		dst = append(dst, Assignment{Entry: e.ID, Worker: s.Workers[g].ID, Score: float64(p.env.heldTokens[g]), Stage: stageSingle})
	}
	return dst
}

// choose returns the index of the rank for so many tokens, or none.
func (p *bestFit) choose(tokens int64) int {
	below, least, top := none, none, int64(0)
	for _, held := range p.env.heldTokens {
		top = max(top, held)
	}
	for g, held := range p.env.heldTokens {
		if !p.ranks.fits(g, tokens) {
			continue
		}
		if held+tokens <= top && (below == none || held > p.env.heldTokens[below]) {
			below = g
		}
		if least == none || held < p.env.heldTokens[least] {
			least = g
		}
	}
	if below != none {
		return below
	}
	return least
}
