package prefill

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// line is a queue by itself, served one after another.
type line struct {
	queue
	classes map[int]*class
	number  uint64
}

func newLine() *line { return &line{queue: newQueue(), classes: map[int]*class{}} }

func (l *line) enter(r Request) *waiter {
	l.number++
	w := &waiter{Request: r, number: l.number, place: -1}
	l.add(w, l.classes)
	return w
}

func (l *line) serve() *waiter {
	w := l.next(true)
	if w != nil {
		w.served()
		l.remove(w, l.classes)
	}
	return w
}

func (l *line) requireEmpty(t require.TestingT) {
	require.True(t, l.empty())
	require.Empty(t, l.lanes)
	require.Empty(t, l.classes, "state of keys that nobody waits with")
	require.Zero(t, l.turns.Len()+l.longest.Len()+l.retries.Len())
}

var epoch = time.Unix(1_000_000, 0)

func TestWhoseTurnItIs(t *testing.T) {
	type in struct {
		id, key  string
		tokens   int
		priority int
		arrived  int
		retry    bool
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
			[]in{{id: "a1", key: "a", tokens: 300}, {id: "a2", key: "a", tokens: 300}, {id: "b1", key: "b", tokens: 100}, {id: "b2", key: "b", tokens: 100}, {id: "b3", key: "b", tokens: 100}, {id: "b4", key: "b", tokens: 100}},
			[]string{"a1", "b1", "b2", "b3", "a2", "b4"},
		},
		{
			"no turn makes up for priority",
			[]in{{id: "a1", key: "a", priority: 1, tokens: 900}, {id: "a2", key: "a", priority: 1, tokens: 900}, {id: "b1", key: "b"}},
			[]string{"a1", "a2", "b1"},
		},
		{"a retry has had its turn", []in{{id: "a", arrived: 1}, {id: "retry", arrived: 2, retry: true}, {id: "b", arrived: 3}}, []string{"retry", "a", "b"}},
		{"but not that of a higher priority", []in{{id: "a", arrived: 1, priority: 1}, {id: "retry", arrived: 2, retry: true}}, []string{"a", "retry"}},
		{"retries among themselves go by arrival", []in{{id: "b", arrived: 2, retry: true}, {id: "a", arrived: 1, retry: true}}, []string{"a", "b"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newLine()
			for _, i := range tt.in {
				l.enter(Request{ID: i.id, Key: i.key, Priority: i.priority, PromptTokens: i.tokens, Reserved: i.retry, Arrival: epoch.Add(time.Duration(i.arrived) * time.Second)})
			}
			var got []string
			for w := l.serve(); w != nil; w = l.serve() {
				got = append(got, w.ID)
			}
			require.Equal(t, tt.want, got)
			l.requireEmpty(t)
		})
	}
}

