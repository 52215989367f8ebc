// Package prefill chooses which prefiller runs a request's prompt, and when.
//
// A request waits in its model's arrival queue until the pool has a place for
// its hand-off and the KV gate of a candidate is open. A policy then scores all
// candidates by what is known of them: what they have to do, what they hold of
// the prompt, how long prefills take there. If the best can start it, the prompt
// is charged there, in one step under one lock; else it waits for that one. The
// Lease that comes back is that charge: it follows the prompt's KV blocks from
// the probe to the first decode event, the drain, or the engine's own timeout,
// and gives them back exactly once.
//
// What is known are five values, each a package without clock, lock, log or metric:
// queue (who waits), ledger (what engines are charged with), cache (what they hold),
// fit (how long prefills take) and steer (which one of them). Tier holds them under
// its lock and gives them the time; chooser and arrivals decide on top of them.
//
// Nothing here polls. A request that waits is woken by what can let it pass: a
// lease that ends, a place that gets free (Wake), a scrape, another set of
// candidates, or the one timer armed for the next hold timeout, canary,
// circuit or stall. With Config.Clock and Offer the tier runs on a simulation's
// time, without a goroutine.
package prefill
