package delivery

import (
	"cmp"
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/engine/circuit"
)

// A fleet under load, in which some engines or connections lose all hand-offs. As in the proxy, a
// prefill engine that is out gets one prompt at times, hand-offs go to the decode engine with the
// fewest, and a request whose hand-off was lost avoids both engines.
type fleet struct {
	t                 *rapid.T
	rng               *rand.Rand
	prefills, decodes []string
	sick              map[Link]bool // links that lose hand-offs
	healed            bool
	detect            time.Duration // after which a lost hand-off is known to be lost
	early             bool          // the decode engine is chosen before the prefill
	table             Table
	now               time.Time
	events            events
	ids               uint64
	running           map[string]int       // hand-offs under way, by decode engine
	trialAt           map[string]time.Time // when prefill engines that are out get the next prompt
	lost              map[Link][]time.Time // by link, when hand-offs were known to be lost
	sent              map[Link][]time.Time
	outSince, outAt   map[Link]time.Time // who is out, and when each was first out
	longest           map[Link]time.Duration
	requests, failed  int
	subjectsEverOut   map[Link]bool
	every             time.Duration // between two requests
}

type event struct {
	at time.Time
	do func()
}
type events []event

func (e events) Len() int           { return len(e) }
func (e events) Less(i, j int) bool { return e[i].at.Before(e[j].at) }
func (e events) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)        { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

func (f *fleet) after(d time.Duration, do func()) { heap.Push(&f.events, event{f.now.Add(d), do}) }

func (f *fleet) between(least, most time.Duration) time.Duration {
	return least + time.Duration(f.rng.Int64N(int64(most-least)))
}

func (f *fleet) run(until time.Time) {
	for len(f.events) > 0 && !f.events[0].at.After(until) {
		e := heap.Pop(&f.events).(event)
		f.now = e.at
		e.do()
	}
	f.now = until
}

func (f *fleet) carryOut(changes []Change) {
	for _, c := range changes {
		if c.Length > 0 {
			f.subjectsEverOut[c.Subject] = true
			if _, isOut := f.outSince[c.Subject]; !isOut {
				f.outSince[c.Subject] = f.now
			}
			if _, was := f.outAt[c.Subject]; !was {
				f.outAt[c.Subject] = f.now
			}
		} else {
			f.longest[c.Subject] = max(f.longest[c.Subject], f.now.Sub(f.outSince[c.Subject]))
			delete(f.outSince, c.Subject)
		}
		if c.Subject.Engine == "" { // what the dispatcher tells the prefill scheduler
			f.trialAt[c.Subject.Prefiller] = time.Time{}
			if c.Length > 0 {
				f.trialAt[c.Subject.Prefiller] = f.now.Add(c.Length)
			}
		}
	}
}

// prefiller chooses a prefill engine as the scheduler does: one that takes prompts and was not
// tried, and else any.
func (f *fleet) prefiller(tried []string) string {
	takes := without(f.prefills, func(p string) bool { return f.now.Before(f.trialAt[p]) })
	takes = without(takes, func(p string) bool { return slices.Contains(tried, p) })
	p := takes[f.rng.IntN(len(takes))]
	if !f.trialAt[p].IsZero() {
		f.trialAt[p] = f.now.Add(circuit.MaxOut)
	}
	return p
}

// decode chooses the decode engine with the fewest hand-offs, of those that the board would choose.
func (f *fleet) decode(prefiller string, tried []string) string {
	usable := without(f.decodes, func(d string) bool { return !f.table.AllowsEngine(d, f.now) })
	usable = without(usable, func(d string) bool { return !f.table.Allows(Link{prefiller, d}, f.now) })
	usable = without(usable, func(d string) bool { return slices.Contains(tried, d) })
	return slices.MinFunc(usable, func(a, b string) int { return cmp.Compare(f.running[a], f.running[b]) })
}

// without returns the engines that are not unwanted, or all of them if none would be left.
func without(engines []string, unwanted func(string) bool) []string {
	if wanted := slices.DeleteFunc(slices.Clone(engines), unwanted); len(wanted) > 0 {
		return wanted
	}
	return engines
}

func (f *fleet) arrival(every time.Duration) {
	f.requests++
	f.attempt(nil, nil)
	f.after(time.Duration(f.rng.ExpFloat64()*float64(every)), func() { f.arrival(every) })
}

func (f *fleet) attempt(triedPrefills, triedDecodes []string) {
	const attempts = 3
	if len(triedPrefills) == attempts {
		f.failed++
		return
	}
	p := f.prefiller(triedPrefills)
	send := func() {
		l := Link{p, f.decode(p, triedDecodes)}
		f.ids++
		id, sent := f.ids, f.now
		f.table.Sent(l, id, sent)
		f.sent[l] = append(f.sent[l], sent)
		f.running[l.Engine]++
		if f.sick[l] && !f.healed {
			f.after(f.detect, func() {
				f.running[l.Engine]--
				f.lost[l] = append(f.lost[l], f.now)
				f.carryOut(f.table.Lost(l, id, sent, f.now))
				f.attempt(append(triedPrefills, p), append(triedDecodes, l.Engine))
			})
			return
		}
		f.after(f.between(20*time.Millisecond, 300*time.Millisecond), func() {
			f.carryOut(f.table.Arrived(l, sent, f.now))
			f.after(f.between(500*time.Millisecond, 8*time.Second), func() { f.running[l.Engine]-- })
		})
	}
	if f.early {
		send()
		return
	}
	f.after(f.between(50*time.Millisecond, time.Second), send)
}

// expected returns who is to blame: the engines all of whose links are sick, and else the links.
func (f *fleet) expected() map[Link]bool {
	want := map[Link]bool{}
	for _, p := range f.prefills {
		if all := !slices.ContainsFunc(f.decodes, func(d string) bool { return !f.sick[Link{p, d}] }); all {
			want[Link{Prefiller: p}] = true
		}
	}
	for _, d := range f.decodes {
		if all := !slices.ContainsFunc(f.prefills, func(p string) bool { return !f.sick[Link{p, d}] }); all {
			want[Link{Engine: d}] = true
		}
	}
	for l := range f.sick {
		if !want[Link{Prefiller: l.Prefiller}] && !want[Link{Engine: l.Engine}] {
			want[l] = true
		}
	}
	return want
}

func names(prefix string, n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprint(prefix, i))
	}
	return all
}

