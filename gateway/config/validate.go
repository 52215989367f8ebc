package config

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"time"

	"evenkeel/internal/spelling"
	"evenkeel/internal/words"
	"evenkeel/mooncake"
)

// checkListeners checks the addresses at which clients and operators connect. The operators'
// listener needs a token if other hosts can reach it.
func (c *Config) checkListeners(bad report) {
	for path, addr := range map[string]string{"$.listen": c.Listen, "$.admin.listen": c.Admin.Listen} {
		if problem := listenProblem(addr); problem != "" {
			bad(path, "%q %s; write host:port, such as \":8000\" or \"127.0.0.1:9090\"", addr, problem)
		}
	}
	host, port, err := net.SplitHostPort(c.Admin.Listen)
	if err != nil { // listenProblem has reported it
		return
	}
	if c.Admin.TokenFile == "" && !Loopback(host) {
		bad("$.admin.listen", "%q is reachable from outside this host and has no token; set admin.token_file, or listen on 127.0.0.1",
			c.Admin.Listen)
	}
	if c.Admin.Listen == c.Listen && port != "0" { // with port 0, each listener gets a port of its own
		bad("$.admin.listen", "clients and operators need different addresses; both are %q", c.Listen)
	}
}

// checkOrigins checks that each origin is written exactly as browsers send it, because the two are
// compared as text.
func (c *Config) checkOrigins(bad report) {
	for i, origin := range c.CORS.Origins {
		path := fmt.Sprintf("$.cors.origins[%d]", i)
		if origin == "*" {
			if len(c.CORS.Origins) > 1 {
				bad(path, "\"*\" allows every origin; write it alone, or only the others")
			}
			continue
		}
		u, err := url.Parse(origin)
		// A scheme and a host with nothing behind it, all in lower case, and without the port that
		// browsers leave out.
		isOrigin := err == nil && u.Scheme != "" && u.Host != "" && u.Scheme+"://"+u.Host == origin && strings.ToLower(origin) == origin
		usualPort := isOrigin && (u.Scheme == "https" && u.Port() == "443" || u.Scheme == "http" && u.Port() == "80")
		if !isOrigin || usualPort || strings.Contains(u.Host, "*") {
			bad(path, "%q is not an origin as browsers send it; write scheme and host in lower case, with the port if it is not the usual one and "+
				"with nothing behind it, such as https://chat.example, or \"*\" alone for all", origin)
		}
	}
}

// checkProfiles checks each profile. If a single key is wrong, the report points at this key, else
// at the profile.
func (c *Config) checkProfiles(bad report) {
	for name, p := range c.Profiles {
		path := "$.profiles." + name
		if err := p.Validate(); err != nil && !checkKeysAlone(p, path, bad) {
			bad(path, "%v", err)
		}
	}
}

// checkKeysAlone reports each key of an invalid profile that is wrong by itself. It validates the
// connector with defaults for all other keys, and then each other key together with the connector.
// It returns false if only a combination of keys is wrong.
func checkKeysAlone(p mooncake.Profile, path string, bad report) (found bool) {
	beside := mooncake.Profile{Name: p.Name, Connector: p.Connector} // the other keys have their defaults
	if err := beside.WithDefaults().Validate(); err != nil {
		bad(path+".connector", "%v", err)
		return true
	}
	all := reflect.ValueOf(p)
	for i := range all.NumField() {
		alone := beside
		reflect.ValueOf(&alone).Elem().Field(i).Set(all.Field(i))
		if err := alone.WithDefaults().Validate(); err != nil {
			bad(path+"."+all.Type().Field(i).Tag.Get("yaml"), "%v", err)
			found = true
		}
	}
	return found
}

