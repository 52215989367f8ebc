package config

import (
	"net"
	"slices"
)

// checkGeo checks the keys of geo and ha, and that the region of each engine has a proxy.
func (c *Config) checkGeo(bad report) {
	g := &c.Geo
	g.Check(func(key, format string, args ...any) { bad("$.geo."+key, format, args...) })
	c.HA.Check(g, func(key, format string, args ...any) { bad("$.ha."+key, format, args...) })
	_, port, _ := net.SplitHostPort(g.Listen)
	switch problem := listenProblem(g.Listen); {
	case !g.On(): // then nothing listens there
	case problem != "":
		bad("$.geo.listen", "%q %s; write host:port, such as \":9443\"", g.Listen, problem)
	case port != "0" && (g.Listen == c.Listen || g.Listen == c.Admin.Listen): // with port 0, each listener gets a port of its own
		bad("$.geo.listen", "proxies need an address of their own to call each other; %q is that of clients or operators", g.Listen)
	}
	regions := []string{g.Self.Region}
	for _, p := range g.Peers {
		regions = append(regions, p.Region)
	}
	for side, e := range c.Engines.All() {
		switch {
		case e.Region == "": // the engine is of this proxy's own region
		case !g.Ownership.On() && !g.Leads():
			bad("$.engines."+side,
				"%s is in region %s; engines of other regions need geo.ownership.engine, or geo.mode central with geo.central this one", e.URL,
				e.Region)
		case !slices.Contains(regions, e.Region):
			bad("$.engines."+side, "%s: no proxy is in region %q; see geo.self and geo.peers", e.URL, e.Region)
		}
	}
}

// checkUnlistedRegion checks the region of an engine that discovery finds or an operator adds;
// checkGeo checks the engines of the file. While decode groups have owners (ha), no other region
// has any, so a request to an engine there would never get a rank.
func (c *Config) checkUnlistedRegion(path, region string, bad report) {
	if c.HA.On() && region != "" && region != c.Geo.Self.Region {
		bad(path+".region", "%s is another region than geo.self.region; with ha.mode %s, "+
			"a proxy uses only engines of its own region", region, c.HA.Mode)
	}
}
