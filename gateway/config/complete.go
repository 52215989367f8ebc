package config

import (
	"cmp"
	"os"
	"slices"

	"evenkeel/mooncake"
)

// Validate fills derived values and refuses what cannot work, all problems at
// once.
func (c *Config) Validate() error {
	c.finish()
	var found problems
	bad := func(path, format string, args ...any) {
		found = append(found, c.source.at(path, format, args...))
	}
	c.checkListeners(bad)
	c.checkTLS(bad)
	c.checkWorkerHosts(bad)
	c.checkProfiles(bad)
	c.checkEngines(bad)
	c.checkPool(bad)
	c.checkBind(bad)
	c.Prefill.Check(func(key, format string, args ...any) { bad("$.prefill."+key, format, args...) })
	decision := c.Decision()
	decision.Check(func(key, format string, args ...any) { bad("$."+key, format, args...) })
	c.checkDisaggregation(bad)
	c.checkTimes(bad)
	c.checkNumbers(bad)
	c.checkGeo(bad)
	found = append(found, c.moved()...)
	c.checkDiscovery(bad)
	c.checkAdvice(bad)
	c.checkTracing(bad)
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, c.Log.Level) {
		bad("$.log.level", "%q is not a level; write debug, info, warn or error", c.Log.Level)
	}
	return found.join()
}

// finish fills what depends on other keys. Validate calls it first.
func (c *Config) finish() {
	if c.Profiles == nil {
		c.Profiles = map[string]mooncake.Profile{}
	}
	if _, ok := c.Profiles[DefaultProfile]; !ok {
		c.Profiles[DefaultProfile] = mooncake.Profile{}
	}
	for name, p := range c.Profiles {
		p.Name = name
		c.Profiles[name] = p.WithDefaults()
	}
	c.Engines.Decode = slices.Clone(c.Engines.Decode) // `decode: *prefill` gives both sides one array
	for _, side := range [][]Engine{c.Engines.Prefill, c.Engines.Decode} {
		for i := range side {
			side[i].Profile = cmp.Or(side[i].Profile, DefaultProfile)
		}
	}
	if c.Prefill.Policy == "" {
		c.Prefill.Policy = "finish"
		switch {
		case c.aggregated() && c.Geo.On(): // finish was not measured with other regions
			c.Prefill.Policy = "lmetric"
		case c.Geo.Leads(): // it looks at round trips
			c.Prefill.Policy = "gorgo"
		}
	}
	if c.HA.On() && c.Geo.Self.ID == "" { // pods of one file differ in nothing else
		c.Geo.Self.ID, _ = os.Hostname() // none is found to be no name
	}
	for i := range c.Engines.Decode {
		c.finishDecode(&c.Engines.Decode[i])
	}
	c.Discovery.finish()
}

// aggregated says whether some engine both prefills and decodes.
func (c *Config) aggregated() bool {
	return slices.ContainsFunc(c.Engines.Prefill, func(p Engine) bool {
		return slices.ContainsFunc(c.Engines.Decode, func(d Engine) bool { return idOf(p) == idOf(d) })
	})
}

// Complete fills in and checks an engine that is added while the proxy runs, as
// if it had stood in the file. What it leaves out of a decode engine is taken
// from the first one of the file: ranks added later usually join its group.
func (c *Config) Complete(role string, e Engine) (Engine, error) {
	one := &Config{Profiles: c.Profiles, source: source{file: e.URL}}
	like := c.Engines.Prefill
	if role == "decode" {
		like = c.Engines.Decode
	}
	if len(like) > 0 {
		e.Profile = cmp.Or(e.Profile, like[0].Profile)
	}
	e.Profile = cmp.Or(e.Profile, DefaultProfile)
	if role == "decode" {
		if len(like) > 0 && e.Group == "" {
			e.Group, e.Barrier = like[0].Group, cmp.Or(e.Barrier, like[0].Barrier)
		}
		if len(like) > 0 {
			e.Slots = cmp.Or(e.Slots, like[0].Slots)
		}
		c.finishDecode(&e)
		for _, other := range like { // a group steps together or not at all
			if other.Group == e.Group && other.Barrier != e.Barrier {
				return e, one.source.at("$.barrier", "group %q has barrier %s, this engine %s; use another group or the same barrier", e.Group, other.Barrier, e.Barrier)
			}
		}
	}
	if err := c.allowWorker(e.URL); err != nil {
		return e, one.source.at("$.url", "%v", err)
	}
	return e, c.checkOne(role, e)
}

// CompleteFound fills in and checks an engine that discovery found. It takes
// nothing from the engines of the file.
func (c *Config) CompleteFound(role string, e Engine) (Engine, error) {
	e.Profile = cmp.Or(e.Profile, DefaultProfile)
	if role == "decode" {
		c.finishDecode(&e)
	}
	return e, c.checkOne(role, e)
}

func (c *Config) checkOne(role string, e Engine) error {
	one := &Config{Profiles: c.Profiles, source: source{file: e.URL}}
	var found problems
	bad := func(path, format string, args ...any) {
		found = append(found, one.source.at(path, format, args...))
	}
	one.checkEngine("$", role, &e, bad)
	c.checkCaller(role, &e, bad)
	return found.join()
}
