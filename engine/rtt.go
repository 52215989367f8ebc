package engine

import "time"

// rttWeight is the weight of one health check in the moving mean. The value is that of GORGO, a published router.
const rttWeight = 0.3

// learnRTT adds the duration of a successful health check to the mean. It ignores a check that had to open a connection, which takes
// longer: a check that is fresh, and a check after a pause in which idle connections expired.
func (w *watch) learnRTT(took time.Duration, now time.Time, fresh bool) {
	reused := !fresh && now.Sub(w.lastGoodCheck) < w.m.cfg.Client.opts.IdleTimeout
	if !reused {
		return
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.rtt == 0 { // the first measurement
		w.rtt = took
		return
	}
	w.rtt += time.Duration(rttWeight * float64(took-w.rtt)) // (1 - rttWeight) * old mean + rttWeight * took
}

// RTT returns the mean time in which an instance answers a health check over an open connection; 0: not known.
func (m *Monitor) RTT(id string) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil {
		return w.rtt
	}
	return 0
}
