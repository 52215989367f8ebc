package gateway_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/config"
	"evenkeel/gateway/detect"
	"evenkeel/mooncake"
)

var seed = flag.Uint64("losses", 1, "seed of the fleets that lose hand-offs")

// losses is a fleet in which engines lose all their hand-offs.
type losses struct {
	connector refengine.Connector
	fault     refengine.Fault // of each hand-off that is lost
	prefills  int
	decodes   int
	sickP     []int
	sickD     []int
	turns     bool // engines get requests in turn; else the proxy's own policies choose
}

func (l losses) String() string {
	policy := "own policies"
	if l.turns {
		policy = "in turn"
	}
	return fmt.Sprintf("%s, %s, %d prefill, %v sick, %d decode, %v sick, %s", l.connector, l.fault, l.prefills, l.sickP, l.decodes, l.sickD,
		policy)
}

// drawLosses draws a fleet of which an engine of each side works.
func drawLosses(rng *rand.Rand, sides string, connector refengine.Connector, fault refengine.Fault) losses {
	l := losses{connector: connector, fault: fault, prefills: 2 + rng.IntN(3), decodes: 2 + rng.IntN(3), turns: rng.IntN(2) == 0}
	draw := func(n int) []int { return slices.Sorted(slices.Values(rng.Perm(n)[:1+rng.IntN(n-1)])) }
	if sides != "decode" {
		l.sickP = draw(l.prefills)
	}
	if sides != "prefill" {
		l.sickD = draw(l.decodes)
	}
	return l
}

// lossFaults are the ways in which the engines of a connector show that KV has not come.
var lossFaults = map[refengine.Connector][]refengine.Fault{
	refengine.NIXLPull:     {refengine.TransferFails, refengine.Internal, refengine.Hang},
	refengine.VLLMMooncake: {refengine.TransferFails, refengine.Hang},
	refengine.SGLang:       {refengine.TransferFails, refengine.Hang},
	refengine.NIXLPush:     {refengine.Internal, refengine.Hang},
}

// lossy is a running fleet of losses.
type lossy struct {
	*cluster
	losses
	asked atomic.Int64
	lost  []atomic.Int64 // hand-offs, by decode engine
}

func (l losses) start(t *testing.T) *lossy {
	t.Helper()
	k := &lossy{losses: l, lost: make([]atomic.Int64, l.decodes)}
	o := options{
		prefill: make([]refengine.Config, l.prefills), decode: make([]refengine.Config, l.decodes), dirty: true,
		profile: mooncake.Profile{FirstEventTimeout: patience},
	}
	if l.fault == refengine.Hang {
		o.profile.FirstEventTimeout = 3 * time.Second
	}
	for i := range o.decode {
		o.decode[i].KV.Tokens = 1 << 20 // more than requests that hang and leak can fill
		o.decode[i].Hooks.OnStrike = func(uint64, refengine.Rule) { k.lost[i].Add(1) }
	}
	o.prefill, o.decode, o.configure = refclient.Early(t, l.connector, o.prefill, o.decode, func(cfg *config.Config) {
		cfg.Health.Canary = config.Default().Health.Canary // it shows that engines which lose hand-offs compute
		cfg.Prefill.Retry.Budget = 1
		if l.turns {
			turns(cfg)
		}
	})
	k.cluster = start(t, o)
	k.allUp()
	t.Cleanup(func() {
		for _, r := range k.Records() {
			if t.Failed() && r.Outcome != "ok" {
				t.Log(k.get("/decisions?id=" + r.ID).Body)
			}
		}
	})
	return k
}

// ruin has the sick engines lose all their hand-offs.
func (k *lossy) ruin() {
	k.Helper()
	for d, e := range k.Decode {
		var rules []refengine.Rule
		for p, from := range k.Prefill {
			if slices.Contains(k.sickP, p) || slices.Contains(k.sickD, d) {
				r := refengine.Rule{Fault: k.fault, Leg: refengine.LegDecode, From: refclient.AddressOf(from)}
				if k.fault == refengine.Hang {
					r.Phase = refengine.PhaseAfterHeaders
				}
				rules = append(rules, r)
			}
		}
		require.NoError(k, e.SetFaults(rules...))
	}
}

func (k *lossy) heal() {
	k.Helper()
	for _, e := range k.Decode {
		require.NoError(k, e.SetFaults())
	}
}

