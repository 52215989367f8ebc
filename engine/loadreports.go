package engine

import (
	"context"
	"encoding/json"
	"time"
)

// silentChecks is the number of check intervals after which an SGLang rank counts as silent: its scheduler reported no load in this time,
// but those of other ranks did. A working scheduler reports its load after each batch, and regularly while it has none.
const silentChecks = 5

// loadReports records when each rank of an SGLang server last reported its load.
type loadReports struct {
	stamps    map[int]float64   // the last time stamp of each rank, by SGLang's clock
	changedAt map[int]time.Time // when evenkeel first saw this time stamp, by its own clock
}

// record stores an answer of GET /v1/loads, which has the time stamp of each rank's last report. It returns the silent ranks: those whose
// time stamp last changed at least maxLag before the newest change of any rank. It compares the times at which evenkeel saw the changes,
// because the time stamps are by SGLang's clock.
func (l *loadReports) record(reported map[int]float64, maxLag time.Duration, now time.Time) map[int]bool {
	if l.stamps == nil {
		l.stamps, l.changedAt = map[int]float64{}, map[int]time.Time{}
	}
	var newest time.Time
	for r, stamp := range reported {
		if old, known := l.stamps[r]; !known || old != stamp {
			l.stamps[r], l.changedAt[r] = stamp, now
		}
		if l.changedAt[r].After(newest) {
			newest = l.changedAt[r]
		}
	}
	silent := map[int]bool{}
	for r := range reported {
		if newest.Sub(l.changedAt[r]) >= maxLag {
			silent[r] = true
		}
	}
	return silent
}

// updateSilentRanks asks an SGLang server when its ranks last reported their load, and stores which of them are silent. Without an answer
// the stored ranks stay.
func updateSilentRanks(ctx context.Context, w *watch) {
	reported, err := w.readLoads(ctx)
	if err != nil {
		return
	}
	silent := w.restrictions.loadReports.record(reported, silentChecks*w.m.cfg.HealthInterval, time.Now())
	w.m.mu.Lock()
	w.restrictions.silentRanks = silent
	w.m.mu.Unlock()
}

// readLoads asks an SGLang server when each rank's scheduler last reported its load. The result has, by rank, time stamps of the server's
// clock. The server answers without asking the schedulers (entrypoints/v1_loads.py of 0.5.23). GET /server_info would ask them, and so
// wait for lost ranks.
func (w *watch) readLoads(ctx context.Context) (stamps map[int]float64, err error) {
	body, err := w.get(ctx, "/v1/loads?include=core", w.m.cfg.Timeout, perRankLimit)
	if err != nil {
		return nil, err
	}
	var answer struct {
		Loads []struct {
			Rank int     `json:"dp_rank"`
			At   float64 `json:"timestamp"`
		} `json:"loads"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return nil, err
	}
	stamps = make(map[int]float64, len(answer.Loads))
	for _, l := range answer.Loads {
		if l.Rank >= 0 && l.Rank < w.in.Ranks {
			stamps[l.Rank] = l.At
		}
	}
	return stamps, nil
}
