package engine

import "time"

// rttWeight is the weight of one health check in the mean: GORGO's value.
const rttWeight = 0.3

// learnRTT learns from how long a good health check took. A check over a fresh connection, and the first one after a
// while, are left out: they open a connection, which takes longer than any request will.
func (w *watch) learnRTT(took time.Duration, now time.Time, fresh bool) {
	kept := !fresh && now.Sub(w.answered) < w.m.cfg.Client.opts.IdleTimeout
	w.answered = now
	if !kept {
		return
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.rtt == 0 {
		w.rtt = took
		return
	}
	w.rtt += time.Duration(rttWeight * float64(took-w.rtt))
}

// RTT is how long an instance takes to answer a request that costs it nothing, over an open connection; 0: not known.
func (m *Monitor) RTT(id string) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil {
		return w.rtt
	}
	return 0
}
