package config

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/mooncake"
)

// Validate fills derived values and refuses what cannot work, all problems at
// once.
func (c *Config) Validate() error {
	c.finish()
	var errs []error
	bad := func(path, format string, args ...any) { errs = append(errs, c.at(path, format, args...)) }

	c.checkListeners(bad)
	for name, p := range c.Profiles {
		if err := p.Validate(); err != nil {
			bad("$.profiles."+name, "%v", err)
		}
	}
	c.checkEngines(bad)
	c.checkPool(bad)
	if _, err := policy.Parse(c.Dispatch.Policy); err != nil {
		bad("$.dispatch.policy", "%v", err)
	}
	nonNegative(bad, map[string]time.Duration{
		"$.dispatch.window": c.Dispatch.Window, "$.dispatch.tick_limit": c.Dispatch.TickLimit, "$.pool.ttl": c.Pool.TTL,
		"$.prefill.scrape.interval": c.Prefill.Scrape.Interval, "$.limits.drain_timeout": c.Limits.DrainTimeout,
	})
	positive(bad, map[string]time.Duration{
		"$.prefill.scrape.timeout": c.Prefill.Scrape.Timeout, "$.prefill.queue.timeout": c.Prefill.Queue.Timeout,
		"$.limits.read_timeout": c.Limits.ReadTimeout, "$.limits.idle_timeout": c.Limits.IdleTimeout,
		"$.limits.write_timeout": c.Limits.WriteTimeout, "$.limits.connect_timeout": c.Limits.ConnectTimeout,
		"$.limits.probe_timeout": c.Limits.ProbeTimeout, "$.limits.event_timeout": c.Limits.EventTimeout,
	})
	c.checkNumbers(bad)
	slices.SortStableFunc(errs, byPlace)
	return errors.Join(errs...)
}

// byPlace orders problems as the file does, so that they read the same each time.
func byPlace(a, b error) int {
	var x, y *Error
	if !errors.As(a, &x) || !errors.As(b, &y) {
		return 0
	}
	return cmp.Or(x.Line-y.Line, x.Column-y.Column, strings.Compare(x.Path, y.Path))
}

type report func(path, format string, args ...any)

