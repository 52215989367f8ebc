package main

import (
	"fmt"
	"sync"
	"time"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/testbed"
)

const model = "ref"

// fleet are the engines of both sides.
type fleet struct {
	rules []refengine.Rule
	all   []*member
}

// member is an engine. Whoever does something to it claims it first, and
// nobody claims the last one of a side that works.
type member struct {
	*refengine.Engine
	role     string
	urls     []string
	internal bool // its ranks are told apart by a header

	fleet   *fleet
	claimed bool
}

var claims sync.Mutex // of all members' claimed

func startFleet(w *testbed.World, s scenario, seed uint64, books *ledger) (*fleet, error) {
	f := &fleet{rules: faultRules(s.rate, s.connector)}
	slots := s.streams*4/(3*max(1, s.decode-1)*s.ranks) + 2*s.wide + s.lag + 2 // enough with one engine down
	if s.slots > 0 {
		slots = s.slots
	}
	for i := range s.prefill + s.decode {
		c := refengine.Config{
			Role: refengine.Prefill, Seed: seed + uint64(i),
			Prompts: refengine.Prompts{Concurrency: 8, Base: 2 * time.Millisecond, PerToken: 20 * time.Microsecond},
			KV:      refengine.KV{PrefixCache: 4096, HoldTimeout: s.hold}, Answers: refengine.Answers{PromptTokensDetails: true},
			Hooks: refengine.Hooks{OnStrike: books.struck},
		}
		c = shortened(c, s)
		role := "prefill"
		if i >= s.prefill {
			role, c.Role, c.DPSize, c.Slots, c.Steps.C0, c.Steps.C1 = "decode", refengine.Decode, s.ranks, slots, s.step, time.Nanosecond
			c.Group = fmt.Sprint("g", i-s.prefill)
			if i == s.prefill { // one URL for all its ranks
				c.DPMode = "internal"
			}
		}
		e, err := w.Engines(c)
		if err != nil {
			return nil, err
		}
		m := &member{Engine: e[0], role: role, urls: e[0].URLs(), internal: c.DPMode == "internal", fleet: f}
		if m.internal {
			m.urls = m.urls[:1]
		}
		f.all = append(f.all, m)
	}
	return f, nil
}

func (f *fleet) of(role string) (list []*member) {
	for _, m := range f.all {
		if m.role == role {
			list = append(list, m)
		}
	}
	return list
}

// misbehave puts rules into force on one side, or on both where none is named. They
// are our own and valid; none at all ends the trouble.
func (f *fleet) misbehave(role string, rules ...refengine.Rule) {
	for _, m := range f.all {
		if role == "" || m.role == role {
			_ = m.SetFaults(rules...)
		}
	}
}

// claim takes the member for one action, if another of its side stays.
func (m *member) claim() bool {
	claims.Lock()
	defer claims.Unlock()
	free := 0
	for _, other := range m.fleet.all {
		if other.role == m.role && !other.claimed {
			free++
		}
	}
	if m.claimed || free < 2 {
		return false
	}
	m.claimed = true
	return true
}

func (m *member) free() {
	claims.Lock()
	defer claims.Unlock()
	m.claimed = false
}

// faultRules are all faults in all their forms, each as likely as the others,
// so that rate is the share of requests that meet one. Left out is KV of
// another prompt: only the engine could tell.
func faultRules(rate float64, c refengine.Connector) (rules []refengine.Rule) {
	if rate == 0 {
		return nil
	}
	var kinds [][]refengine.Rule
	for _, name := range refengine.FaultNames() {
		if fault := refengine.Fault(name); fault != refengine.WrongKey && !foreign(c, fault) {
			kinds = append(kinds, fault.Forms())
		}
	}
	for leg, faults := range ownFaults[c] {
		for _, fault := range faults {
			forms := fault.Forms()
			for i := range forms {
				forms[i].Leg = leg
			}
			kinds = append(kinds, forms)
		}
	}
	for _, forms := range kinds {
		for _, r := range forms {
			r.Probability = rate / float64(len(kinds)*len(forms))
			rules = append(rules, r)
		}
	}
	return rules
}

// hold lists what the engines still hold, by testbed.UsedBy or testbed.HeldBy.
func (f *fleet) hold(by func(who string, s refengine.Stats) []string) (list []string) {
	for _, m := range f.all {
		list = append(list, by(m.role+" engine "+m.urls[0], m.Stats())...)
	}
	return list
}

// counted is what the engines counted: what no proxy may make one do, by name; hand-offs that only
// an engine's own timeout freed; and all that were made.
func (f *fleet) counted() (harm map[string]int64, leaks, made int64) {
	harm = map[string]int64{}
	for _, m := range f.all {
		s := m.Stats()
		leaks, made = leaks+s.Leaks, made+s.Probes-s.NullHandoffs
		for name, n := range map[string]int64{
			"hand-offs used twice": s.Replays, "hand-offs used after their deadline": s.ExpiredPulls, "pulls of the wrong blocks": s.WrongBlocks,
			"KV of another prompt": s.KeyMismatches, "request ids used twice": s.DuplicateIDs, "requests at the wrong rank": s.RankMismatch,
			"requests that kill a real engine": s.Crashes, "KV of two prefill engines in one request": s.MixedPushes,
			"pages written after they were given away": s.FreedWrites, "legs that sample differently": s.SampledApart,
		} {
			if n > 0 {
				harm[name] += n
			}
		}
	}
	return harm, leaks, made
}
