package ledger

import (
	"time"
)

// Sample is the result of one scrape of a candidate.
type Sample struct {
	KVUsage          float64       // 0..1, NaN: not reported
	Running, Waiting float64       // requests, NaN: not reported
	CapacityTokens   int64         // KV tokens the candidate can hold, 0: not reported
	BlockTokens      int           // tokens of a KV block, 0: not reported
	RTT              time.Duration // round trip to the engine, 0: not measured
	StartTime        float64       // Unix seconds of the engine's process, 0: not reported
}

// Gauges are the last scraped values of a candidate. The request counts are corrected by the probes that were sent or
// answered since.
type Gauges struct {
	ObservedOthers float64       // requests on the engine that are not probes of this proxy, by the last scrape
	FailedInRow    int           // failed scrapes in a row
	FailedScrapes  uint64        // failed scrapes, ever
	BlockTokens    int           // tokens of a KV block, 0: not known
	RTT            time.Duration // round trip to the engine, 0: not measured
	SampledAt      time.Time     // when the last good scrape was sent

	gaugeUsage            float64 // share of the KV cache in use, NaN: not known
	sampledTokens         float64 // KV tokens of this proxy's prompts that usage includes
	scrapedCapacity       int64   // capacity in KV tokens
	observedOthersWaiting float64 // the part of ObservedOthers that certainly waits
	waitingAtScrape       float64 // requests that waited at the last scrape, this proxy's included
	waitingNow            float64 // requests that wait in the engine: the last scrape, corrected by probes sent and answered since
	runningNow            float64 // requests that run in the engine, corrected likewise
	sends                 int     // probes sent, since the start
	answers               int     // probes answered, since the start
	startTime             float64
	scrapeSentAt          time.Time     // when the scrape under way was sent; zero: none is under way
	scrapeTook            time.Duration // duration of the last scrape, failed or not
	goodScrapeTook        time.Duration // duration of the last good scrape
	idle                  idle
}

// idle is the state of an EngineLoad at the last scrape that found no request waiting.
type idle struct {
	ran            float64 // requests that ran
	sends, answers int
}

// ScrapeStart is the state of an EngineLoad when a scrape was sent.
type ScrapeStart struct {
	sent           time.Time
	unanswered     int
	sends, answers int
	tokens         float64 // KV tokens that the engine holds for this proxy
	probing        float64 // the part of tokens that belongs to unanswered probes
}
