package engine

import (
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

func gauges(generated, running int) string {
	return fmt.Sprintf("vllm:generation_tokens_total{engine=\"0\"} %d\nvllm:num_requests_running{engine=\"0\"} %d\n",
		generated, running)
}

// scraped is what a scrape shows, and what this proxy knows of its own requests then.
type scraped struct {
	generated, running int  // -1: the page has no such numbers
	ours               load // requests
	slots              int
	frozen             bool
	excess             float64
}

// A row is what happens from scrape to scrape.
func TestWhatScrapesShow(t *testing.T) {
	busy := load{running: 1}
	for name, scrapes := range map[string][]scraped{
		"gauges stand still while streams run": {
			{0, 1, busy, 4, false, 0}, {0, 1, busy, 4, false, 0}, {0, 1, busy, 4, false, 0}, {0, 1, busy, 4, true, 0}, {0, 1, busy, 4, true, 0},
			{9, 1, busy, 4, false, 0}},
		"they stand still while nothing runs": {
			{0, 1, load{}, 4, false, 0}, {0, 1, load{}, 4, false, 0}, {0, 1, load{}, 4, false, 0}, {0, 1, load{}, 4, false, 0}},
		"nothing ran at each second scrape": {
			{0, 1, busy, 4, false, 0}, {0, 1, load{}, 4, false, 0}, {0, 1, busy, 4, false, 0}, {0, 1, load{}, 4, false, 0},
			{0, 1, busy, 4, false, 0}},
		"they move": {
			{0, 1, busy, 4, false, 0}, {1, 1, busy, 4, false, 0}, {2, 1, busy, 4, false, 0}, {3, 1, busy, 4, false, 0}},
		"a vLLM with --disable-log-stats has none": {
			{-1, -1, busy, 4, false, 0}, {-1, -1, busy, 4, false, 0}, {-1, -1, busy, 4, false, 0}, {-1, -1, busy, 4, false, 0}},
		"more requests than slots": {{0, 7, load{}, 4, false, 3}, {0, 4, load{}, 4, false, 0}, {0, 9, load{}, 0, false, 0}},
		"those that were sent without a slot are no alarm": {
			{0, 7, load{withoutSlot: 3}, 4, false, 0}, {0, 8, load{withoutSlot: 3}, 4, false, 1}, {0, 7, load{withoutSlot: 2}, 4, false, 1},
			{0, 6, load{withoutSlot: 2}, 4, false, 0}},
		"nor are those that run on when slots are lowered": {
			{0, 4, load{}, 4, false, 0}, {0, 4, load{}, 1, false, 0}, {0, 1, load{}, 1, false, 0}, {0, 3, load{}, 1, false, 0},
			{0, 1, load{}, 1, false, 0}, {0, 1, load{}, 1, false, 0}, {0, 3, load{}, 1, false, 2}, {0, 3, load{}, 3, false, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene()
			for i, now := range scrapes {
				page := ""
				if now.running >= 0 {
					page = gauges(now.generated, now.running)
				}
				sample, err := MetricNames{}.Parse([]byte(page))
				require.NoError(t, err)
				wasFrozen := s.scrapes.frozen
				s.in.Slots, s.canaryPending = now.slots, false
				s.compare(sample, s.now, now.ours)
				require.Equal(t, now.frozen, s.scrapes.frozen, i)
				require.Equal(t, now.frozen && !wasFrozen, s.canaryPending, "one canary for a suspicion")
				require.Equal(t, now.excess, s.scrapes.excess, i)
			}
		})
	}
}

// What scrapes show reaches the metrics, and asks for a canary.
func TestScrapesAreCompared(t *testing.T) {
	f := decodes()
	f.set("/metrics", ok(gauges(0, 7)))
	doubted(t, f, func(t *testing.T, m *Monitor, reg *prometheus.Registry) {
		show := func() [3]float64 {
			time.Sleep(time.Minute)
			return [3]float64{series(t, reg, "evenkeel_engine_gauges_frozen", "d0"),
				series(t, reg, "evenkeel_engine_over_slots", "d0"), float64(f.count(completionsPath))}
		}
		m.Traffic("d0").Begin()
		m.Traffic("d0").AddSentWithoutSlot(1)
		require.Equal(t, [3]float64{1, 2, 1}, show())
		require.NoError(t, m.Status("d0").Out, "it computes, so it stays")
		f.set("/metrics", ok(gauges(9, 4)))
		m.Traffic("d0").running.Add(-1)
		require.Equal(t, [3]float64{0, 0, 1}, show())
	})
}