// checkEngines checks each engine by itself and against the others: no engine may be listed twice
// in a role, and all engines of a group must have the same barrier.
func (c *Config) checkEngines(bad report) {
	for _, role := range Roles { // a key without a list, as in a file that is cut off, must not remove all engines of a role
		if path := "$.engines." + role; c.source.isSet(path) && c.Engines.ofRole(role) == nil {
			bad(path, "there is nothing behind the key; list the engines under it, or write [] for a side that is meant to have no engines")
		}
	}
	seen := map[string]string{}     // from role and host:port to the path of the entry
	barriers := map[string]Engine{} // from role and group to the group's first engine
	check := func(role string, i int, e *Engine) {
		path := fmt.Sprintf("$.engines.%s[%d]", role, i)
		c.checkEngine(path, role, e, bad)
		id, err := InstanceID(e.URL) // an engine may be written in several ways, such as with and without port 80
		if err != nil {              // checkEngine has reported it
			return
		}
		if first, dup := seen[role+id]; dup {
			bad(path+".url", "%s is listed twice, first as %s; remove one, or set ranks if it fronts several DP ranks", id, first)
			return
		}
		seen[role+id] = trimRoot(path)
		if role == "prefill" { // prefill engines have no groups
			return
		}
		group := role + e.Group
		if first, ok := barriers[group]; ok && first.Barrier != e.Barrier {
			bad(path+".barrier", "group %q has barrier %s here and %s at %s; ranks of one group step together or not at all", e.Group, e.Barrier,
				first.Barrier, first.URL)
		} else if !ok {
			barriers[group] = *e
		}
	}
	for _, role := range Roles {
		for i := range c.Engines.ofRole(role) {
			check(role, i, &c.Engines.ofRole(role)[i])
		}
	}
	if p := c.Engines.Prefer; p != PreferPD && p != PreferAggregated {
		bad("$.engines.prefer", "%q is no kind of engines; write %s or %s", p, PreferPD, PreferAggregated)
	}
}

// checkEngine checks the keys of one engine, and whether they fit its profile. Errors name the
// engine by path.
func (c *Config) checkEngine(path, role string, e *Engine, bad report) {
	if _, err := InstanceID(e.URL); err != nil {
		bad(path+".url", "%v", err)
	}
	if profile, known := c.Profiles[e.Profile]; known {
		e.checkProfile(path, role, &profile, bad)
	} else {
		names := slices.Sorted(maps.Keys(c.Profiles))
		bad(path+".profile", "no profile is named %q%s; there are %s", e.Profile, spelling.Hint(e.Profile, names), strings.Join(names, ", "))
	}
	if e.Ranks < 0 || e.Ranks > maxRanks {
		bad(path+".ranks", "%d is no number of DP ranks; write 0 for one rank without a header, or 1 to %d", e.Ranks, maxRanks)
	}
	if e.First < 0 {
		bad(path+".first_rank", "%d is no number of a DP rank; write the number that the header X-data-parallel-rank must have for the first "+
			"rank behind this URL", e.First)
	}
	e.checkKVEventPorts(path, role, bad)
	e.checkAggregatedKeys(path, role, bad)
	if role == "prefill" {
		e.refuseDecodeKeys(path, bad)
	} else {
		e.checkDecodeKeys(path, bad)
	}
}

// checkKVEventPorts checks the ports at which an engine publishes its KV events; 0: the file sets
// none.
func (e *Engine) checkKVEventPorts(path, role string, bad report) {
	for key, port := range map[string]int{"kv_events_port": e.KVEventsPort, "kv_replay_port": e.KVReplayPort} {
		if port < 0 || port > 65535 {
			bad(path+"."+key, "%d is no port; write the port in the engine's --kv-events-config, or 0 for that of prefill.kv_events", port)
		}
		if role == "decode" && port != 0 {
			bad(path+"."+key, "only the events of engines that prefill are followed; remove it")
		}
	}
}

// checkAggregatedKeys checks the keys that only aggregated engines may have; 0: the file does not
// set the key.
func (e *Engine) checkAggregatedKeys(path, role string, bad report) {
	for key, n := range map[string]int{"token_budget": e.Budget, "prefill_schedule_interval": e.Interval} {
		switch {
		case n != 0 && role != "aggregated":
			bad(path+"."+key, "only aggregated engines have it; remove it")
		case n < 0:
			bad(path+"."+key, "%d is negative; write the engine's --%s", n,
				map[string]string{
					"token_budget":              "max-num-batched-tokens",
					"prefill_schedule_interval": "prefill-schedule-interval, or one more than its --prefill-decode-interval (SGLang)",
				}[key])
		}
	}
}

// refuseDecodeKeys reports keys of a prefill engine that only decode and aggregated engines have.
func (e *Engine) refuseDecodeKeys(path string, bad report) {
	for key, isSet := range map[string]bool{
		"group": e.Group != "", "barrier": e.Barrier != "", "slots": e.Slots != 0, "kv_tokens": e.KV != 0, "cost": e.Cost != 0,
	} {
		if isSet {
			bad(path+"."+key, "only decode and aggregated engines have it; remove it")
		}
	}
}

