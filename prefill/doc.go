// Package prefill chooses the prefill engine for a request's prompt, and the time at which the prompt is sent to it.
//
// A request waits in its model's arrival queue until the pool has a place for its hand-off and the KV gate of a candidate is
// open. A policy then scores all candidates by their load, by the part of the prompt that they have cached, and by their
// prefill times. If the best candidate can start the prompt, the prompt is charged to it, in the same step under one
// lock; otherwise the request waits for this candidate. The caller gets a Lease, which holds the charge: it follows the
// prompt's KV blocks from the probe to the first decode event, the discarding of the hand-off, or the engine's own
// timeout, and releases the charge exactly once.
//
// The state consists of five values, each from a package without clock, lock, log or metric: queue (waiting requests),
// ledger (charges), cache (predicted prefix caches), fit (prefill times) and steer (policies). Tier holds them under its
// lock and passes them the time; chooser and arrivals make the decisions.
//
// The package does not poll. A waiting request is considered again after an event that may help it: a lease ends, a place
// becomes free (Wake), a scrape succeeds, the candidates change, or the single timer fires, which is set for the next
// deadline, hold timeout, canary, circuit trial or stall. With Config.Clock and Offer, the tier runs on a simulation's
// time and without a goroutine.
package prefill
