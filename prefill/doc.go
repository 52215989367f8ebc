// Package prefill chooses which prefiller runs a request's prompt, and when.
//
// A request waits in its model's arrival queue until the pool has a place for
// its hand-off and the KV gate of a candidate is open; then a policy picks the
// candidate and the prompt is charged to it, in one step under one lock. The
// Lease that comes back is that charge: it follows the prompt's KV blocks from
// the probe to the first decode event, the drain, or the engine's own timeout,
// and gives them back exactly once (prefill P6, P13).
//
// Nothing here polls. A request that waits is woken by what can let it pass: a
// lease that ends, a place that gets free (Wake), a scrape, another set of
// candidates, or the one timer armed for the next hold timeout, canary or
// circuit.
package prefill
