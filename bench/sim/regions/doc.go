// Package regions simulates regions whose dispatchers forward to each other: the
// server's own geo.Peers and prefill.Scheduler, each region's in virtual time, in front of
// simulated replicas. It decides nothing itself: a test holds that it builds no view
// of a peer or of an engine and asks no policy.
//
// Clients run programs, conversations or trees of thoughts, and send a request
// when the one before it is answered. A dispatcher knows of its peers what their
// answers to its probes say, and of its replicas what its own leases and scrapes do.
// A replica is an engine with continuous batching whose batch is bounded by KV
// tokens, with a cache of prefixes in what the batch leaves.
//
// Time is float64 milliseconds. A run is a function of scenario, arm and seed;
// clients draw the same programs under every arm.
package regions
