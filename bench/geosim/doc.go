// Package geosim simulates regions whose dispatchers forward to each other, on the
// same policies, prefix index and calibration that serve.
//
// Clients run programs, conversations or trees of thoughts, and send a request
// when the one before it is answered. Each region's dispatcher knows its own
// replicas at once and its peers from probes, as old as they are in production.
// A replica is an engine with continuous batching whose batch is bounded by KV
// tokens, with a cache of prefixes in what the batch leaves.
//
// Time is float64 milliseconds. A run is a function of scenario, arm and seed;
// clients draw the same programs under every arm.
package geosim