func (c *Config) checkListeners(bad report) {
	for path, addr := range map[string]string{"$.listen": c.Listen, "$.admin.listen": c.Admin.Listen} {
		if _, _, err := net.SplitHostPort(addr); err != nil {
			bad(path, "%q is not host:port (%v); write for example \":8000\" or \"127.0.0.1:9090\"", addr, err)
		}
	}
	host, _, err := net.SplitHostPort(c.Admin.Listen)
	if err == nil && c.Admin.TokenFile == "" && !loopback(host) {
		bad("$.admin.listen", "%q is reachable from outside this host and has no token; set admin.token_file, or listen on 127.0.0.1", c.Admin.Listen)
	}
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func (c *Config) checkEngines(bad report) {
	seen := map[string]string{}
	for _, side := range []struct {
		key     string
		engines []Engine
	}{{"prefill", c.Engines.Prefill}, {"decode", c.Engines.Decode}} {
		for i, e := range side.engines {
			path := fmt.Sprintf("$.engines.%s[%d]", side.key, i)
			id, err := InstanceID(e.URL)
			if err != nil {
				bad(path+".url", "%v", err)
				continue
			}
			if first, dup := seen[side.key+id]; dup {
				bad(path+".url", "%s is listed twice, first at %s; remove one, or set ranks if it fronts several DP ranks", id, first)
			}
			seen[side.key+id] = trimRoot(path)
			if _, ok := c.Profiles[e.Profile]; !ok {
				bad(path+".profile", "no profile is named %q; the profiles are: %s", e.Profile, strings.Join(c.profileNames(), ", "))
			}
			if e.Ranks < 0 || e.Ranks > 4096 {
				bad(path+".ranks", "%d is not a number of DP ranks (0 or 1..4096)", e.Ranks)
			}
			if side.key == "prefill" {
				if e.Group != "" || e.Barrier != "" || e.Slots != 0 {
					bad(path, "group, barrier and slots belong to decode engines")
				}
				continue
			}
			if !slices.Contains([]string{"dp", "none"}, e.Barrier) {
				bad(path+".barrier", "%q is not a barrier; write dp (ranks step together) or none (dense model)", e.Barrier)
			}
			if e.Slots < 0 {
				bad(path+".slots", "%d slots; write the engine's --max-num-seqs", e.Slots)
			}
			if e.Cost < 0 {
				bad(path+".cost", "%v is not a cost; 1 is the group's mean", e.Cost)
			}
		}
	}
	mixed := map[string]string{}
	for i, e := range c.Engines.Decode {
		if b, ok := mixed[e.Group]; ok && b != e.Barrier {
			bad(fmt.Sprintf("$.engines.decode[%d].barrier", i), "group %q has ranks with barrier %s and %s; ranks of one group step together or not at all", e.Group, b, e.Barrier)
		}
		mixed[e.Group] = e.Barrier
	}
}

// InstanceID is the name of an engine everywhere: host:port of its URL.
func InstanceID(raw string) (string, error) {
	u, err := url.Parse(raw)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Hostname() == "" {
		return "", fmt.Errorf("%q is not an engine's URL; write http://host:port", raw)
	}
	if strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.User != nil {
		return "", fmt.Errorf("%q has a path, query or credentials; write http://host:port alone (a key goes into the profile's api_key_env)", raw)
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return net.JoinHostPort(u.Hostname(), port), nil
}

func (c *Config) profileNames() []string {
	names := make([]string, 0, len(c.Profiles))
	for n := range c.Profiles {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// checkPool holds the pool's TTL within what every prefill engine keeps
// (contract 2.4): a hand-off that outlives it decodes somebody else's blocks.
func (c *Config) checkPool(bad report) {
	if c.Pool.Size < 1 {
		bad("$.pool.size", "%d places; at least 1 is needed for anything to be prefilled", c.Pool.Size)
	}
	for i, e := range c.Engines.Prefill {
		p, ok := c.Profiles[e.Profile]
		if !ok {
			continue
		}
		budget, err := mooncake.HoldBudget(p.KVHoldTimeout, p.HoldMargin)
		if err != nil {
			bad("$.profiles."+e.Profile, "%v", err)
			continue
		}
		if c.Pool.TTL > budget {
			bad("$.pool.ttl", "%v is longer than engines.prefill[%d] (profile %s) keeps a finished prefill for us: %v of its %v; lower pool.ttl to %v, or raise the engine's hold timeout and the profile's kv_hold_timeout",
				c.Pool.TTL, i, e.Profile, budget, p.KVHoldTimeout, budget)
			return
		}
	}
}

func (c *Config) checkNumbers(bad report) {
	if c.Prefill.KVThreshold <= 0 || c.Prefill.KVThreshold > 1 {
		bad("$.prefill.kv_threshold", "%v is not a share of the KV cache; write a number above 0 and up to 1", c.Prefill.KVThreshold)
	}
	for path, n := range map[string]int{
		"$.prefill.queue.max": c.Prefill.Queue.Max, "$.prefill.retry.attempts": c.Prefill.Retry.Attempts, "$.prefill.scrape.misses": c.Prefill.Scrape.Misses,
		"$.limits.body_bytes": c.Limits.Body, "$.limits.head_bytes": c.Limits.Head, "$.limits.connections": c.Limits.Connections, "$.limits.event_bytes": c.Limits.EventBytes,
	} {
		if n < 1 {
			bad(path, "%d; at least 1 is needed", n)
		}
	}
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, c.Log.Level) {
		bad("$.log.level", "%q is not a level; write debug, info, warn or error", c.Log.Level)
	}
}

func nonNegative(bad report, ds map[string]time.Duration) {
	for path, d := range ds {
		if d < 0 {
			bad(path, "%v is negative", d)
		}
	}
}

func positive(bad report, ds map[string]time.Duration) {
	for path, d := range ds {
		if d <= 0 {
			bad(path, "%v; a time above 0 is needed", d)
		}
	}
}