// checkProfile reports keys of an engine that contradict its profile, such as an http URL with a
// profile that has TLS keys.
func (e *Engine) checkProfile(path, role string, p *mooncake.Profile, bad report) {
	if hasTLSKeys := p.CAFile+p.CertFile+p.ServerName != ""; hasTLSKeys && strings.HasPrefix(e.URL, "http:") {
		bad(path+".url", "its profile %s has keys for TLS, but %q would be called in clear text; write https, or use a profile without ca_file, "+
			"cert_file and server_name",
			e.Profile, e.URL)
	}
	if e.First > 0 && p.DPMode != mooncake.DPHybrid {
		bad(path+".first_rank", "its profile %s has dp_mode %s, and only the nodes of a hybrid deployment may count their ranks from another "+
			"number than 0; remove it, or set dp_mode: hybrid", e.Profile, p.DPMode)
	}
	if p.Connector == mooncake.None && role != "aggregated" {
		bad(path+".profile", "its profile %s has connector %s, so it hands no KV over; list it under engines.aggregated, or use a profile with "+
			"the connector that it was started with", e.Profile, mooncake.None)
	}
	if role != "prefill" && e.Ranks == 0 && p.DPMode != mooncake.DPExternal {
		bad(path, "its profile %s has dp_mode %s, so this address has several DP ranks; set ranks to their number, or else the engine places "+
			"requests itself",
			e.Profile, p.DPMode)
	}
}

// checkDecodeKeys checks the keys that only decode and aggregated engines have.
func (e *Engine) checkDecodeKeys(path string, bad report) {
	if !words.IsName(e.Group) {
		bad(path+".group", "%.40q is no name of a group; write 1 to %d bytes, all of printable characters", e.Group, words.MaxName)
	}
	if e.Barrier != BarrierDP && e.Barrier != BarrierNone {
		bad(path+".barrier", "%q is not a barrier; write dp (ranks step together) or none (dense model)", e.Barrier)
	}
	if e.Slots < 0 {
		bad(path+".slots", "%d is no number of slots; write the engine's --max-num-seqs", e.Slots)
	}
	if e.KV < 0 {
		bad(path+".kv_tokens", "%d is no number of tokens; write a rank's KV capacity, or 0 to ask the engine", e.KV)
	}
	if !(e.Cost > 0 && e.Cost <= maxCost) { // in this form, NaN is refused as well
		bad(path+".cost", "%v is not a cost; 1 is that of a usual rank, 2 of one half as fast, and 1000 the most", e.Cost)
	}
}

// maxCost bounds the cost of a rank. It is far above that of the slowest rank, so a larger cost is
// a mistake. Tokens times a cost must not overflow.
const maxCost = 1000

// maxRanks bounds the number of ranks of one engine. It is far more than any deployment has, so a
// larger number is a mistake.
const maxRanks = 4096

// checkPool checks that hand-offs wait in the pool for less time than every prefill engine keeps
// their KV. A later hand-off would read blocks that the engine has given to another request.
func (c *Config) checkPool(bad report) {
	if c.Pool.Size < 1 {
		bad("$.pool.size", "%d places are too few; write at least 1, because each prefill needs a place", c.Pool.Size)
	}
	for _, e := range c.Engines.Prefill {
		if c.checkPoolTTL(e.URL, e.Profile, bad) { // one report about the same key is enough
			return
		}
	}
	for _, profile := range c.ProfilesInUse("prefill") {
		if c.checkPoolTTL("from discovery", profile, bad) {
			return
		}
	}
}

// checkPoolTTL reports a pool.ttl that is longer than prefill engines with this profile keep KV.
// engine is the name of such an engine, for the message.
func (c *Config) checkPoolTTL(engine, profile string, bad report) (reported bool) {
	p, known := c.Profiles[profile]
	if !known || p.Early() { // with early binding, waiting requests have no KV yet that could expire
		return false
	}
	budget, err := p.HoldBudget()
	if err != nil || c.Pool.TTL <= budget { // checkProfiles reports the error
		return false
	}
	bad("$.pool.ttl", "%v is longer than prefill engine %s (profile %s) holds a finished prefill for the pool: %v of its %v; lower pool.ttl "+
		"to %v, or raise the engine's hold timeout and the profile's kv_hold_timeout",
		c.Pool.TTL, engine, profile, budget, p.KVHoldTimeout, budget)
	return true
}

