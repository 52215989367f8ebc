package ledger

import (
	"time"
)

// Sample is what one scrape says about a candidate.
type Sample struct {
	KVUsage          float64       // 0..1, NaN: not reported
	Running, Waiting float64       // requests, NaN: not reported
	CapacityTokens   int64         // KV tokens the candidate can hold, 0: not reported
	BlockTokens      int           // tokens of a KV block, 0: not reported
	RTT              time.Duration // round trip to the engine, 0: not measured
	StartTime        float64       // Unix seconds of the engine's process, 0: not reported
}

// Gauges are what scrapes said of a candidate, corrected by what was sent and answered since.
type Gauges struct {
	Foreign float64       // requests there that are not ours
	Misses  int           // failed scrapes in a row
	Missed  uint64        // failed scrapes, ever
	Block   int           // tokens of a KV block, 0: not known
	RTT     time.Duration // round trip to the engine, 0: not measured
	Sampled time.Time     // when the last good scrape was sent

	usage           float64 // share of the KV cache in use, NaN: not known
	sampledTokens   float64 // of usage, the tokens that are ours
	scraped         int64   // capacity in KV tokens
	foreignQueue    float64 // of Foreign, the requests that certainly wait
	waitingAtScrape float64 // requests that waited at the last scrape, ours included
	engineWaits     float64 // requests that wait in the engine: those of the last scrape, with ours that came and went since
	engineRuns      float64 // requests that run there, counted likewise
	sends           int     // of our probes, since the start
	answers         int
	startTime       float64
	asked           time.Time     // when the scrape under way was sent; zero: none is
	scrapeTook      time.Duration // by the last scrape, failed or not
	goodScrapeTook  time.Duration // by the last good one
	idle            idle
}

// idle is the state of an account when a scrape found no request waiting.
type idle struct {
	ran            float64
	sends, answers int
}

// Mark is the state of an account when a scrape was sent.
type Mark struct {
	sent           time.Time
	unanswered     int
	sends, answers int
	tokens         float64 // KV tokens that the engine holds for us
	probing        float64 // of these, tokens of probes that were not answered
}
