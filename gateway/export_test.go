package gateway

import (
	"evenkeel/engine/discover"
	"evenkeel/gateway/discovery"
)

// DiscoverWith has sources of a test tell the fleet. Call it before Start.
func (g *Gateway) DiscoverWith(sources ...discover.Source) {
	g.discovery = discovery.New(g.discoveryHost(), sources...)
}

// ReadClocks fills in how long ranks wait for each other.
var ReadClocks = readClocks