// checkTimes checks the durations in health and limits. 0 is allowed only where it has a meaning,
// such as to switch something off.
func (c *Config) checkTimes(bad report) {
	for path, d := range map[string]time.Duration{
		"$.health.canary": c.Health.Canary, "$.health.slow_start": c.Health.SlowStart,
		"$.limits.drain_timeout": c.Limits.DrainTimeout, "$.limits.drain_grace": c.Limits.DrainGrace, "$.limits.probe_grace": c.Limits.ProbeGrace,
		"$.limits.keep_alive": c.Limits.KeepAlive,
	} {
		if d < 0 {
			bad(path, "%v is negative; write 0s or more", d)
		}
	}
	for path, d := range map[string]time.Duration{
		"$.health.interval":     c.Health.Interval,
		"$.limits.read_timeout": c.Limits.ReadTimeout, "$.limits.idle_timeout": c.Limits.IdleTimeout,
		"$.limits.write_timeout":   c.Limits.WriteTimeout,
		"$.limits.connect_timeout": c.Limits.ConnectTimeout, "$.limits.probe_timeout": c.Limits.ProbeTimeout, "$.limits.event_timeout": c.Limits.EventTimeout,
	} {
		if d <= 0 {
			bad(path, "%v; a time above 0 is needed", d)
		}
	}
}

// checkNumbers checks event_loops, the limits that are numbers, and limits.media_hosts.
func (c *Config) checkNumbers(bad report) {
	atLeast := func(path string, n, limit int) {
		if n < limit {
			bad(path, "%d; at least %d is needed", n, limit)
		}
	}
	atLeast("$.limits.body_bytes", c.Limits.Body, 1)
	atLeast("$.limits.head_bytes", c.Limits.Head, 1)
	if c.Limits.Bodies != 0 { // 0 is no limit; otherwise the largest body must fit
		atLeast("$.limits.bodies_bytes", c.Limits.Bodies, c.Limits.Body)
	}
	if most := 64; c.EventLoops < -1 || c.EventLoops > most {
		bad("$.event_loops", "%d; write 0 for as many as suit the machine, 1 to %d, or -1 for a goroutine per answer", c.EventLoops, most)
	}
	atLeast("$.limits.event_bytes", c.Limits.EventBytes, 1)
	if most := 1 << 30; c.Limits.EventBytes > most { // 1 GiB
		bad("$.limits.event_bytes", "%d is too much; write at most %d", c.Limits.EventBytes, most)
	}
	atLeast("$.limits.answer_bytes", c.Limits.AnswerBytes, 1)
	atLeast("$.limits.resume_bytes", c.Limits.ResumeBytes, 0)
	atLeast("$.limits.answers", c.Limits.Answers, 1)
	atLeast("$.limits.answers_per_prompt", c.Limits.AnswersPerPrompt, 1)
	atLeast("$.limits.stop_strings", c.Limits.StopStrings, 1)
	atLeast("$.limits.passed_through", c.Limits.PassedThrough, 1)
	atLeast("$.limits.connections", c.Limits.Connections, 1)
	atLeast("$.limits.connections_per_ip", c.Limits.PerIP, 0)
	for i, host := range c.Limits.MediaHosts {
		if host == "" || strings.ContainsAny(host, "/ ") { // the message shows an empty host as a space between quotes
			bad(fmt.Sprintf("$.limits.media_hosts[%d]", i), "%q is not a host; write a name alone, such as images.example", cmp.Or(host, " "))
		}
	}
}

// fillEngineDefaults sets the defaults of keys that an engine leaves out. Some come from its
// profile.
func (c *Config) fillEngineDefaults(role string, e *Engine) {
	e.Profile = cmp.Or(e.Profile, DefaultProfileOf(role))
	if role == "prefill" {
		return
	}
	p := c.Profiles[e.Profile]
	if role == "aggregated" && e.Ranks > 0 && p.DPMode != mooncake.DPHybrid { // one address serves a whole deployment, whose ranks are a group
		e.Group = cmp.Or(e.Group, idOf(*e))
	}
	e.Group = cmp.Or(e.Group, "main")
	e.Barrier = cmp.Or(e.Barrier, BarrierDP)
	e.Cost = cmp.Or(e.Cost, 1)
	e.Slots = cmp.Or(e.Slots, p.MaxNumSeqs)
	e.KV = cmp.Or(e.KV, p.KVTokensPerRank)
	if role == "aggregated" {
		e.Budget = cmp.Or(e.Budget, p.MaxBatchedTokens)
	}
}

// DefaultProfileOf returns the profile of an engine of this role that names no profile.
func DefaultProfileOf(role string) string {
	if role == "aggregated" {
		return DefaultAggregated
	}
	return DefaultProfile
}
