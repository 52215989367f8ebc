package main

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/testbed"
)

// How long a leg of a bound request waits for the other one, in the proxy and in engines that give
// up. A first token waits for the answer of its prefill, however late a prefill engine that hangs
// gives it: an answer that is later than confirm lets the text of an aborted prefill through, up to
// an error event.
const (
	bindPatience   = 2 * time.Second
	confirm        = time.Minute
	enginePatience = 4 * time.Second
)

// spoken are the connectors that a scene can be played with.
var spoken = []refengine.Connector{refengine.AscendMooncake, refengine.NIXLPull, refengine.VLLMMooncake, refengine.AscendLayerwise,
	refengine.SGLang, refengine.NIXLPush}

func connectors() (names []string) {
	for _, c := range spoken {
		names = append(names, string(c))
	}
	return names
}

// speak is the flag -connector.
func (o *options) speak(name string) error {
	if o.connector = refengine.Connector(name); !slices.Contains(spoken, o.connector) {
		return fmt.Errorf("no connector %q; there are %s", name, strings.Join(connectors(), ", "))
	}
	return nil
}

// early says whether requests are bound to a decode rank before their prefill.
func (s scenario) early() bool {
	return s.connector == refengine.AscendLayerwise || s.connector == refengine.SGLang
}

// strands says whether a decode engine keeps the blocks of a request whose KV never comes, until it
// restarts.
func (s scenario) strands() bool {
	return s.connector == refengine.AscendLayerwise || s.connector == refengine.NIXLPush
}

// ownPort says whether each prefill engine needs a profile of its own, because the port
// at which decode engines reach it stands there.
func ownPort(c refengine.Connector) bool { return c == refengine.SGLang || c == refengine.VLLMMooncake }

// profile is the name of the profile that a member has in the proxy's config.
func (m *member) profile() string {
	switch {
	case m.internal:
		return "internal"
	case m.role == "prefill" && ownPort(m.Config().Connector):
		return "p" + m.port()
	}
	return "default"
}

func (m *member) port() string {
	u, err := url.Parse(m.urls[0])
	if err != nil {
		panic(err) // an engine's own
	}
	return u.Port()
}

// profiles is the part of the config that tells of connectors.
func (s *settings) profiles() string {
	connector := s.fleet.all[0].Config().Connector
	of := scenario{connector: connector}
	resume := "vllm_prompt_token_ids"
	common := []string{fmt.Sprintf("connector: %s", connector), "first_event_timeout: 6s"}
	if connector == refengine.SGLang {
		resume = "continue_final_message"
	}
	common = append(common, "chat_resume: "+resume)
	if !of.early() {
		common = append(common, fmt.Sprintf("kv_hold_timeout: %v", s.hold), "reject_releases: true")
	}
	var b strings.Builder
	b.WriteString("profiles:\n")
	add := func(name string, more ...string) {
		fmt.Fprintf(&b, "  %s: {%s}\n", name, strings.Join(append(slices.Clone(common), more...), ", "))
	}
	add("default")
	add("internal", "dp_mode: internal")
	if ownPort(connector) {
		for _, m := range s.fleet.of("prefill") {
			add(m.profile(), "bootstrap_port: "+m.port())
		}
	}
	if of.early() {
		fmt.Fprintf(&b, "bind: {callback_timeout: %v", bindPatience)
		if connector == refengine.AscendLayerwise {
			fmt.Fprintf(&b, ", listen: %q", s.callbacks)
		}
		b.WriteString("}\n")
	}
	return b.String()
}

// ownFaults are those that only requests of a connector meet, by the leg that they strike.
var ownFaults = map[refengine.Connector]map[string][]refengine.Fault{
	refengine.AscendLayerwise: {
		refengine.LegDecode: {refengine.NoCallback, refengine.CallbackTwice, refengine.CallbackLate, refengine.CallbackBadHost,
			refengine.CallbackShortID, refengine.CallbackNewKey, refengine.CallbackEmpty},
		refengine.LegProbe: {refengine.DoneLost, refengine.FailedSent},
	},
	refengine.SGLang: {
		refengine.LegDecode: {refengine.TransferFails},
		refengine.LegProbe:  {refengine.DoneLost, refengine.FailedSent, refengine.PrefillAbort200, refengine.BootstrapSlow},
	},
	refengine.NIXLPush: {refengine.LegProbe: {refengine.DoneLost, refengine.FailedSent}},
}

// foreign says whether a connector has nothing that a fault could spoil: no hand-off, no pull, or
// no word for a request that is given back.
func foreign(c refengine.Connector, f refengine.Fault) bool {
	switch f {
	case refengine.LostKV:
		return scenario{connector: c}.early() || c == refengine.NIXLPush
	case refengine.NullHandoff, refengine.EmptyBlocks, refengine.StringBlocks, refengine.NoRequestID, refengine.WrongHost:
		return c == refengine.AscendLayerwise || c == refengine.SGLang
	case refengine.Recomputed:
		return c == refengine.SGLang
	}
	return false
}

// Lost is the KV of requests that were bound and whose prefill never came.
type lost struct {
	Stranded int64 `json:"stranded_tokens"` // that decode engines keep, in whole blocks
	Orphans  int64 `json:"orphan_tokens"`   // that the proxy holds against their ranks
}

// restart ends the processes of decode engines that keep blocks for nobody. Then nobody holds
// anything, and the proxy knows that.
func (r *report) restart(ctx context.Context, s scenario, f *fleet, p *proxy) error {
	if !s.strands() {
		return nil
	}
	r.Lost = &lost{Orphans: int64(p.Metric("evenkeel_bind_orphan_tokens"))}
	for _, m := range f.of("decode") {
		n := m.Stats().Stranded()
		r.Lost.Stranded += n
		if n > 0 || r.Lost.Orphans > 0 {
			m.Kill()
			m.revive()
		}
	}
	return testbed.Idle(ctx, s.settle, func() []string {
		all, err := p.Series()
		if err != nil {
			return []string{err.Error()}
		}
		held := testbed.Held(p.Name, all, append(slices.Clone(testbed.Books), "evenkeel_bind_orphan_tokens")...)
		return append(held, f.hold(testbed.HeldBy)...)
	})
}

// revive starts an engine again, and says whether it could.
func (m *member) revive() bool {
	for range 100 { // until its ports are free again
		if m.Revive() == nil {
			return true
		}
		time.Sleep(20 * time.Millisecond)
	}
	return false
}

// shortened lets engines that give up do so before the scene is over. A server of SGLang ends when
// it gets a request that has no room.
func shortened(c refengine.Config, s scenario) refengine.Config {
	c.Connector = cmp.Or(s.connector, refengine.AscendMooncake)
	if c.Connector == refengine.SGLang {
		c.SGLang.LoadBalance = "follow_bootstrap_room"
	}
	c.SGLang.BootstrapTimeout, c.SGLang.WaitingTimeout = enginePatience, enginePatience
	return c
}