// ask has so many requests judged, eight at a time, and counts the verdicts. It ends early once
// enough is true.
func (k *lossy) ask(n int, enough func() bool) (verdicts map[string]int) {
	k.Helper()
	verdicts = map[string]int{}
	var mu sync.Mutex
	var clients sync.WaitGroup
	var left atomic.Int64
	left.Store(int64(n))
	for range 8 {
		clients.Go(func() {
			for left.Add(-1) >= 0 {
				i := k.asked.Add(1)
				got := k.Judge(fmt.Sprintf("request %d of many", i), [...]string{"", streamed}[i%2])
				mu.Lock()
				verdicts[got]++
				mu.Unlock()
				if enough != nil && enough() {
					left.Store(0)
				}
			}
		})
	}
	clients.Wait()
	return verdicts
}

// pairs are what the status says of hand-offs.
func (k *lossy) pairs() (all []board.PairStatus) {
	for _, m := range k.gw.Status(k.Context()).Dispatch.Models {
		all = append(all, m.Pairs...)
	}
	return all
}

// out are the addresses of engines that get no hand-offs, sorted.
func (k *lossy) out() (all []string) {
	for _, p := range k.pairs() {
		if p.Quarantined && (p.Prefiller == "" || p.Engine == "") {
			all = append(all, strings.TrimPrefix(p.Prefiller, "prefill ")+p.Engine)
		}
	}
	slices.Sort(all)
	return all
}

// sick are the addresses of the engines that lose hand-offs, sorted.
func (k *lossy) sick() (all []string) {
	for _, i := range k.sickP {
		all = append(all, refclient.AddressOf(k.Prefill[i]))
	}
	for _, i := range k.sickD {
		all = append(all, refclient.AddressOf(k.Decode[i]))
	}
	slices.Sort(all)
	return all
}

// sent is how many hand-offs each sick engine has got while it was sick. Canaries are none.
func (k *lossy) sent() (of map[string]int64) {
	of = map[string]int64{}
	for _, i := range k.sickP {
		of[refclient.AddressOf(k.Prefill[i])] = k.Prefill[i].Stats().Probes
	}
	for _, i := range k.sickD {
		of[refclient.AddressOf(k.Decode[i])] = k.lost[i].Load()
	}
	return of
}

// quarantines is how often engines were taken out, or stayed out after a trial, by address.
func (k *lossy) quarantines() (of map[string]float64) {
	of = map[string]float64{}
	page := k.Page()
	for _, address := range k.sick() {
		of[address] = refclient.ValueOf(k.T, page, fmt.Sprintf(`evenkeel_pair_quarantines_total{engine="",prefiller="prefill %s"}`, address)) +
			refclient.ValueOf(k.T, page, fmt.Sprintf(`evenkeel_pair_quarantines_total{engine="%s",prefiller=""}`, address))
	}
	return of
}

// nobodyIsDown holds that all engines are in service as far as their health goes, and always were.
func (k *lossy) nobodyIsDown() {
	k.Helper()
	for _, e := range k.gw.Status(k.Context()).Engines {
		require.True(k, e.Up, "%s: %+v", e.ID, e)
	}
	require.Zero(k, k.Sum("evenkeel_engine_outages_total"), k.Page)
}

// incidents are those of lost hand-offs, by kind, with the text of each.
func (k *lossy) incidents() map[detect.Kind]string {
	var d struct{ Incidents []detect.Incident }
	r := k.get("/live?once")
	require.Equal(k, http.StatusOK, r.Status, r.Body)
	require.NoError(k, json.Unmarshal([]byte(r.Body), &d))
	of := map[detect.Kind]string{}
	for _, i := range d.Incidents {
		switch i.Kind {
		case detect.HandoffsLost, detect.PairBroken, detect.NoHandoffs:
			if i.UntilMs == 0 {
				of[i.Kind] += i.What + " " + i.Named + "\n"
			}
		}
	}
	return of
}

// names are the engines whose addresses are in a text, sorted.
func (k *lossy) names(text string) (all []string) {
	for _, e := range k.All() {
		if strings.Contains(text, refclient.AddressOf(e)) {
			all = append(all, refclient.AddressOf(e))
		}
	}
	slices.Sort(all)
	return all
}

// Engines of one side lose all their hand-offs. They get none but trials, no other engine is out,
// clients get right answers, and once hand-offs arrive again, the engines get as many as before.
func TestEnginesThatLoseTheirHandoffsGetTrialsOnly(t *testing.T) {
	t.Parallel()
	for connector, faults := range lossFaults {
		for _, fault := range faults {
			for i, sides := range []string{"prefill and decode", "prefill", "decode"} {
				if i > 0 && fault != faults[0] {
					break // the first fault meets each side alone
				}
				l := drawLosses(rand.New(rand.NewPCG(*seed, uint64(len(sides)+len(connector)+100*len(fault)))), sides, connector, fault)
				t.Run(l.String(), func(t *testing.T) {
					t.Parallel()
					l.areFound(t)
				})
			}
		}
	}
}

