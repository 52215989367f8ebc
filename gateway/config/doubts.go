package config

import (
	"fmt"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"time"

	"evenkeel/mooncake"
)

// Doubts returns settings of a valid config that are probably a mistake: with them, for example,
// the proxy serves no request, or a number seems to have the wrong unit.
func (c *Config) Doubts() []*Error {
	d := doubts{source: &c.source}
	d.engines(c)
	d.groups(c)
	d.pages(c)
	d.profiles(c)
	d.connectors(c)
	d.sizes(reflect.ValueOf(c).Elem(), "$")
	d.numbers(c)
	slices.SortStableFunc(d.found, byPosition)
	return d.found
}

type doubts struct {
	source *source
	found  []*Error
}

// add adds a doubt about the value at a path such as "$.pool.size".
func (d *doubts) add(path, format string, args ...any) {
	d.found = append(d.found, d.source.errorAt(path, format, args...))
}

// engines doubts a role without engines: none is listed or discovered, and no engine of another
// region can help. The proxy then serves nothing until an operator adds such engines at the admin
// listener.
func (d *doubts) engines(c *Config) {
	onlyAggregated := len(c.Engines.Aggregated) > 0 && len(c.Engines.Prefill)+len(c.Engines.Decode) == 0
	if c.Discovery.On() || c.Geo.On() || onlyAggregated { // other engines may come, or none of these roles is needed
		return
	}
	for _, side := range []struct {
		role string
		list []Engine
	}{{"prefill", c.Engines.Prefill}, {"decode", c.Engines.Decode}} {
		switch {
		case len(side.list) > 0: // the role has engines
		case side.role == "prefill" && len(c.Engines.Decode) > 0:
			d.add("$.engines.prefill", "no prefill engine is listed, and none is discovered, so only requests that one engine serves alone work, "+
				"such as embeddings; list prefill engines under engines.prefill for chats and completions")
		default:
			d.add("$.engines."+side.role, "no %s engine is listed, and none is discovered, so no request is served until one is added; list such "+
				"engines under engines.%[1]s", side.role)
		}
	}
}

// groups doubts aggregated engines that share a group although the file does not name it, and that
// are on several hosts. Two engines that know nothing of each other may have been left in one
// group, and then each of them waits for the other.
func (d *doubts) groups(c *Config) {
	type site struct{ group, region string }
	first := map[site]string{} // host of the first engine
	doubted := map[site]bool{}
	for i, e := range c.Engines.Aggregated {
		at := site{e.Group, e.Region}
		path := fmt.Sprintf("$.engines.aggregated[%d]", i)
		u, err := url.Parse(e.URL)
		named := d.source.isSet(path + ".group")
		if err != nil || named || e.Barrier != BarrierDP || doubted[at] {
			continue
		}
		if first[at] == "" {
			first[at] = u.Hostname()
			continue
		}
		if first[at] != u.Hostname() {
			doubted[at] = true
			d.add(path, "this engine and one on host %s are in group %q, because no group is written for them: if one of "+
				"them is down, the other gets no requests. If they run one model together, write group: %[2]s at both; if "+
				"each runs alone, give each a group of its own, or write barrier: none", first[at], e.Group)
		}
	}
}

// profiles doubts profiles that no engine names, because they have no effect. A common mistake is a
// profile called default, because engines that name no profile get another one.
func (d *doubts) profiles(c *Config) {
	if c.Discovery.On() {
		return // discovered engines may name any profile
	}
	for name := range c.Profiles {
		named := func(e Engine) bool { return e.Profile == name }
		isDefault := name == DefaultProfile || name == DefaultAggregated // exists even if the file does not define it
		if !isDefault && !slices.ContainsFunc(slices.Concat(c.Engines.Prefill, c.Engines.Decode, c.Engines.Aggregated), named) {
			d.add("$.profiles."+name, "no engine names this profile, so it has no effect; write profile: %s at the engines that it is for. Engines "+
				"that name no profile have the profile %s", name, DefaultProfile)
		}
	}
}

