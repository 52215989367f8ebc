package ledger

import (
	"time"
)

// Sample is what one scrape says about a candidate.
type Sample struct {
	KVUsage          float64       // 0..1, NaN: not reported
	Running, Waiting float64       // requests, NaN: not reported
	CapacityTokens   int64         // KV tokens the candidate can hold, 0: not reported
	BlockTokens      int           // of a KV block, 0: not reported
	RTT              time.Duration // to the engine, 0: not measured
	StartTime        float64       // Unix seconds of the engine's process, 0: not reported
}

// Gauges are what scrapes said of a candidate, and what came of it since.
type Gauges struct {
	Foreign float64       // requests there that are not ours
	Misses  int           // failed scrapes in a row
	Missed  uint64        // failed scrapes, ever
	Block   int           // tokens of a KV block, 0: not told
	RTT     time.Duration // 0: not measured
	Sampled time.Time     // when the last good scrape was sent

	usage         float64 // of the KV cache, NaN: none
	sampledTokens float64 // of ours that it counts
	scraped       int64   // capacity in KV tokens
	foreignQueue  float64 // of Foreign, those that certainly wait
	waits         float64 // at the last scrape, ours too
	engineWaits   float64 // requests the engine holds back and runs, ours that
	engineRuns    float64 // came and went since the scrape included
	sends         int     // of ours, ever
	answers       int
	startTime     float64
	asked         time.Time     // when the scrape under way was sent; zero: none is
	took          time.Duration // by the last scrape, failed or not
	tookGood      time.Duration // by the last good one
	idle          idle
}

// idle is where an account stood when a scrape found nobody waiting.
type idle struct {
	ran            float64
	sends, answers int
}

// Mark is where an account stood when a scrape was sent.
type Mark struct {
	sent           time.Time
	unanswered     int
	sends, answers int
	tokens         float64 // of ours
	probing        float64 // of those, of probes that were not answered
}
