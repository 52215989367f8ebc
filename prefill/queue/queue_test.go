package queue

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// line is one model's, served one after another.
type line struct {
	*ModelQueue[string]
}

func newLine() *line { return &line{New[string]().ModelQueue("m")} }

type item = Item[string]

func (l *line) enter(w item) *item {
	w.number = 0
	l.Add(&w)
	return &w
}

func (l *line) serve() *item {
	w := l.firstServable(true)
	if w != nil {
		w.MarkServed()
		w.Remove()
	}
	return w
}

func (l *line) requireEmpty(t require.TestingT) {
	require.True(t, l.Empty())
	require.Empty(t, l.flowQueues)
	require.Empty(t, l.queue.classes, "state of keys that nobody waits with")
	require.Zero(t, l.byTurn.Len()+l.byDisplacement.Len()+l.retries.Len())
	require.Nil(t, l.queue.NextDeadline())
}

var epoch = time.Unix(1_000_000, 0)

func TestWhoseTurnItIs(t *testing.T) {
	type in struct {
		id, key  string
		tokens   int
		priority int
		arrived  int
		retry    bool
		by       int // its deadline, 0: none
	}
	for _, tt := range []struct {
		name string
		in   []in
		want []string
	}{
		{"without keys it is first come, first served", []in{{id: "c", arrived: 3}, {id: "a", arrived: 1}, {id: "b", arrived: 2}}, []string{"a", "b", "c"}},
		{"of one moment, who called first", []in{{id: "a"}, {id: "b"}, {id: "c"}}, []string{"a", "b", "c"}},
		{"a higher priority first, then arrival", []in{{id: "a", priority: -1}, {id: "b"}, {id: "c", priority: 5, arrived: 9}, {id: "d", arrived: 1}}, []string{"c", "b", "d", "a"}},
		{
			"one request does not wait behind a crowd of another key",
			[]in{{id: "a1", key: "a"}, {id: "a2", key: "a"}, {id: "a3", key: "a"}, {id: "b1", key: "b", arrived: 9}},
			[]string{"a1", "b1", "a2", "a3"},
		},
		{
			"turns are counted in tokens",
			[]in{{id: "a1", key: "a", tokens: 300}, {id: "a2", key: "a", tokens: 300}, {id: "b1", key: "b", tokens: 100},
				{id: "b2", key: "b", tokens: 100}, {id: "b3", key: "b", tokens: 100}, {id: "b4", key: "b", tokens: 100}},
			[]string{"a1", "b1", "b2", "b3", "a2", "b4"},
		},
		{
			"no turn makes up for priority",
			[]in{{id: "a1", key: "a", priority: 1, tokens: 900}, {id: "a2", key: "a", priority: 1, tokens: 900}, {id: "b1", key: "b"}},
			[]string{"a1", "a2", "b1"},
		},
		{"a retry has had its turn", []in{{id: "a", arrived: 1}, {id: "retry", arrived: 2, retry: true}, {id: "b", arrived: 3}}, []string{"retry", "a", "b"}},
		{"but not that of a higher priority", []in{{id: "a", arrived: 1, priority: 1}, {id: "retry", arrived: 2, retry: true}}, []string{"a", "retry"}},
		{"the earliest deadline first, before those without", []in{{id: "a", arrived: 1}, {id: "b", by: 9, arrived: 2}, {id: "c", by: 8, arrived: 3}}, []string{"c", "b", "a"}},
		{"of one deadline the older one", []in{{id: "b", by: 9, arrived: 2}, {id: "a", by: 9, arrived: 1}}, []string{"a", "b"}},
		{"a deadline is before a turn", []in{{id: "a1", key: "a"}, {id: "b1", key: "b", by: 9}, {id: "b2", key: "b", by: 8}}, []string{"b2", "b1", "a1"}},
		{"no deadline makes up for priority", []in{{id: "a", by: 1, priority: -1}, {id: "b"}}, []string{"b", "a"}},
		{"a retry has had its turn, deadline or not", []in{{id: "a", by: 1}, {id: "retry", retry: true}}, []string{"retry", "a"}},
		{"retries among themselves go by arrival", []in{{id: "b", arrived: 2, retry: true}, {id: "a", arrived: 1, retry: true}}, []string{"a", "b"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newLine()
			for _, i := range tt.in {
				w := item{Value: i.id, Key: i.key, Priority: i.priority, Tokens: i.tokens, HasPlace: i.retry,
					Arrival: epoch.Add(time.Duration(i.arrived) * time.Second)}
				if i.by > 0 {
					w.Deadline = epoch.Add(time.Duration(i.by) * time.Second)
				}
				l.enter(w)
			}
			var got []string
			for w := l.serve(); w != nil; w = l.serve() {
				got = append(got, w.Value)
			}
			require.Equal(t, tt.want, got)
			l.requireEmpty(t)
		})
	}
}

