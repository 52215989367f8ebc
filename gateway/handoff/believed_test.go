package handoff

import (
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// world is two prefill engines and a decode engine of two ranks, as they are, beside what the proxy
// knows of them.
type world struct {
	now     time.Time
	roster  *roster.Roster
	monitor *engine.Monitor
	makers  []*maker
	ranks   [2]*core
	role    int // of the decode engine: a reload changes it
	probes  []*kv
	pooled  []*kv
	sent    []*sent
}

// maker is a prefill engine.
type maker struct {
	key     string
	profile mooncake.Profile
	counts  bool // it counts what it frees unfetched
	freed   int
	start   float64
	process int // grows with each restart, of which the proxy has a sign at once, or with the next hand-off
	held    []*kv
}

// kv is the KV of a prompt.
type kv struct {
	by      *maker
	made    roster.Generation
	handoff *Handoff
	process int
	expires time.Time
	fetched bool
	gone    bool // given away: what is pulled is another prompt's
	dead    bool // its process is: a pull that was begun fails, and a later one may find another prompt's KV
	proven  bool // the proxy has seen that the process is gone
	prefix  int
}

// core makes the steps of a rank.
type core struct {
	asleep bool
	waits  []*sent
	cache  map[string]bool // by salt and prefix: whether it is wrong
}

// sent is a request that waits for its answer.
type sent struct {
	*kv
	pull   *engine.PendingPull
	piece  bool
	noted  int
	madeBy int // the process of the prefill engine when it was sent
	pulled bool
	wrong  bool

	deadWhenSent bool
}

func (w *world) tell(events ...roster.Event) {
	for _, e := range append(events, roster.Tick{}) {
		w.roster.Apply(e, w.now, nil)
	}
}

func (w *world) snapshot() *roster.Snapshot { return roster.Derive(w.roster) }

func (w *world) describe(m *maker) *roster.Engine {
	host := m.key[len("prefill "):]
	return &roster.Engine{ID: host, Role: roster.Prefill, Profile: &m.profile, Conf: config.Engine{},
		Target: &engine.Target{ID: host, URL: &url.URL{Scheme: "http", Host: host}, Rank: -1}, Found: roster.Found{Incarnation: "u"},
		Traffic: &engine.Traffic{}}
}

// liveness is that of a rank, under the role and with the numbers of now.
func (w *world) liveness(rank int) *engine.Liveness {
	role := []string{"decode", "aggregated"}[w.role%2]
	traffic := w.monitor.Traffic(role + " d:1")
	if role == "decode" {
		traffic.DistrustCache()
	}
	return traffic.Liveness((rank + w.role) % 2)
}

// replace gives the place of the proxy to another process, which knows nothing. What the engines
// were sent, they have.
func (w *world) replace() {
	w.roster, w.monitor = roster.New(), newMonitor()
	w.probes, w.pooled, w.sent, w.role = nil, nil, nil, 0
	for _, m := range w.makers {
		w.tell(roster.Entered{Engine: w.describe(m)}, roster.Health{Key: m.key, Status: engine.Status{Up: true, StartTime: m.start}})
	}
}

func newMonitor() *engine.Monitor {
	return engine.NewMonitor(engine.MonitorConfig{Registerer: prometheus.NewRegistry()})
}

// pass lets time go by in steps of at most a second, in which cores that are awake pull what waits
// and show that they work.
func (w *world) pass(d time.Duration) {
	for end := w.now.Add(d); w.now.Before(end); {
		w.now = w.now.Add(min(time.Second, end.Sub(w.now)))
		for _, m := range w.makers {
			for _, k := range m.held {
				if !k.fetched && !k.gone && !w.now.Before(k.expires) {
					k.gone, m.freed = true, m.freed+1
				}
			}
		}
		for rank, c := range w.ranks {
			if c.asleep {
				continue
			}
			w.liveness(rank).RecordSign(w.now)
			c.pullAll()
		}
	}
}

func (c *core) pullAll() {
	for _, s := range c.waits {
		at := fmt.Sprint(s.pull.Salt(), "/", s.prefix)
		if s.dead && !s.deadWhenSent { // there is nothing to pull
			continue
		}
		s.pulled, s.fetched = true, true
		s.wrong = s.gone || s.dead || c.cache[at]
		c.cache[at] = s.wrong
	}
	c.waits = nil
}

// begin writes a prefill call, which carries the generation of the engine.
func (w *world) begin(m *maker, prefix int) {
	k := &kv{by: m, made: w.snapshot().GenerationAt(m.key), process: m.process, expires: w.now.Add(time.Hour), prefix: prefix}
	w.probes, m.held = append(w.probes, k), append(m.held, k)
}

// answer has the oldest call answered, by the process that it was written to, which may have ended
// since.
func (w *world) answer() {
	k := w.probes[0]
	w.probes = w.probes[1:]
	budget, err := k.by.profile.HoldBudget()
	if err != nil {
		panic(err)
	}
	k.expires = w.now.Add(k.by.profile.KVHoldTimeout)
	k.handoff = &Handoff{Handoff: mooncake.NewHandoff(nil, w.now.Add(budget), k.expires)}
	w.tell(roster.Handed{Made: k.made, ID: fmt.Sprint("id", k.process)})
	w.pooled = append(w.pooled, k)
}

// send sends the oldest hand-off to a rank, if it may be used.
func (w *world) send(t *rapid.T, rank int, piece bool) {
	k := w.pooled[0]
	w.pooled = w.pooled[1:]
	gone, proven := w.snapshot().KVInDoubt(k.made)
	require.True(t, proven || !k.proven, "its process is gone, and its KV counts as held")
	if gone {
		return
	}
	if _, err := k.handoff.Acquire(w.now); err != nil {
		return
	}
	s := &sent{kv: k, piece: piece, noted: k.by.freed, madeBy: k.by.process, deadWhenSent: k.dead}
	r := &roster.Rank{Signs: w.liveness(rank), Target: &engine.Target{Rank: rank}}
	s.pull = k.handoff.AwaitFirstEvent(r, mooncake.Chat, w.now, piece)
	w.sent, w.ranks[rank].waits = append(w.sent, s), append(w.ranks[rank].waits, s)
}

// judge says whether the client gets an answer.
func (w *world) judge(s *sent) (believed bool, answer mooncake.Answer) {
	answer = s.pull.FirstEvent(w.now)
	if gone, _ := w.snapshot().KVInDoubt(s.made); s.by.counts {
		answer.Freed = mooncake.FreedNone
		if gone || s.by.freed != s.noted || s.by.process != s.madeBy {
			answer.Freed = mooncake.FreedSome
		}
	}
	if believed = !answer.MayBeAnotherPrompts(); !believed {
		s.pull.Withhold()
	}
	s.pull.End(w.now, true)
	return believed, answer
}

// restart gives the engine another process, of which the proxy has a sign at once.
func (w *world) restart(m *maker, sign string) {
	m.start++
	up := roster.Health{Key: m.key, Status: engine.Status{Up: true, StartTime: m.start}}
	switch sign {
	case "refused":
		w.tell(roster.Health{Key: m.key, IsRefused: true}, up)
	case "start":
		w.tell(roster.Lived{Key: m.key, Start: m.start})
	case "moved":
		up.Status.Moved = engine.Moved{From: "a", To: "b", At: w.now}
		w.tell(up)
	case "left":
		w.tell(roster.Left{Key: m.key, Incarnation: "u"}, roster.Entered{Engine: w.describe(m)}, up)
	case "removed":
		w.tell(roster.Removed{Key: m.key}, roster.Entered{Engine: w.describe(m)}, up)
	case "emptied":
		w.tell(roster.Emptied{Keys: []string{m.key}})
	}
	m.process++
	for _, k := range m.held {
		k.dead, k.proven = true, k.proven || sign != "moved" && sign != "removed" && sign != "emptied" // else the process of before may still run
	}
}

// Requests are prefilled, sent, answered event by event or in one piece, and given up, while cores
// stand still for less or more than the hold of their KV, prefill engines restart, and reloads
// describe engines anew. Whatever the order: no answer is believed that is made of another prompt's
// KV, and what a process has made that is certainly gone counts as gone.
func TestKVThatWasGivenAwayIsNeverBelieved(t *testing.T) {
	for range 50 { // a hundred histories each
		rapid.Check(t, aHistoryOfHandOffs)
	}
}

func aHistoryOfHandOffs(t *rapid.T) {
	w := &world{now: time.Now(), roster: roster.New(), monitor: newMonitor()}
	for i, hold := range []time.Duration{30 * time.Second, 2 * time.Minute} {
		m := &maker{key: fmt.Sprintf("prefill p%d:1", i), counts: i == 0, start: 1,
			profile: mooncake.Profile{Connector: mooncake.NIXLPull, KVHoldTimeout: hold}.WithDefaults()}
		w.makers = append(w.makers, m)
		w.tell(roster.Entered{Engine: w.describe(m)}, roster.Health{Key: m.key, Status: engine.Status{Up: true, StartTime: 1}})
	}
	for i := range w.ranks {
		w.ranks[i] = &core{cache: map[string]bool{}}
	}
	someEngine := rapid.SampledFrom(w.makers)
	someRank, somePrefix := rapid.IntRange(0, 1), rapid.IntRange(0, 1)
	someTime := rapid.SampledFrom([]time.Duration{time.Millisecond, 5 * time.Second, 12 * time.Second, 16 * time.Second, 31 * time.Second,
		46 * time.Second, 2 * time.Minute})
	signs := rapid.SampledFrom([]string{"refused", "start", "moved", "left", "removed", "emptied"})
	begin := func(t *rapid.T) { w.begin(someEngine.Draw(t, "engine"), somePrefix.Draw(t, "prefix")) }
	take := func(t *rapid.T) *sent {
		if len(w.sent) == 0 {
			t.Skip()
		}
		i := rapid.IntRange(0, len(w.sent)-1).Draw(t, "request")
		s := w.sent[i]
		w.sent = append(w.sent[:i:i], w.sent[i+1:]...)
		return s
	}
	t.Repeat(map[string]func(*rapid.T){
		"time passes":      func(t *rapid.T) { w.pass(someTime.Draw(t, "for")) },
		"a prefill begins": begin,
		"a prefill is answered": func(t *rapid.T) {
			if len(w.probes) == 0 {
				t.Skip()
			}
			w.answer()
		},
		"a hand-off is sent": func(t *rapid.T) {
			if len(w.pooled) == 0 {
				begin(t)
				for len(w.probes) > 0 {
					w.answer()
				}
			}
			w.send(t, someRank.Draw(t, "rank"), rapid.Bool().Draw(t, "in one piece"))
		},
		"an answer comes": func(t *rapid.T) {
			s := take(t)
			if !s.pulled {
				w.sent = append(w.sent, s)
				return
			}
			believed, answer := w.judge(s)
			require.False(t, s.wrong && believed, "%+v", answer)
		},
		"a call is given up": func(t *rapid.T) { take(t).pull.End(w.now, false) },
		"a core stands still for": func(t *rapid.T) {
			c := w.ranks[someRank.Draw(t, "rank")]
			c.asleep = true
			w.pass(someTime.Draw(t, "for"))
			c.asleep = rapid.Bool().Draw(t, "longer")
		},
		"cores go on": func(*rapid.T) {
			for _, c := range w.ranks {
				c.asleep = false
			}
			w.pass(time.Millisecond)
		},
		"an engine restarts":                 func(t *rapid.T) { w.restart(someEngine.Draw(t, "engine"), signs.Draw(t, "sign")) },
		"an engine is described anew":        func(t *rapid.T) { w.tell(roster.Entered{Engine: w.describe(someEngine.Draw(t, "engine"))}) },
		"a reload changes the decode engine": func(*rapid.T) { w.role++ },
		"the proxy is replaced":              func(*rapid.T) { w.replace() },
	})
}
