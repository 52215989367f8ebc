package step

// prefills is least squares of how long steps with a prefill take without the decodes of their slowest rank, the past
// fading: on the tokens of prompts that this rank computed, and on those that a rank computed in the mean. The time of a
// step in which nobody computes anything is part of it, so that it says something also where all steps have a prefill.
type prefills struct {
	ratio median[float64] // how long they took beside what was expected
	n     uint64          // steps taken in

	w, p, q, y             float64
	pp, pq, qq, py, qy, yy float64
}

// UsualOwnShare is the rank's own part of what a token of a prompt costs, until rounds were so uneven that the steps tell: the middle
// of the laws of bench/lab/laws, with experts as fast as they were in published runs.
const UsualOwnShare = 0.25

// UsualOwnMs is what such a part takes, about the middle of these laws, until something is known of it: without it nothing would be held,
// and a group whose prompts came faster than it computes them one by one would not get over that before it has learned.
const UsualOwnMs = 0.02

const (
	fitPrefills = 100  // steps with a prefill that must be known at least
	toldWell    = 0.05 // standard error of the rank's own part of what a prompt costs, at most
	// What is expected before anything is known, for the rule for outliers alone.
	guessC0Ms, guessMs = 20, 0.1
)

// add takes in a step. The law is that of steps without a prefill, as far as it is known.
func (f *prefills) add(m Model, share float64, ranks []Rank, ms float64) {
	if !f.fit(&m, share) && m.OwnMs+m.SharedMs == 0 {
		m.C0Ms, m.OwnMs, m.SharedMs = max(m.C0Ms, guessC0Ms), share*guessMs, (1-share)*guessMs
	}
	ratio := ms / m.Ms(ranks)
	f.ratio.add(ratio)
	if ratio < tooShort*f.ratio.of || ratio > tooLong*f.ratio.of {
		return
	}
	r := &ranks[m.slowest(ranks)]
	p, q, y := r.Prompt, meanPrompt(ranks), ms-m.RequestMs*r.Requests-m.C1Ms*r.KV
	f.n++
	f.w = f.w*fade + 1
	f.p, f.q, f.y = f.p*fade+p, f.q*fade+q, f.y*fade+y
	f.pp, f.pq, f.qq = f.pp*fade+p*p, f.pq*fade+p*q, f.qq*fade+q*q
	f.py, f.qy, f.yy = f.py*fade+p*y, f.qy*fade+q*y, f.yy*fade+y*y
}

// fit writes what a prefill costs into the law, where that is known.
func (f *prefills) fit(m *Model, share float64) bool {
	if f.n < fitPrefills {
		return false
	}
	p, q, y := f.p/f.w, f.q/f.w, f.y/f.w
	pp, pq, qq, py, qy, yy := f.pp/f.w-p*p, f.pq/f.w-p*q, f.qq/f.w-q*q, f.py/f.w-p*y, f.qy/f.w-q*y, f.yy/f.w-y*y
	if det := pp*qq - pq*pq; det > 1e-9*pp*qq {
		own, shared := (qq*py-pq*qy)/det, (pp*qy-pq*py)/det
		off := max(0, yy-own*py-shared*qy) / (f.w * det)
		if well := toldWell * (own + shared); well > 0 && max(pp, qq)*off <= well*well {
			share = min(1, max(0, own/(own+shared)))
		}
	}
	x := share*p + (1-share)*q
	xx, xy := share*share*pp+2*share*(1-share)*pq+(1-share)*(1-share)*qq, share*py+(1-share)*qy
	if f.sure(xx, xy, yy) {
		if more := y - xy/xx*x - m.C0Ms; more >= 0 {
			m.OwnMs, m.SharedMs, m.PrefillMs = share*xy/xx, (1-share)*xy/xx, more
			return true
		}
	}
	// The steps had as much to compute as each other, or a step with any prefill takes no more for that.
	y -= m.C0Ms
	xx, xy, yy = xx+x*x, xy+x*y, yy+y*y
	if m.C0Ms == 0 || !f.sure(xx, xy, yy) {
		return false
	}
	m.OwnMs, m.SharedMs, m.PrefillMs = share*xy/xx, (1-share)*xy/xx, 0
	return true
}

// sure says whether the slope of a line is surely above 0.
func (f *prefills) sure(xx, xy, yy float64) bool {
	return xy > 0 && xy*xy*f.w > sureSlope*sureSlope*(xx*yy-xy*xy)
}
