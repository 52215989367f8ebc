// Package prefill chooses the prefill engine for a request's prompt, and the time at which the
// prompt is sent to it.
//
// A request waits in its model's arrival queue until the pool has a place for its hand-off and the
// KV gate of a candidate is open. The gate closes while the candidate's KV cache is too full. A
// policy then scores all candidates by their load, by the part of the prompt that they have cached,
// and by their prefill times. If the best candidate can start the prompt, the prompt is charged to
// it, in the same step under one lock; otherwise the request waits for this candidate.
//
// The caller gets a Lease, which holds the charge. The charge begins before the probe, the call
// that makes the engine compute the prompt. It ends when the engine has freed the prompt's KV
// blocks: after the first decode event, when the hand-off is discarded, or at the engine's own
// timeout.
//
// The state consists of five values, each from a package without clock, lock, log or metric: queue
// (waiting requests), ledger (charges), cache (predicted prefix caches), fit (prefill times) and
// steer (policies). Scheduler holds them under its lock and passes them the time; chooser decides
// about one request, and queueManager about all waiting requests.
//
// The package does not poll. A waiting request is considered again after an event that may help it:
// a lease ends, a place becomes free (Wake), a scrape succeeds, the candidates change, or the
// single timer fires at the next time at which a request may be answered without any event
// (queueManager.nextWake). With Config.Clock and Offer, the scheduler runs on a simulation's time
// and without a goroutine.
package prefill