func TestAKeyThatWasAwayHasNoTurnsToMakeUp(t *testing.T) {
	l := newLine()
	for range 4 {
		l.enter(item{Key: "a", Tokens: 100})
	}
	l.serve()
	l.serve()
	for range 3 {
		l.enter(item{Key: "b", Tokens: 100}) // late: it does not get the two turns that a had alone
	}
	var got []string
	for w := l.serve(); w != nil; w = l.serve() {
		got = append(got, w.Key)
	}
	require.Equal(t, []string{"b", "a", "b", "a", "b"}, got)
}

// What a key was served stays noted while its turn is yet to come, so that it
// cannot leave and be new; once others have passed it, it is no worse than new.
func TestAKeyThatIsRememberedHasNoTurnsToMakeUp(t *testing.T) {
	l := newLine()
	l.enter(item{Key: "a", Tokens: 100})
	l.enter(item{Key: "b", Tokens: 100})
	l.serve()
	for range 9 {
		l.enter(item{Key: "b", Tokens: 100})
	}
	for range 7 {
		l.serve()
	}
	for range 3 {
		l.enter(item{Key: "a", Tokens: 100})
	}
	var got []string
	for w := l.serve(); w != nil; w = l.serve() {
		got = append(got, w.Key)
	}
	require.Equal(t, []string{"a", "b", "a", "b", "a", "b"}, got)
}

func TestAKeyThatComesBackAtOnceGainsNoTurn(t *testing.T) {
	l := newLine()
	for range 10 {
		l.enter(item{Key: "many", Tokens: 100})
	}
	served := map[string]int{}
	for range 8 {
		if l.waitingOf(0, "one") == 0 {
			l.enter(item{Key: "one", Tokens: 100})
		}
		served[l.serve().Key]++
	}
	require.Equal(t, map[string]int{"many": 4, "one": 4}, served)
}

func TestWhoYieldsInAFullQueue(t *testing.T) {
	fill := func(in ...item) *line {
		l := newLine()
		for i, r := range in {
			r.Arrival = epoch.Add(time.Duration(i) * time.Second)
			l.enter(r)
		}
		return l
	}
	for _, tt := range []struct {
		name     string
		waiting  []item
		priority int
		key      string
		want     string // "": nobody
	}{
		{"an empty queue has nobody", nil, 0, "", ""},
		{"nobody for an equal without keys", []item{{Value: "a"}, {Value: "b"}}, 0, "", ""},
		{"nobody for a lower priority", []item{{Value: "a"}}, -1, "", ""},
		{"the youngest of a lower priority", []item{{Value: "a"}, {Value: "b"}}, 1, "", "b"},
		{"of the lowest", []item{{Value: "a", Priority: -1}, {Value: "b"}}, 1, "", "a"},
		{"of the key that has most there", []item{{Value: "a", Key: "a"}, {Value: "b", Key: "a"}, {Value: "c", Key: "c"}}, 1, "x", "b"},
		{"of the same priority a key that has more", []item{{Value: "a", Key: "a"}, {Value: "b", Key: "a"}}, 0, "x", "b"},
		{"not one that would have less than who comes", []item{{Value: "a", Key: "a"}, {Value: "x", Key: "x"}}, 0, "y", ""},
		{"and no key yields to itself", []item{{Value: "a", Key: "a"}, {Value: "b", Key: "a"}}, 0, "a", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := fill(tt.waiting...)
			got := ""
			if w := l.toDisplace(tt.priority, tt.key, l.waitingOf(tt.priority, tt.key)+1); w != nil {
				got = w.Value
			}
			require.Equal(t, tt.want, got)
		})
	}
}

