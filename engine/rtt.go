package engine

import "time"

// rttWeight is the weight of one health check in the moving mean. The value is that of GORGO, a published router.
const rttWeight = 0.3

// answerCheck records that the engine has answered its health check well, at the time now.
// withoutComputing says that it computed nothing for the answer (see alive). Only then, and over a
// connection that was open already, the check took a round trip: it was not fresh, and did not come
// after a pause in which idle connections expire.
func (c *check) answerCheck(withoutComputing bool, idle time.Duration, now time.Time) {
	f := &c.facts
	took, reused := now.Sub(c.began), !c.fresh && now.Sub(f.goodAt) < idle
	switch {
	case !withoutComputing || !reused:
	case f.rtt == 0: // the first measurement
		f.rtt = took
	default:
		f.rtt += time.Duration(rttWeight * float64(took-f.rtt)) // (1 - rttWeight) * old mean + rttWeight * took
	}
	f.goodAt = now
	f.unproven = f.unproven && !c.fresh
}

// RTT returns the mean time in which an instance answers a health check over an open connection; 0: not known.
func (m *Monitor) RTT(id string) time.Duration { return m.health(id).facts.rtt }
