package gateway

import "evenkeel/engine/discover"

// DiscoverWith has sources of a test tell the fleet. Call it before Start.
func (g *Gateway) DiscoverWith(sources ...discover.Source) {
	if err := g.discover(sources...); err != nil {
		panic(err)
	}
}

// FillInSyncWaits fills in how long ranks wait for each other.
var FillInSyncWaits = fillInSyncWaits