// Whatever comes and goes: nobody is lost or served twice, of one key and
// priority the older one is first, and a higher priority is before a lower one.
func TestTheQueueLosesNobodyAndKeepsItsOrder(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		l := newLine()
		waiting := map[*item]bool{}
		pick := func() *item {
			all := slices.SortedFunc(maps.Keys(waiting), func(a, b *item) int { return int(a.number) - int(b.number) })
			return rapid.SampledFrom(all).Draw(r, "waiter")
		}
		for range rapid.IntRange(1, 120).Draw(r, "steps") {
			switch what := rapid.SampledFrom([]string{"enter", "enter", "serve", "leave", "displace", "fix"}).Draw(r, "step"); {
			case what == "enter":
				w := item{
					Key: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(r, "key"), Priority: rapid.IntRange(-1, 1).Draw(r, "priority"),
					Tokens: rapid.IntRange(0, 5000).Draw(r, "tokens"), HasPlace: rapid.IntRange(0, 9).Draw(r, "retry") == 0,
					Arrival: epoch.Add(time.Duration(rapid.IntRange(0, 50).Draw(r, "arrival"))),
				}
				if by := rapid.IntRange(-5, 5).Draw(r, "deadline"); by > 0 {
					w.Deadline = epoch.Add(time.Duration(by))
				}
				waiting[l.enter(w)] = true
			case len(waiting) == 0:
			case what == "serve":
				w := l.firstServable(true)
				for o := range waiting {
					require.LessOrEqual(r, o.Priority, w.Priority)
					if o != w && o.Priority == w.Priority && o.Key == w.Key && o.HasPlace == w.HasPlace {
						require.True(r, w.beforeInFlow(o), "of one key the earlier deadline first, then the older one")
					}
					if o.Priority == w.Priority && o.HasPlace == w.HasPlace {
						require.False(r, !o.Deadline.Equal(w.Deadline) && o.hasEarlierDeadline(w), "the earliest deadline first")
					}
				}
				w.MarkServed()
				require.True(r, w.Remove())
				delete(waiting, w)
			case what == "leave":
				w := pick()
				require.True(r, w.Remove())
				require.False(r, w.Remove(), "twice")
				delete(waiting, w)
			case what == "displace":
				if w := l.toDisplace(rapid.IntRange(-1, 1).Draw(r, "for"), "d", 1); w != nil {
					require.False(r, w.pinned)
					for o := range waiting {
						if !o.HasPlace && !o.pinned {
							require.LessOrEqual(r, w.Priority, o.Priority)
						}
					}
					require.True(r, w.Remove())
					delete(waiting, w)
				}
			case what == "fix":
				pick().Pin()
			}
			fresh, soonest := 0, (*item)(nil)
			for w := range waiting {
				if !w.Deadline.IsZero() && !w.pinned && (soonest == nil || w.Deadline.Before(soonest.Deadline)) {
					soonest = w
				}
				if !w.HasPlace {
					fresh++
				}
			}
			require.Equal(r, fresh, l.firstAttempts)
			next := l.queue.NextDeadline()
			require.Equal(r, soonest == nil, next == nil)
			require.True(r, next == nil || next.Deadline.Equal(soonest.Deadline))
		}
		for w := l.serve(); w != nil; w = l.serve() {
			require.True(r, waiting[w], "served twice")
			delete(waiting, w)
		}
		require.Empty(r, waiting)
		l.requireEmpty(r)
	})
}

// Two keys that both always wait are served the same tokens, but for one request
// of each; so nobody starves, however much another sends.
func TestKeysThatWaitGetTheSame(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		l := newLine()
		keys := []string{"a", "b", "c"}[:rapid.IntRange(2, 3).Draw(r, "keys")]
		most, served := map[string]int{}, map[string]int{}
		enter := func(key string) {
			tokens := rapid.IntRange(1, 10_000).Draw(r, "tokens")
			most[key] = max(most[key], tokens)
			l.enter(item{Key: key, Tokens: tokens})
		}
		for _, key := range keys {
			for range rapid.IntRange(1, 5).Draw(r, "crowd") {
				enter(key)
			}
		}
		for range rapid.IntRange(1, 60).Draw(r, "turns") {
			w := l.serve()
			served[w.Key] += w.Tokens
			for l.waitingOf(0, w.Key) == 0 || rapid.Bool().Draw(r, "another") {
				enter(w.Key)
			}
			for _, a := range keys {
				for _, b := range keys {
					require.LessOrEqual(r, served[a]-served[b], most[a]+most[b], "%s against %s", a, b)
				}
			}
		}
	})
}

