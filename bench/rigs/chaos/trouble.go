package main

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"evenkeel/bench/lab/refengine"
)

// actions are done beside each other until they are stopped, and counted.
type actions struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu     sync.Mutex
	counts map[string]int
}

func newActions(ctx context.Context) (context.Context, *actions) {
	ctx, cancel := context.WithCancel(ctx)
	return ctx, &actions{cancel: cancel, counts: map[string]int{}}
}

func (a *actions) count(what string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.counts[what]++
}

// stop waits until every action has been undone and returns how many of each there
// were.
func (a *actions) stop() map[string]int {
	a.cancel()
	a.wg.Wait()
	return maps.Clone(a.counts)
}

// trouble is what operators and machines do while clients are served. Every
// action undoes what it did before it ends.
type trouble struct {
	f     *fleet
	p     *proxy
	crowd *crowd
	files sync.Mutex // one change of files at a time
	*actions
}

func startTrouble(ctx context.Context, s scenario, seed uint64, f *fleet, p *proxy, crowd *crowd) *trouble {
	ctx, actions := newActions(ctx)
	t := &trouble{f: f, p: p, crowd: crowd, actions: actions}
	if s.rate > 0 {
		f.misbehave("", f.rules...)
	}
	if s.busy > 0 {
		f.misbehave("prefill", refengine.Rule{Fault: refengine.Busy, Leg: refengine.LegProbe, Probability: s.busy})
	}
	if s.heads > 0 {
		f.misbehave("decode", refengine.Rule{Fault: refengine.Reset, Leg: refengine.LegDecode, Probability: s.heads})
	}
	if s.operators {
		t.wg.Go(func() { t.operate(ctx, rand.New(rand.NewPCG(seed, 3))) })
	}
	if s.killAll {
		t.wg.Go(func() { t.killAll(ctx) })
	}
	return t
}

// asked counts an action by how the proxy took it.
func (t *trouble) asked(what, method, path string, body any) {
	if status, _, err := t.p.Ask(method, path, body); err != nil {
		what += ": no answer"
	} else if status/100 != 2 {
		what += fmt.Sprint(": ", status)
	}
	t.count(what)
}

// operate draws actions until ctx ends.
func (t *trouble) operate(ctx context.Context, rng *rand.Rand) {
	actions := []struct {
		weight int
		claims bool // the engine to which it does something
		do     func(ctx context.Context, m *member, pause time.Duration, rng *rand.Rand)
	}{
		{4, true, t.kill}, {3, true, t.remove}, {4, true, t.drain}, {2, true, t.surge}, {2, false, t.policy}, {1, false, t.keys}, {2, false, t.reload}, {1, true, t.stand},
	}
	sum := 0
	for _, a := range actions {
		sum += a.weight
	}
	for pause(ctx, time.Duration(100+rng.IntN(500))*time.Millisecond) {
		n, own := rng.IntN(sum), rand.New(rand.NewPCG(rng.Uint64(), 0))
		m, span := t.f.all[rng.IntN(len(t.f.all))], time.Duration(200+rng.IntN(1500))*time.Millisecond
		for _, a := range actions {
			if n -= a.weight; n < 0 {
				t.wg.Go(func() {
					if a.claims {
						if !m.claim() {
							return
						}
						defer m.free()
					}
					a.do(ctx, m, span, own)
				})
				break
			}
		}
	}
}

// kill crashes an engine and starts it again.
func (t *trouble) kill(ctx context.Context, m *member, span time.Duration, _ *rand.Rand) {
	t.count("killed a " + m.role + " engine")
	m.Kill()
	pause(ctx, span)
	t.revive(m)
	pause(ctx, time.Second) // it is up for a while before another of its side goes
}

// stand makes the core of an engine stand still, in half of the cases for longer than prefill
// engines keep KV without a sign.
func (t *trouble) stand(ctx context.Context, m *member, span time.Duration, rng *rand.Rand) {
	if hold := m.Config().KV.HoldTimeout; rng.IntN(2) == 0 {
		span = hold * 5 / 4
		t.count("the core of a " + m.role + " engine stood still for longer than KV is kept")
	} else {
		t.count("the core of a " + m.role + " engine stood still for a moment")
	}
	m.StandStill(span)
	pause(ctx, span)
	m.StandStill(0) // also if the run is over
}

func (t *trouble) revive(m *member) {
	if !m.revive() {
		t.count("an engine could not start again")
	}
}

func hostPort(url string) string { return strings.TrimPrefix(url, "http://") }

// remove takes an engine from the fleet and adds it again.
func (t *trouble) remove(ctx context.Context, m *member, span time.Duration, _ *rand.Rand) {
	for _, u := range m.urls {
		t.asked("removed an engine", http.MethodDelete, "/workers/"+hostPort(u)+"?role="+m.role, nil)
	}
	pause(ctx, span)
	t.add(m)
}

