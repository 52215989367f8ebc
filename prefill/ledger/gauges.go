package ledger

import (
	"time"
)

type Sample struct {
	KVUsage          float64       // share of the KV cache in use, 0 to 1; NaN: not reported
	KVHeld           float64       // share of the capacity in tokens that is in use, 0 to 1; NaN: not reported
	Running, Waiting float64       // requests; NaN: not reported
	RTT              time.Duration // 0: not measured
	StartTime        float64       // Unix seconds of the engine's process, 0: not reported
}

// Gauges are the last scraped values of a candidate.
type Gauges struct {
	ObservedOthers float64       // requests at the last scrape that are not probes of this proxy
	FailedInRow    int           // failed scrapes
	FailedScrapes  uint64        // since the start
	RTT            time.Duration // 0: not measured
	SampledAt      time.Time     // when the last good scrape was sent

	gaugeUsage            float64 // like Sample.KVUsage
	gaugeHeld             float64 // like Sample.KVHeld
	sampledTokens         float64 // KV tokens of this proxy's prompts that the two include
	observedOthersWaiting float64 // the part that certainly waits
	waitingAtScrape       float64 // requests, this proxy's included
	// These are the counts of the last scrape, corrected by the probes that were sent or have ended
	// since.
	waitingNow     float64
	runningNow     float64
	probesSent     int // since the start
	probesEnded    int // since the start, with or without an answer
	startTime      float64
	scrapeSentAt   time.Time     // zero: none is under way
	scrapeTook     time.Duration // failed or not
	goodScrapeTook time.Duration // the last good one
	idle           idle
}

// idle is the state at the last scrape that found no request waiting.
type idle struct {
	ran                     float64 // requests
	probesSent, probesEnded int     // when this scrape was sent
}

// ScrapeStart is the state of an EngineLoad when a scrape was sent.
type ScrapeStart struct {
	sent                    time.Time
	unansweredProbes        int // of this proxy
	probesSent, probesEnded int
	kvTokens                float64 // that the engine holds for this proxy
	unansweredTokens        float64 // of this proxy's unanswered probes
}
