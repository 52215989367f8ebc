package engine

import "time"

// rttWeight is what one health check counts for: GORGO's.
const rttWeight = 0.3

// learnRTT takes how long a good health check took. A fresh one, and the first after a while, opens
// a connection, which takes longer than any request will.
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

// RTT is how long an instance takes to answer what costs it nothing, over a
// connection that was open before; 0 while it is not known.
func (m *Monitor) RTT(id string) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.watches[id]; w != nil {
		return w.rtt
	}
	return 0
}
