package ledger

import (
	"time"
)

// Sample is the result of one scrape of a candidate.
type Sample struct {
	KVUsage          float64       // share of the KV cache in use, 0 to 1; NaN: not reported
	KVHeld           float64       // share of the capacity in tokens that is in use, 0 to 1; NaN: not reported
	Running, Waiting float64       // requests that run, and that wait, in the engine; NaN: not reported
	RTT              time.Duration // round trip to the engine, 0: not measured
	StartTime        float64       // Unix seconds of the engine's process, 0: not reported
}

// Gauges are the last scraped values of a candidate. The request counts are corrected by the probes that were sent or
// answered since.
type Gauges struct {
	ObservedOthers float64       // requests on the engine at the last scrape that are not probes of this proxy
	FailedInRow    int           // failed scrapes in a row; from staleAfter on, the gauges do not count
	FailedScrapes  uint64        // failed scrapes since the start
	RTT            time.Duration // round trip to the engine, 0: not measured
	SampledAt      time.Time     // when the last good scrape was sent

	gaugeUsage            float64 // share of the KV cache in use, NaN: not known
	gaugeHeld             float64 // share of the capacity in tokens that is in use, NaN: not known
	sampledTokens         float64 // KV tokens of this proxy's prompts that the two include
	observedOthersWaiting float64 // the part of ObservedOthers that certainly waits
	waitingAtScrape       float64 // requests that waited at the last scrape, this proxy's included
	// waitingNow and runningNow are the requests that wait and run in the engine: the counts of the last scrape, corrected by the
	// probes that were sent, or have ended, since then.
	waitingNow     float64
	runningNow     float64
	probesSent     int // since the start
	probesEnded    int // sent probes that have ended since the start, with or without an answer
	startTime      float64
	scrapeSentAt   time.Time     // when the scrape under way was sent; zero: none is under way
	scrapeTook     time.Duration // duration of the last scrape, failed or not
	goodScrapeTook time.Duration // duration of the last good scrape
	idle           idle
}

// idle is the state of an EngineLoad at the last scrape that found no request waiting.
type idle struct {
	ran                     float64 // requests that ran at this scrape
	probesSent, probesEnded int     // the counts of Gauges when this scrape was sent
}

// ScrapeStart is the state of an EngineLoad when a scrape was sent.
type ScrapeStart struct {
	sent                    time.Time
	unansweredProbes        int     // of this proxy
	probesSent, probesEnded int     // the counts of Gauges
	kvTokens                float64 // KV tokens that the engine holds for this proxy
	unansweredTokens        float64 // KV tokens of this proxy's unanswered probes
}
