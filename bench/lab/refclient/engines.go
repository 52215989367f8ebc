package refclient

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/config"
	"evenkeel/prefill"
)

// Engines are the reference engines behind what is tested.
type Engines struct {
	Prefill, Decode []*refengine.Engine
	Late            bool // decode engines may pull KV that was given away: the test says that no answer is made of it
	Dirty           bool // they may end with pins or counted faults: the test says which
}

// Enter starts engines and writes them into the config. Without any, they are one that prefills and
// one of two ranks that decodes, all fast.
func (c *Client) Enter(cfg *config.Config, prefills, decodes, mixed []refengine.Config) (all Engines) {
	c.Helper()
	if prefills == nil && mixed == nil {
		prefills = []refengine.Config{{KV: refengine.KV{PrefixCache: 4096}, Answers: refengine.Answers{PromptTokensDetails: true}}}
	}
	if decodes == nil && mixed == nil {
		decodes = []refengine.Config{{DPSize: 2, Answers: refengine.Answers{PromptTokensDetails: true}}}
	}
	for _, p := range prefills {
		p.Role = refengine.Prefill
		e := c.Engine(p)
		all.Prefill = append(all.Prefill, e)
		events, replay := KVPorts(e)
		cfg.Engines.Prefill = append(cfg.Engines.Prefill, config.Engine{URL: e.URLs()[0], KVEventsPort: events, KVReplayPort: replay})
	}
	enter := func(list *[]config.Engine, d refengine.Config) {
		e := c.Engine(d)
		all.Decode = append(all.Decode, e)
		urls, ranks := e.URLs(), 0
		if e.Config().DPMode == "internal" {
			urls, ranks = urls[:1], e.Config().DPSize
		}
		for _, u := range urls {
			one := config.Engine{URL: u, Ranks: ranks, Slots: e.Config().Slots}
			if d.Role == refengine.Aggregated {
				one.KVEventsPort, one.KVReplayPort = KVPorts(e)
			}
			*list = append(*list, one)
		}
	}
	for _, d := range decodes {
		d.Role = refengine.Decode
		enter(&cfg.Engines.Decode, d)
	}
	for _, m := range mixed {
		m.Role = refengine.Aggregated
		enter(&cfg.Engines.Aggregated, m)
	}
	return all
}

// Engine starts one.
func (c *Client) Engine(cfg refengine.Config) *refengine.Engine {
	c.Helper()
	e, err := refengine.Start(cfg.Quick())
	require.NoError(c, err)
	return e
}

// KVPorts are where an engine publishes KV events, 0 where it does not.
func KVPorts(e *refengine.Engine) (events, replay int) {
	port := func(address string) (n int) {
		if _, p, err := net.SplitHostPort(address); err == nil {
			n, _ = strconv.Atoi(p)
		}
		return n
	}
	a, b := e.KVEvents(0)
	return port(a), port(b)
}

// AddressOf is an engine's first address, as the proxy names it.
func AddressOf(e *refengine.Engine) string { return strings.TrimPrefix(e.URLs()[0], "http://") }

// All are those of both sides.
func (e *Engines) All() []*refengine.Engine {
	return append(append([]*refengine.Engine{}, e.Prefill...), e.Decode...)
}

// Account is what the proxy, or the parts of it that there are, says of itself.
type Account struct {
	Callbacks int // expected
	Open      int64
	Places    int
	Dispatch  board.Status
	Prefill   []prefill.CandidateStatus
}

// Settled waits until nothing is under way and checks every account, the engines' and the proxy's.
func (c *Client) Settled(e *Engines, now func() Account) {
	c.Helper()
	var held []string
	idle := func() bool {
		held = e.Held(now())
		return len(held) == 0
	}
	for end := time.Now().Add(Patience); !idle(); time.Sleep(2 * time.Millisecond) {
		require.True(c, time.Now().Before(end), "still held: %v", held)
	}
	require.Zero(c, now().Dispatch.Drift)
	page := c.Page() // read once: a page costs milliseconds, and each test ends here
	for _, series := range []string{
		`evenkeel_audit_drift{kind="slots"}`, `evenkeel_audit_drift{kind="kv_tokens"}`, `evenkeel_audit_drift{kind="handoffs"}`,
		"evenkeel_double_releases_total", "evenkeel_prefill_double_releases_total", "evenkeel_requests_open",
		`evenkeel_tick_fallbacks_total{reason="panic"}`, // a policy that fails is stood in for, and nobody else would notice
	} {
		require.Zero(c, ValueOf(c.T, page, series), series)
	}
	locals := int64(SumOf(c.T, page, "evenkeel_local_prefill_requests_total"))
	surplus := int64(0)
	for _, one := range e.All() {
		st := one.Stats()
		if one.Config().Role != refengine.Prefill { // one that prefills may answer a request alone
			locals -= st.LocalPrefills
		}
		surplus += st.OverAdmitted
		type harm struct{ Replays, ExpiredPulls, OutlivedWrites, WrongBlocks, Crashes, DuplicateIDs, RankMismatch int64 }
		if e.Late {
			st.ExpiredPulls, st.OutlivedWrites = 0, 0
		}
		require.Zero(c, harm{
			Replays: st.Replays, ExpiredPulls: st.ExpiredPulls, OutlivedWrites: st.OutlivedWrites, WrongBlocks: st.WrongBlocks,
			Crashes: st.Crashes, DuplicateIDs: st.DuplicateIDs, RankMismatch: st.RankMismatch,
		})
		if !e.Dirty {
			type loss struct{ Leaks, Unknown, KeyMismatches, InTransfer, Unpinned int64 }
			require.Zero(c, loss{
				Leaks: st.Leaks, Unknown: st.Unknown, KeyMismatches: st.KeyMismatches, InTransfer: st.InTransfer, Unpinned: st.Unpinned,
			})
		}
	}
	require.True(c, e.Dirty || locals >= 0, "decode engines prefilled %d prompts that the proxy did not count", -locals)
	if !e.Dirty && surplus > 0 {
		require.LessOrEqual(c, float64(surplus), c.Metric("evenkeel_heedless_engines_total"), "over-admitted by engines that had let go in time")
	}
}