func (t *trouble) add(m *member) {
	for _, u := range m.urls {
		body := map[string]any{"role": m.role, "url": u, "profile": m.profile()}
		if m.role == "decode" {
			body["group"], body["slots"] = m.Config().Group, t.p.settings.slots
		}
		if m.internal {
			body["ranks"] = m.Config().DPSize
		}
		t.asked("added an engine", http.MethodPost, "/workers", body)
	}
}

// drain has an engine, or one of its ranks, take no new work for a while. With
// a deadline what runs there is cut off, and goes on elsewhere.
func (t *trouble) drain(ctx context.Context, m *member, span time.Duration, rng *rand.Rand) {
	what, path := "an engine", "/workers/"+hostPort(m.urls[0])
	if n := m.Config().DPSize; n > 1 && rng.IntN(2) == 0 {
		what = "a rank"
		if m.internal {
			path += fmt.Sprint("/", rng.IntN(n))
		} else {
			path = "/workers/" + hostPort(m.urls[rng.IntN(n)])
		}
	}
	path += "/drain?role=" + m.role
	var limit any
	if rng.IntN(2) == 0 {
		limit = map[string]string{"deadline": (span / 3).String()}
		what += " with a deadline"
	}
	t.asked("drained "+what, http.MethodPost, path, limit)
	pause(ctx, span)
	t.asked("undrained "+what, http.MethodDelete, path, nil)
}

// surge has an engine refuse most of what it gets, for a moment.
func (t *trouble) surge(ctx context.Context, m *member, span time.Duration, rng *rand.Rand) {
	rules := []refengine.Rule{
		{Fault: refengine.Busy}, {Fault: refengine.Throttle}, {Fault: refengine.Internal}, {Fault: refengine.Slow, DelayMS: 100}, {Fault: refengine.Recomputed, AfterTokens: 2},
	}
	rule := rules[rng.IntN(len(rules))]
	if foreign(m.Config().Connector, rule.Fault) {
		rule = rules[0]
	}
	rule.Probability = 0.7
	t.count("surge of " + string(rule.Fault))
	_ = m.SetFaults(rule) // valid, as listed
	pause(ctx, span/2)
	_ = m.SetFaults(t.f.rules...)
}

func (t *trouble) policy(_ context.Context, _ *member, _ time.Duration, rng *rand.Rand) {
	list := []string{"evenkeel", "br0", "brh", "jsq-kv", "pjsq-kv", "rr", "p2c", "random"}
	t.asked("changed the policy", http.MethodPut, "/policy", map[string]string{"policy": list[rng.IntN(len(list))]})
}

// keys has the guest's key come and go, and the file be spoiled between.
func (t *trouble) keys(ctx context.Context, _ *member, span time.Duration, rng *rand.Rand) {
	t.files.Lock()
	defer t.files.Unlock()
	if rng.IntN(3) == 0 {
		t.count("spoiled the key file")
		_ = t.p.settings.spoil("keys.yaml")
	} else {
		t.count("took a key away")
		_ = t.p.settings.writeKeys(callers[:len(callers)-1])
	}
	pause(ctx, 2*time.Second+span)
	_ = t.p.settings.writeKeys(callers)
}

// reload changes the config file and says so, by signal or through the admin
// listener. A bad file changes nothing.
func (t *trouble) reload(ctx context.Context, _ *member, _ time.Duration, rng *rand.Rand) {
	t.files.Lock()
	defer t.files.Unlock()
	tell := func(what string) {
		if rng.IntN(2) == 0 {
			t.count(what + " and sent SIGHUP")
			_ = t.p.Signal(syscall.SIGHUP)
		} else {
			t.asked(what+" and asked for a reload", http.MethodPost, "/reload", nil)
		}
		pause(ctx, 300*time.Millisecond)
	}
	if rng.IntN(2) == 0 {
		_ = t.p.settings.spoil("evenkeel.yaml")
		tell("spoiled the config")
	} else {
		t.p.settings.pool += 16
	}
	_ = t.p.settings.write()
	tell("changed the config")
}

// killAll kills each decode engine once, in the middle of its answers. What runs
// at a kill has ended before the next: two engines that die under one request
// would end it, for it may be why.
func (t *trouble) killAll(ctx context.Context) {
	victims, ended := t.f.of("decode"), 0
	for _, m := range victims {
		for m.Stats().Running < int64(t.crowd.s.streams/(2*len(victims))) || int(t.crowd.ended.Load()) < ended {
			if !pause(ctx, 10*time.Millisecond) {
				return
			}
		}
		pause(ctx, 500*time.Millisecond)                        // into the middle
		ended = int(t.crowd.ended.Load()) + 2*t.crowd.s.streams // the longest answer outlives two of the shortest
		t.count(fmt.Sprintf("killed a decode engine under %d streams", m.Stats().Running))
		m.Kill()
		pause(ctx, 2*time.Second)
		t.revive(m)
	}
}