// Whoever loses hand-offs is out, nobody else is for longer than a trial, and all have their share
// again once they are healed.
func TestWhoLosesHandoffsIsOut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := &fleet{
			t: t, rng: rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1)),
			prefills: names("p", rapid.IntRange(1, 8).Draw(t, "prefill engines")),
			decodes:  names("d", rapid.IntRange(1, 8).Draw(t, "decode engines")),
			sick:     map[Link]bool{}, running: map[string]int{}, trialAt: map[string]time.Time{}, lost: map[Link][]time.Time{},
			sent: map[Link][]time.Time{}, outSince: map[Link]time.Time{}, outAt: map[Link]time.Time{},
			longest:         map[Link]time.Duration{},
			subjectsEverOut: map[Link]bool{}, now: time.Unix(1e9, 0),
		}
		// How soon a loss is known, by connector: an engine that fails at once says so, and
		// silence ends with first_event_timeout, or with the hold of the prefill engine.
		connector := rapid.SampledFrom([]string{"nixl-pull", "vllm-mooncake", "sglang"}).Draw(t, "connector")
		f.early = connector == "sglang"
		f.detect = 5 * time.Millisecond
		silent := rapid.Bool().Draw(t, "silent")
		if silent {
			f.detect = map[string]time.Duration{"nixl-pull": 25 * time.Second}[connector]
			f.detect = cmp.Or(f.detect, 60*time.Second)
		}
		mine, others := f.prefills, f.decodes
		link := func(a, b string) Link { return Link{a, b} }
		if rapid.Bool().Draw(t, "decode engines are sick") {
			mine, others = f.decodes, f.prefills
			link = func(a, b string) Link { return Link{b, a} }
		}
		k := rapid.IntRange(1, len(mine)).Draw(t, "sick")
		partners := len(others)
		if rapid.Bool().Draw(t, "with some only") {
			partners = rapid.IntRange(1, len(others)).Draw(t, "with")
		}
		for _, engine := range mine[:k] {
			for _, other := range others[:partners] {
				f.sick[link(engine, other)] = true
			}
		}
		every := time.Duration(rapid.SampledFrom([]int{20, 100, 300}).Draw(t, "ms")) * time.Millisecond
		f.every = every

		f.healed = true // all work first
		f.arrival(every)
		f.run(f.now.Add(20 * time.Second))
		require.Empty(t, f.subjectsEverOut)
		f.healed = false
		links := len(f.prefills) * len(f.decodes)
		f.run(f.now.Add(2*f.detect + 40*time.Second + time.Duration(20*links)*every))

		if len(f.sick) == links { // nothing works: it cannot be told who is sick
			require.Empty(t, f.subjectsEverOut)
			require.NotZero(t, f.table.NoneArrivesSince())
			return
		}
		require.Zero(t, f.table.NoneArrivesSince())
		want := f.expected()
		f.checkOut(want)
		f.healed = true
		f.run(f.now.Add(60 * time.Second))
		from := f.now
		f.run(f.now.Add(max(30*time.Second, 40*every*time.Duration(max(len(f.prefills), len(f.decodes))))))
		f.checkShares(from)
	})
}