// connectors doubts a connector that only one role has, because no engine of the other role can use
// its hand-offs. It does not doubt opaque, which may stand for any connector.
func (d *doubts) connectors(c *Config) {
	if c.Discovery.On() || c.Geo.On() {
		return
	}
	connectorsOf := map[string]map[string]bool{"prefill": {}, "decode": {}} // the connectors that each role has
	for role, e := range c.Engines.All() {
		if connectorsOf[role] != nil { // aggregated engines hand nothing over
			connectorsOf[role][c.Profiles[e.Profile].Connector] = true
		}
	}
	for role, otherRole := range map[string]string{"prefill": "decode", "decode": "prefill"} {
		for i, e := range c.Engines.ofRole(role) {
			connector := c.Profiles[e.Profile].Connector
			others := connectorsOf[otherRole] // empty: the other role has no engines, which another doubt is about
			mayMatch := others[connector] || others[mooncake.Opaque] || connector == mooncake.Opaque
			if len(others) > 0 && !mayMatch {
				d.add(fmt.Sprintf("$.engines.%s[%d].profile", role, i), "this engine has profile %s, whose connector is %s, and no %s engine has "+
					"that connector, so that they hand nothing over to each other; name the profile that the others have",
					e.Profile, connector, otherRole)
			}
		}
	}
}

// pages doubts a proxy without API keys that allows every origin. If a person inside the network
// opens any web page, that page can send requests to the proxy from the person's browser.
func (d *doubts) pages(c *Config) {
	if c.KeysFile == "" && slices.Contains(c.CORS.Origins, "*") {
		d.add("$.cors.origins", "every page that somebody inside your network opens may send requests, because no key is asked for; list the "+
			"sites that you mean, or set keys_file")
	}
}

// Values above these are probably mistakes: they are far beyond the needs of any known proxy.
const (
	muchMemory = 64 << 30 // bytes, for keys that end in _bytes
	longTime   = 24 * time.Hour
	manySlots  = 4096 // requests per rank; vLLM's max_num_seqs is usually 128 to 1024
)

// sizes doubts durations above longTime and numbers of bytes above muchMemory, in v and in all its
// fields.
func (d *doubts) sizes(v reflect.Value, path string) {
	switch v.Kind() {
	case reflect.Struct:
		for key, f := range fieldsOf(v.Type()) {
			d.sizes(v.FieldByIndex(f.Index), path+"."+key)
		}
	case reflect.Slice:
		for i := range v.Len() {
			d.sizes(v.Index(i), fmt.Sprintf("%s[%d]", path, i))
		}
	case reflect.Map:
		for it := v.MapRange(); it.Next(); {
			d.sizes(it.Value(), path+"."+it.Key().String())
		}
	case reflect.Int, reflect.Int64:
		switch {
		case v.Type() == durationType && v.Int() > int64(longTime):
			d.add(path, "%v is more than a day; is the unit right?", time.Duration(v.Int()))
		case strings.HasSuffix(path, "_bytes") && v.Int() > muchMemory:
			d.add(path, "%d bytes are %d GiB; is that meant?", v.Int(), v.Int()>>30)
		}
	}
}

// numbers doubts numbers that are far larger or smaller than any proxy needs.
func (d *doubts) numbers(c *Config) {
	// above doubts a number that is above a limit, and below one that is below it. what ends the
	// message.
	above := func(path string, n, limit int, what string) {
		if n > limit {
			d.add(path, "%d is more than any proxy needs; %s", n, what)
		}
	}
	below := func(path string, n, limit int, what string) {
		if n < limit {
			d.add(path, "%d bytes are so few that %s", n, what)
		}
	}
	above("$.pool.size", c.Pool.Size, 1_000_000, "it is the number of finished prefills that may wait for a rank")
	above("$.prefill.queue.max", c.Prefill.Queue.Max, 1_000_000, "it is the number of requests that may wait for a prefill engine")
	above("$.prefill.push.max_unanswered", c.Prefill.Push.MaxUnanswered, 10_000, "it is the number of prefills that one engine gets at once")
	above("$.prefill.retry.attempts", c.Prefill.Retry.Attempts, 100, "it is the number of engines that one request may be tried on")
	above("$.limits.connections", c.Limits.Connections, 1<<22, "each one takes a file descriptor")
	below("$.limits.body_bytes", c.Limits.Body, 1<<10, "most requests are refused")
	below("$.limits.head_bytes", c.Limits.Head, 1<<10, "most requests are refused")
	below("$.limits.event_bytes", c.Limits.EventBytes, 4<<10, "events of engines are refused")
	for _, role := range Roles {
		for i, e := range c.Engines.ofRole(role) {
			above(fmt.Sprintf("$.engines.%s[%d].slots", role, i), e.Slots, manySlots, "it is the engine's --max-num-seqs, not its KV tokens")
		}
	}
}