func TestKeysThatLeftAreForgotten(t *testing.T) {
	l := newLine()
	for range 3 {
		l.enter(item{Key: "stays", Tokens: 1})
	}
	for n := range 10_000 {
		w := l.enter(item{Key: fmt.Sprint(n), Tokens: 1})
		w.MarkServed()
		w.Remove()
		l.enter(item{Key: "stays", Tokens: 1})
		l.serve()
	}
	require.Less(t, len(l.queue.classes[0].flows), 3*firstSweep)
}

func BenchmarkTheQueueOfManyKeys(b *testing.B) {
	for _, keys := range []int{1, 1000} {
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			l := newLine()
			for n := range 10_000 {
				l.enter(item{Key: fmt.Sprint(n % keys), Tokens: 1000})
			}
			b.ReportAllocs()
			for b.Loop() {
				w := l.serve()
				l.enter(*w)
			}
		})
	}
}

// A round in which every request is held ends, however many there are, and looks at some requests
// of each model.
func TestARoundOfHeldRequestsLooksAtEachLine(t *testing.T) {
	q, lines := New[string](), []*line{}
	for _, model := range []string{"a", "b", "c"} {
		l := &line{q.ModelQueue(model)}
		for i := range 200 {
			l.enter(item{Value: model, Key: "k", Arrival: epoch.Add(time.Duration(i) * time.Second)})
		}
		lines = append(lines, l)
	}
	q.StartRound()
	looks := map[string]int{}
	for w := q.Next(); w != nil; w = q.Next() {
		looks[w.Value]++
		w.Defer()
	}
	sum := 0
	for _, l := range lines {
		sum += l.deferrals
	}
	require.LessOrEqual(t, sum, roundDepth+len(lines)*modelDepth)
	for model, n := range looks {
		require.GreaterOrEqual(t, n, modelDepth, model)
	}
	require.Len(t, looks, len(lines))
}

// Where one request says that its target takes none, the round looks at no other of that target,
// but at retries on their own.
func TestARoundPassesAllThatNameATargetThatIsClosed(t *testing.T) {
	q := New[string]()
	l := &line{q.ModelQueue("m")}
	for i := range 3 * roundDepth {
		l.enter(item{Value: "fresh", Target: "b", Arrival: epoch.Add(time.Duration(i) * time.Second)})
		l.enter(item{Value: "retry", Target: "b", HasPlace: true, Arrival: epoch.Add(time.Duration(i) * time.Second)})
	}
	l.enter(item{Value: "other target", Target: "c", Arrival: epoch.Add(time.Hour)})
	l.enter(item{Value: "any target", Arrival: epoch.Add(2 * time.Hour)})
	for range 2 {
		var looks []string
		q.StartRound()
		for w := q.Next(); w != nil; w = q.Next() {
			looks = append(looks, w.Value)
			if w.Target != "" {
				w.DeferSameTarget()
			} else {
				w.Defer()
			}
		}
		require.Equal(t, []string{"retry", "fresh", "other target", "any target"}, looks)
	}
}

// A round in which every request of every key is held looks at some keys beyond those that come
// first, but not at all of them.
func TestARoundOfHeldRequestsLooksAtOtherKeys(t *testing.T) {
	l := newLine()
	for i := range 2 * keysDepth {
		l.enter(item{Value: "first", Key: "first", Arrival: epoch.Add(time.Duration(i) * time.Second)})
	}
	for i := range 2 * keysDepth {
		l.enter(item{Value: "other", Key: fmt.Sprint(i), Arrival: epoch.Add(time.Hour)})
	}
	looks := map[string]int{}
	l.queue.StartRound()
	for w := l.queue.Next(); w != nil; w = l.queue.Next() {
		looks[w.Value]++
		w.Defer()
	}
	require.Equal(t, map[string]int{"first": roundDepth, "other": keysDepth - roundDepth}, looks)
}
