package gateway

import "evenkeel/engine/discover"

// DiscoverWith has sources of a test tell the fleet. Call it before Start.
func (g *Gateway) DiscoverWith(sources ...discover.Source) {
	g.discovery = &discovery{Discoverer: g.newDiscoverer(sources...)}
}
