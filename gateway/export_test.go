package gateway

import (
	"evenkeel/engine/discover"
	"evenkeel/gateway/fleet"
)

// DiscoverWith has sources of a test tell the fleet. Call it before Start.
func (g *Gateway) DiscoverWith(sources ...discover.Source) {
	g.discovery = fleet.NewDiscovery(g.fleet, sources...)
}

// ReadClocks fills in how long ranks wait for each other.
var ReadClocks = readClocks
