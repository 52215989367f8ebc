package config

import (
	"cmp"
	"os"
	"slices"

	"evenkeel/gateway/keys"
	"evenkeel/mooncake"
)

// Validate sets the defaults that depend on other keys, and checks the config. Each check reports
// its problems to bad, and goes on. The error contains all problems, not only the first.
func (c *Config) Validate() error {
	c.fillDefaults()
	var found problems
	bad := func(path, format string, args ...any) {
		found = append(found, c.source.errorAt(path, format, args...))
	}
	c.checkListeners(bad)
	c.checkOrigins(bad)
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
	c.checkDiscovery(bad)
	c.checkAdvice(bad)
	for name, n := range c.GatewayAPI.Objectives {
		if n < -keys.MaxPriority || n > keys.MaxPriority {
			bad("$.gateway_api.objectives."+name, "%d; write a priority from %d to %d, higher first", n, -keys.MaxPriority, keys.MaxPriority)
		}
	}
	c.checkTracing(bad)
	c.checkFleetCall(bad)
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, c.Log.Level) {
		bad("$.log.level", "%q is not a level; write debug, info, warn or error", c.Log.Level)
	}
	return found.join()
}

// fillDefaults sets defaults that depend on other keys. Validate calls it before its checks, which
// need these values.
func (c *Config) fillDefaults() {
	if c.Profiles == nil {
		c.Profiles = map[string]mooncake.Profile{}
	}
	for name, connector := range map[string]string{DefaultProfile: "", DefaultAggregated: mooncake.None} {
		if _, defined := c.Profiles[name]; !defined {
			c.Profiles[name] = mooncake.Profile{Connector: connector}
		}
	}
	for name, p := range c.Profiles {
		p.Name = name
		c.Profiles[name] = p.WithDefaults()
	}
	// The lists are cloned, because with the YAML alias `decode: *prefill` both roles would share one
	// array.
	c.Engines.Decode, c.Engines.Aggregated = slices.Clone(c.Engines.Decode), slices.Clone(c.Engines.Aggregated)
	c.Engines.Prefer = cmp.Or(c.Engines.Prefer, PreferPD)
	for _, role := range Roles {
		for i := range c.Engines.ofRole(role) {
			c.fillEngineDefaults(role, &c.Engines.ofRole(role)[i])
		}
	}
	c.choosePrefillPolicy()
	if c.HA.On() && c.Geo.Self.ID == "" { // the pods of one deployment share a file and differ only in their host name
		c.Geo.Self.ID, _ = os.Hostname() // without a host name the ID stays empty, and checkGeo reports it
	}
	c.Discovery.fillDefaults()
	c.FleetCall.addDefaultPaths()
}

// choosePrefillPolicy sets prefill.policy if the file does not set it: to finish, with two
// exceptions. It chooses again if the policy comes from an earlier call, because MergeReload may
// have changed the settings of geo since then.
func (c *Config) choosePrefillPolicy() {
	if c.Prefill.Policy != "" && c.Prefill.Policy != c.source.chosenPolicy {
		return // the file sets the policy
	}
	c.Prefill.Policy = "finish"
	switch {
	case c.anyServesBothRoles() && c.Geo.On(): // finish was never measured on such engines together with other regions
		c.Prefill.Policy = "lmetric"
	case c.Geo.Leads(): // gorgo takes round trips between regions into account
		c.Prefill.Policy = "gorgo"
	}
	c.source.chosenPolicy = c.Prefill.Policy
}

// anyServesBothRoles says whether some engine is listed both as a prefill and as a decode engine,
// so that it serves both roles.
func (c *Config) anyServesBothRoles() bool {
	return slices.ContainsFunc(c.Engines.Prefill, func(p Engine) bool {
		return slices.ContainsFunc(c.Engines.Decode, func(d Engine) bool { return idOf(p) == idOf(d) })
	})
}

// Complete sets the defaults of an engine that is added while the proxy runs, and checks it as if
// it were in the file. Missing values are taken from the first engine of its role in the file,
// because an engine that is added later usually joins the same group.
func (c *Config) Complete(role string, e Engine) (Engine, error) {
	src := source{file: e.URL} // errors name the engine's URL in place of a file
	listed := c.Engines.ofRole(role)
	if len(listed) > 0 {
		e.fillFrom(role, &listed[0])
	}
	c.fillEngineDefaults(role, &e)
	for _, other := range listed { // all ranks of a group step together, or all step by themselves
		if role != "prefill" && other.Group == e.Group && other.Barrier != e.Barrier {
			return e, src.errorAt("$.barrier", "group %q has barrier %s, this engine %s; use another group or the "+
				"same barrier", e.Group, other.Barrier, e.Barrier)
		}
	}
	if err := c.allowWorker(e.URL); err != nil {
		return e, src.errorAt("$.url", "%v", err)
	}
	return e, c.checkSingle(role, e)
}

// fillFrom takes the values that an engine lacks from the first engine of its role.
func (e *Engine) fillFrom(role string, first *Engine) {
	e.Profile = cmp.Or(e.Profile, first.Profile)
	if role == "prefill" { // prefill engines have no groups and slots
		return
	}
	ownGroup := role == "aggregated" && e.Ranks > 0 // the ranks behind one address are a group of their own
	if e.Group == "" && !ownGroup {
		e.Group, e.Barrier = first.Group, cmp.Or(e.Barrier, first.Barrier)
	}
	e.Slots, e.Budget = cmp.Or(e.Slots, first.Slots), cmp.Or(e.Budget, first.Budget)
	e.Interval = cmp.Or(e.Interval, first.Interval)
}

// CompleteFound sets the defaults of an engine that discovery found, and checks it. Unlike
// Complete, it takes no values from the engines of the file.
func (c *Config) CompleteFound(role string, e Engine) (Engine, error) {
	c.fillEngineDefaults(role, &e)
	return e, c.checkSingle(role, e)
}

// checkSingle checks an engine that is not in the file. Errors name its URL in place of a file:
// they come from standIn, whose file has this name. Of the config, standIn has only the profiles,
// which are all that checkEngine needs.
func (c *Config) checkSingle(role string, e Engine) error {
	standIn := &Config{Profiles: c.Profiles, source: source{file: e.URL}}
	var found problems
	bad := func(path, format string, args ...any) {
		found = append(found, standIn.source.errorAt(path, format, args...))
	}
	standIn.checkEngine("$", role, &e, bad)
	c.checkCanCallBack(role, &e, bad) // of c, because standIn lacks the address for callbacks (bind)
	c.checkUnlistedRegion("$", e.Region, bad)
	return found.join()
}