func TestAKeyThatWasAwayHasNoTurnsToMakeUp(t *testing.T) {
	l := newLine()
	for range 4 {
		l.enter(Request{Key: "a", PromptTokens: 100})
	}
	l.serve()
	l.serve()
	for range 3 {
		l.enter(Request{Key: "b", PromptTokens: 100}) // late: it does not get the two turns that a had alone
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
	l.enter(Request{Key: "a", PromptTokens: 100})
	l.enter(Request{Key: "b", PromptTokens: 100})
	l.serve()
	for range 9 {
		l.enter(Request{Key: "b", PromptTokens: 100})
	}
	for range 7 {
		l.serve()
	}
	for range 3 {
		l.enter(Request{Key: "a", PromptTokens: 100})
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
		l.enter(Request{Key: "many", PromptTokens: 100})
	}
	served := map[string]int{}
	for range 8 {
		if l.waitingOf(0, "one", l.classes) == 0 {
			l.enter(Request{Key: "one", PromptTokens: 100})
		}
		served[l.serve().Key]++
	}
	require.Equal(t, map[string]int{"many": 4, "one": 4}, served)
}

func TestWhoYieldsInAFullQueue(t *testing.T) {
	fill := func(in ...Request) *line {
		l := newLine()
		for i, r := range in {
			r.Arrival = epoch.Add(time.Duration(i) * time.Second)
			l.enter(r)
		}
		return l
	}
	for _, tt := range []struct {
		name     string
		waiting  []Request
		priority int
		key      string
		want     string // "": nobody
	}{
		{"an empty queue has nobody", nil, 0, "", ""},
		{"nobody for an equal without keys", []Request{{ID: "a"}, {ID: "b"}}, 0, "", ""},
		{"nobody for a lower priority", []Request{{ID: "a"}}, -1, "", ""},
		{"the youngest of a lower priority", []Request{{ID: "a"}, {ID: "b"}}, 1, "", "b"},
		{"of the lowest", []Request{{ID: "a", Priority: -1}, {ID: "b"}}, 1, "", "a"},
		{"of the key that has most there", []Request{{ID: "a", Key: "a"}, {ID: "b", Key: "a"}, {ID: "c", Key: "c"}}, 1, "x", "b"},
		{"of the same priority a key that has more", []Request{{ID: "a", Key: "a"}, {ID: "b", Key: "a"}}, 0, "x", "b"},
		{"not one that would have less than who comes", []Request{{ID: "a", Key: "a"}, {ID: "x", Key: "x"}}, 0, "y", ""},
		{"and no key yields to itself", []Request{{ID: "a", Key: "a"}, {ID: "b", Key: "a"}}, 0, "a", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := fill(tt.waiting...)
			got := ""
			if w := l.yields(tt.priority, tt.key, l.waitingOf(tt.priority, tt.key, l.classes)+1); w != nil {
				got = w.ID
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
		waiting := map[*waiter]bool{}
		pick := func() *waiter {
			all := slices.SortedFunc(maps.Keys(waiting), func(a, b *waiter) int { return int(a.number) - int(b.number) })
			return rapid.SampledFrom(all).Draw(r, "waiter")
		}
		for range rapid.IntRange(1, 120).Draw(r, "steps") {
			switch what := rapid.SampledFrom([]string{"enter", "enter", "serve", "leave", "displace", "fix"}).Draw(r, "step"); {
			case what == "enter":
				w := l.enter(Request{
					Key: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(r, "key"), Priority: rapid.IntRange(-1, 1).Draw(r, "priority"),
					PromptTokens: rapid.IntRange(0, 5000).Draw(r, "tokens"), Reserved: rapid.IntRange(0, 9).Draw(r, "retry") == 0,
					Arrival: epoch.Add(time.Duration(rapid.IntRange(0, 50).Draw(r, "arrival"))),
				})
				waiting[w] = true
			case len(waiting) == 0:
			case what == "serve":
				w := l.next(true)
				for o := range waiting {
					require.LessOrEqual(r, o.Priority, w.Priority)
					if o != w && o.Priority == w.Priority && o.Key == w.Key && o.Reserved == w.Reserved {
						require.True(r, w.olderThan(o), "of one key the older one first")
					}
				}
				w.served()
				require.True(r, l.remove(w, l.classes))
				delete(waiting, w)
			case what == "leave":
				w := pick()
				require.True(r, l.remove(w, l.classes))
				require.False(r, l.remove(w, l.classes), "twice")
				delete(waiting, w)
			case what == "displace":
				if w := l.yields(rapid.IntRange(-1, 1).Draw(r, "for"), "d", 1); w != nil {
					require.False(r, w.fixed)
					for o := range waiting {
						if !o.Reserved && !o.fixed {
							require.LessOrEqual(r, w.Priority, o.Priority)
						}
					}
					require.True(r, l.remove(w, l.classes))
					delete(waiting, w)
				}
			case what == "fix":
				l.fix(pick())
			}
			fresh := 0
			for w := range waiting {
				if !w.Reserved {
					fresh++
				}
			}
			require.Equal(r, fresh, l.fresh)
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
			l.enter(Request{Key: key, PromptTokens: tokens})
		}
		for _, key := range keys {
			for range rapid.IntRange(1, 5).Draw(r, "crowd") {
				enter(key)
			}
		}
		for range rapid.IntRange(1, 60).Draw(r, "turns") {
			w := l.serve()
			served[w.Key] += w.PromptTokens
			for l.waitingOf(0, w.Key, l.classes) == 0 || rapid.Bool().Draw(r, "another") {
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
		l.enter(Request{Key: "stays", PromptTokens: 1})
	}
	for n := range 10_000 {
		w := l.enter(Request{Key: fmt.Sprint(n), PromptTokens: 1})
		w.served()
		l.remove(w, l.classes)
		l.enter(Request{Key: "stays", PromptTokens: 1})
		l.serve()
	}
	require.Less(t, len(l.classes[0].flows), 3*firstSweep)
}

func TestAHigherPriorityIsServedFirstAndDisplaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := newPlaces(0)
		tier := newTier(t, up("a"), withPlaces(pool), func(c *Config) { c.Queue.Max = 2 })
		pool.wake = tier.Wake
		old, young := start(t.Context(), tier, Request{ID: "old"}), start(t.Context(), tier, Request{ID: "young"})
		high := start(t.Context(), tier, Request{ID: "high", Priority: 10})
		require.ErrorIs(t, (<-young).err, ErrQueueFull)
		_, err := tier.Acquire(t.Context(), Request{Model: testModel})
		require.ErrorIs(t, err, ErrQueueFull, "an equal displaces nobody")
		pool.Release()
		require.NoError(t, (<-high).err)
		synctest.Wait()
		require.Empty(t, old)
		pool.Release()
		require.NoError(t, (<-old).err)
	})
}

func TestAKeyThatFillsTheQueueDoesNotShutOthersOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := newPlaces(0)
		tier := newTier(t, up("a"), withPlaces(pool), func(c *Config) { c.Queue.Max = 1000 })
		pool.wake = tier.Wake
		ctx, stop := context.WithCancel(t.Context())
		refused, crowd := 0, []<-chan outcome(nil)
		for n := range 1500 {
			crowd = append(crowd, start(ctx, tier, Request{ID: fmt.Sprint(n), Key: "crowd", PromptTokens: 1000}))
		}
		one := start(ctx, tier, Request{ID: "one", Key: "one", PromptTokens: 1000})
		for range 2 {
			pool.Release()
			synctest.Wait()
		}
		require.NoError(t, (<-one).err, "after one of the crowd at most")
		stop()
		for _, c := range crowd {
			if (<-c).err != nil {
				refused++
			}
		}
		require.Equal(t, 1499, refused)
		tier.lock()
		require.Empty(t, tier.classes)
		tier.unlock()
	})
}

func TestKeysTakeTurnsOverAllModels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		candidates := up("a", "b")
		candidates[1].Models = []string{"n"}
		pool := newPlaces(0)
		tier := newTier(t, candidates, withPlaces(pool))
		pool.wake = tier.Wake
		first := start(t.Context(), tier, Request{Key: "crowd", PromptTokens: 10})
		second := start(t.Context(), tier, Request{Key: "crowd", PromptTokens: 10})
		one := start(t.Context(), tier, Request{Key: "one", Model: "n", PromptTokens: 10})
		pool.Release()
		require.NoError(t, (<-first).err)
		pool.Release()
		require.NoError(t, (<-one).err, "the other key's turn, though it asks for another model")
		pool.Release()
		require.NoError(t, (<-second).err)
	})
}

func BenchmarkTheQueueOfManyKeys(b *testing.B) {
	for _, keys := range []int{1, 1000} {
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			l := newLine()
			for n := range 10_000 {
				l.enter(Request{Key: fmt.Sprint(n % keys), PromptTokens: 1000})
			}
			b.ReportAllocs()
			for b.Loop() {
				w := l.serve()
				l.enter(w.Request)
			}
		})
	}
}