// checkOut holds what came of the outages against who is sick.
func (f *fleet) checkOut(want map[Link]bool) {
	var got []Link
	for _, o := range f.table.Outages() {
		got = append(got, o.Subject)
	}
	// An engine that loses hand-offs with some others may be out, too, until it is found out
	// with which it works.
	partlySick := map[Link]bool{}
	for l := range want {
		if l.Prefiller != "" && l.Engine != "" {
			partlySick[Link{Prefiller: l.Prefiller}], partlySick[Link{Engine: l.Engine}] = true, true
		}
	}
	for _, l := range got {
		require.True(f.t, want[l] || partlySick[l] || f.sick[l], "%v is out now, and healthy", l)
	}
	for subject := range want {
		var lost []time.Time
		for l, times := range f.lost {
			if subject.covers(l) {
				lost = append(lost, times...)
			}
		}
		slices.SortFunc(lost, time.Time.Compare)
		const n = 2 * Limit // first their connection may be suspected, and then the engine
		if len(lost) < n {  // too seldom used
			continue
		}
		out, isOut := f.outAt[subject]
		for other, at := range f.outAt { // a connection also gets none while one of its engines is out
			if subject.Prefiller != "" && subject.Engine != "" && other.covers(subject) && (!isOut || at.Before(out)) {
				out, isOut = at, true
			}
		}
		require.True(f.t, isOut, "%v has lost %d hand-offs, and was never out", subject, len(lost))
		by := lost[n-1]
		// Ten seconds, or what it takes to send two hand-offs for each pair of engines:
		// those of others show who is to blame.
		enough := max(10*time.Second, 2*time.Duration(len(f.prefills)*len(f.decodes))*f.every)
		// If all losses of an engine were at one partner, their connection is avoided first. What hangs
		// at another partner is then known to be lost only after the same time again.
		if isEngine := subject.Prefiller == "" || subject.Engine == ""; isEngine {
			enough += f.detect
		}
		if later := lost[0].Add(enough); later.After(by) {
			by = later
		}
		require.False(f.t, out.After(by), "%v was out %v after its first loss", subject, out.Sub(lost[0]))
	}
	for l := range f.outSince {
		f.longest[l] = max(f.longest[l], f.now.Sub(f.outSince[l]))
	}
	for l, longest := range f.longest {
		if !want[l] && !partlySick[l] && !f.sick[l] {
			require.Less(f.t, longest, 10*time.Second, "%v is healthy", l)
		}
	}
}

// checkShares holds what the engines got since a time against an equal share.
func (f *fleet) checkShares(from time.Time) {
	byPrefiller, byDecode, all := map[string]int{}, map[string]int{}, 0
	for l, times := range f.sent {
		for _, at := range times {
			if !at.Before(from) {
				byPrefiller[l.Prefiller]++
				byDecode[l.Engine]++
				all++
			}
		}
	}
	require.Empty(f.t, f.table.Outages())
	for _, p := range f.prefills {
		require.Greater(f.t, byPrefiller[p], all/len(f.prefills)/3, p)
	}
	for _, d := range f.decodes {
		require.Greater(f.t, byDecode[d], all/len(f.decodes)/3, d)
	}
}