// Held lists what is not given back yet.
func (e *Engines) Held(a Account) (held []string) {
	note := func(what string, n int64) {
		if n != 0 {
			held = append(held, fmt.Sprintf("%s %d", what, n))
		}
	}
	note("callbacks expected", int64(a.Callbacks))
	note("open requests", a.Open)
	note("places", int64(a.Places))
	for _, m := range a.Dispatch.Models {
		note("pooled", int64(m.Pool))
		for _, w := range m.Workers {
			note("slots of "+w.Name, int64(w.Used))
		}
	}
	for _, p := range a.Prefill {
		note("leases of "+p.ID, int64(p.Inflight+p.Pooled+p.Dispatched))
		if !e.Dirty {
			note("KV tokens charged to "+p.ID, p.KVTokens)
		}
	}
	for _, one := range e.All() {
		st := one.Stats()
		note("requests on "+one.URLs()[0], st.Running+st.Waiting)
		if !e.Dirty {
			note("pins on "+one.URLs()[0], int64(st.Pins))
		}
	}
	return held
}

// AllUp waits until every engine takes requests.
func (c *Client) AllUp(e *Engines, now func() Account) {
	c.Helper()
	c.Eventually("all engines are up", func() bool {
		up := 0
		for _, m := range now().Dispatch.Models {
			for _, w := range m.Workers {
				if w.Up {
					up++
				}
			}
		}
		want := len(e.Prefill)
		for _, d := range e.Decode {
			want += d.Config().DPSize
		}
		return float64(up)+c.Metric(`evenkeel_prefill_candidates{state="open"}`) == float64(want)
	})
}

// Early has engines, and the config of a proxy in front of them, use a connector that wants the
// decode rank before the prefill.
func Early(t *testing.T, connector refengine.Connector, prefills, decodes []refengine.Config, more func(*config.Config),
) (prefill, decode []refengine.Config, configure func(*config.Config)) {
	t.Helper()
	if prefills == nil {
		prefills = []refengine.Config{{}}
	}
	if decodes == nil {
		decodes = []refengine.Config{{DPSize: 2}}
	}
	for _, side := range [][]refengine.Config{prefills, decodes} {
		for i := range side {
			side[i].Connector = connector
		}
	}
	return prefills, decodes, func(cfg *config.Config) {
		p := cfg.Profiles[config.DefaultProfile]
		p.Connector = string(connector)
		atOwnPort := connector == refengine.SGLang || connector == refengine.VLLMMooncake // where a reference engine is met
		for i := range cfg.Engines.Prefill {
			if !atOwnPort {
				break
			}
			u, err := url.Parse(cfg.Engines.Prefill[i].URL)
			require.NoError(t, err)
			p.BootstrapPort, err = strconv.Atoi(u.Port())
			require.NoError(t, err)
			name := config.DefaultProfile
			if i > 0 {
				name = fmt.Sprintf("p%d", i)
				cfg.Engines.Prefill[i].Profile = name
			}
			cfg.Profiles[name] = p
		}
		if !atOwnPort {
			p.BootstrapPort = 0
			cfg.Profiles[config.DefaultProfile] = p
		}
		cfg.SelfTest = false
		if connector == refengine.AscendLayerwise {
			cfg.Bind.Listen = "127.0.0.1:0"
		}
		if more != nil {
			more(cfg)
		}
	}
}

// Exposed has answers say how they were made.
func Exposed(more func(*config.Config)) func(*config.Config) {
	return func(cfg *config.Config) {
		cfg.ExposeRoute = true
		if more != nil {
			more(cfg)
		}
	}
}

// Conditional has decode ranks compute short prompts.
func Conditional(more func(*config.Config)) func(*config.Config) {
	return Exposed(func(cfg *config.Config) {
		cfg.Prefill.Disaggregation.Mode = prefill.DisaggregateConditional
		cfg.Prefill.Index.TokenizeTimeout = Patience // a busy machine counts the prompt, too
		if more != nil {
			more(cfg)
		}
	})
}

// Cached is an engine of two ranks that tells what its prefix cache had.
func Cached() []refengine.Config {
	return []refengine.Config{{DPSize: 2, KV: refengine.KV{PrefixCache: 4096}, Answers: refengine.Answers{PromptTokensDetails: true}}}
}

// KeyFile writes a file of keys: "name key more".
func KeyFile(t *testing.T, file string, entries ...string) {
	t.Helper()
	text := "keys:\n"
	for _, e := range entries {
		name, rest, _ := strings.Cut(e, " ")
		key, more, _ := strings.Cut(rest, " ")
		sum := sha256.Sum256([]byte(key))
		text += fmt.Sprintf("  - {name: %s, sha256: %s%s}\n", name, hex.EncodeToString(sum[:]), more)
	}
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
}