func (l losses) areFound(t *testing.T) {
	k := l.start(t)
	require.Equal(t, map[string]int{"right": 40}, k.ask(40, nil))
	k.ruin()
	verdicts := k.ask(600, func() bool { return slices.Equal(k.sick(), k.out()) })
	t.Logf("until they are out: %v", verdicts)
	require.Equal(t, k.sick(), k.out(), "after %v: %+v", verdicts, k.pairs())
	k.Accounted()
	for _, r := range k.Records() {
		if l.fault == refengine.Internal {
			break // of the first two 500s, without a text and at engines that have lost nothing yet, the request may be the cause
		}
		require.True(t, r.Outcome == "ok" || r.Attempts == config.Default().Prefill.Retry.Attempts, "ended before its last attempt: %+v", r)
	}
	wrong := -verdicts["right"]
	for _, n := range verdicts {
		wrong += n
	}
	before, trials := k.sent(), k.quarantines()
	require.Equal(t, map[string]int{"right": 100}, k.ask(100, nil))
	k.Accounted()
	after, since := k.sent(), k.quarantines()
	for address, n := range after {
		t.Logf("%s: %d of 100, %v trials", address, n-before[address], since[address]-trials[address])
		require.LessOrEqual(t, float64(n-before[address]), since[address]-trials[address]+1, "%s gets more than its trials", address)
	}
	require.Equal(t, k.sick(), k.out())
	k.nobodyIsDown()
	k.Eventually("the incident names the sick", func() bool {
		return slices.Equal(k.sick(), k.names(k.incidents()[detect.HandoffsLost]))
	})
	require.Empty(t, k.incidents()[detect.PairBroken])
	require.Empty(t, k.incidents()[detect.NoHandoffs])
	require.LessOrEqual(t, wrong, 12, "%v", verdicts)

	k.heal()
	var healed []*refengine.Engine
	for _, i := range k.sickP {
		healed = append(healed, k.Prefill[i])
	}
	for _, i := range k.sickD {
		healed = append(healed, k.Decode[i])
	}
	requests := map[*refengine.Engine]int64{}
	for _, e := range healed {
		requests[e] = e.Stats().Requests
	}
	k.Eventually("the healed get requests", func() bool {
		require.Equal(t, map[string]int{"right": 40}, k.ask(40, nil))
		return !slices.ContainsFunc(healed, func(e *refengine.Engine) bool { return e.Stats().Requests-requests[e] < 8 })
	})
	require.Empty(t, k.out())
	k.nobodyIsDown()
}

// If no hand-off arrives anywhere, it cannot be told who is sick. Nobody is out, and clients are
// told.
func TestNobodyIsOutWhereNoHandoffArrives(t *testing.T) {
	t.Parallel()
	for connector, faults := range lossFaults {
		for _, fault := range faults {
			all := []losses{
				{prefills: 1, decodes: 1, sickP: []int{0}}, {prefills: 1, decodes: 3, sickP: []int{0}}, {prefills: 3, decodes: 1, sickD: []int{0}},
				{prefills: 2, decodes: 3, sickP: []int{0, 1}, turns: true}, {prefills: 3, decodes: 2, sickD: []int{0, 1}},
			}
			for _, i := range rand.New(rand.NewPCG(*seed, uint64(len(connector)+100*len(fault)))).Perm(len(all))[:2] {
				l := all[i]
				l.connector, l.fault = connector, fault
				t.Run(l.String(), func(t *testing.T) {
					t.Parallel()
					l.areNobodys(t)
				})
			}
		}
	}
}

func (l losses) areNobodys(t *testing.T) {
	k := l.start(t)
	require.Equal(t, map[string]int{"right": 20}, k.ask(20, nil))
	k.ruin()
	told := "502"
	if l.fault == refengine.Hang {
		told = "504"
	}
	require.Equal(t, map[string]int{told: 16}, k.ask(16, nil))
	require.Empty(t, k.out())
	k.nobodyIsDown()
	var all []string
	for _, e := range k.All() {
		all = append(all, refclient.AddressOf(e))
	}
	slices.Sort(all)
	k.Eventually("the incident names both sides", func() bool {
		_ = k.ask(8, nil)
		return slices.Equal(all, k.names(k.incidents()[detect.NoHandoffs]))
	})
	require.Empty(t, k.incidents()[detect.HandoffsLost])
	require.Empty(t, k.incidents()[detect.PairBroken])
	k.heal()
	k.Eventually("all get requests again", func() bool {
		_ = k.ask(40, nil)
		return k.ask(40, nil)["right"] == 40 && len(k.pairs()) == 0
	})
}
