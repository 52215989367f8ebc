package policy

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// entries of these prompts, ids from 1.
func entries(prompts ...int32) []Entry {
	es := make([]Entry, len(prompts))
	for i, p := range prompts {
		es[i] = Entry{ID: uint64(i + 1), Prompt: p}
	}
	return es
}

func workersOf(as []Assignment) (got []int) {
	for _, a := range as {
		got = append(got, int(a.Worker))
	}
	return got
}

func TestFirstComePolicies(t *testing.T) {
	full := level(3, 100, 0)
	loaded := level(3, 100, 2)
	loaded[0].Running = append(loaded[0].Running, Request{Prompt: 1}, Request{Prompt: 1})
	loaded[1].Running[0].Prompt = 500
	down := level(3, 100, 1)
	down[1].Up = false
	limited := level(3, 100, 2)
	limited[2].Running = nil
	for g := range limited {
		limited[g].Capacity = 1000
	}
	for _, c := range []struct {
		name, spec string
		s          Snapshot
		want       []int
	}{
		{"rr takes turns", "rr", Snapshot{Workers: full, Pool: entries(1, 1, 1, 1)}, []int{0, 1, 2, 0}},
		{"rr passes a rank that is down", "rr", Snapshot{Workers: down, Pool: entries(1, 1, 1)}, []int{0, 2, 0}},
		{"pooled rr passes full ranks and stops at the last slot", "prr", Snapshot{Workers: down, Pool: entries(1, 1, 1)}, []int{0, 2}},
		{"jsq counts requests; ties take turns", "jsq", Snapshot{Workers: loaded, Pool: entries(1, 1, 1, 1, 1)}, []int{1, 2, 1, 2, 0}},
		{"jsq counts what the engine queues", "jsq", Snapshot{Workers: full, Pool: entries(1, 1)}, []int{0, 1}},
		{"jsq-kv counts tokens; ties go to the lower id", "jsq-kv", Snapshot{Workers: loaded, Pool: entries(2, 1, 7)}, []int{2, 0, 2}},
		{"pooled jsq-kv wants room beside the slot: the second entry waits", "pjsq-kv", Snapshot{Workers: limited, Pool: entries(900, 860, 10)}, []int{2, 0}},
		{"an entry that fits nowhere is passed by", "pjsq-kv", Snapshot{Workers: limited, Pool: entries(2000, 950, 10)}, []int{2, 0}},
		{"no entry is sent to a rank that could never hold it", "jsq", Snapshot{Workers: append(level(1, 0, 0), Worker{ID: 7, Up: true, Capacity: 99}), Pool: entries(100, 100)}, []int{0, 0}},
		{"nobody is up", "random", Snapshot{Workers: []Worker{{ID: 1, Free: 3}}, Pool: entries(1)}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.want, workersOf(decide(t, c.spec, &c.s)))
		})
	}
}

func TestTurnsGoOnInTheNextRound(t *testing.T) {
	p, err := Parse("jsq")
	require.NoError(t, err)
	s := &Snapshot{Workers: level(3, 100, 1), Pool: entries(5)}
	var got []int
	for range 4 {
		got = append(got, workersOf(p.Decide(s, nil))...)
	}
	require.Equal(t, []int{0, 1, 2, 0}, got)
}

func TestP2CTakesTheShorterOfTwo(t *testing.T) {
	s := &Snapshot{Workers: level(2, 100, 1), Pool: entries(5)}
	s.Workers[0].Running = make([]Request, 9)
	for seed := range uint64(20) {
		sp, err := ParseSpec("p2c")
		require.NoError(t, err)
		sp.values.seed = seed
		require.Equal(t, []int{1}, workersOf(sp.Build().Decide(s, nil)), "of two ranks both are looked at")
	}
}

func TestRandomReachesEveryRankAndFollowsItsSeed(t *testing.T) {
	s := &Snapshot{Workers: level(4, 100, 0), Pool: entries(make([]int32, 200)...)}
	count := map[int]int{}
	for _, g := range workersOf(decide(t, "random", s)) {
		count[g]++
	}
	require.Len(t, count, 4)
	for g, n := range count {
		require.InDelta(t, 50, n, 25, "rank %d", g)
	}
	require.Equal(t, decide(t, "random:seed=3", s), decide(t, "random:seed=3", s))
	require.NotEqual(t, decide(t, "random:seed=3", s), decide(t, "random:seed=4", s))
}

func TestBypass(t *testing.T) {
	t.Run("it sends up to margin entries beyond the free slots", func(t *testing.T) {
		s := &Snapshot{Workers: level(2, 100, 0), Pool: entries(1, 1, 1, 1, 1, 1)}
		s.Workers[1].Free = -1 // one is sent already
		require.Equal(t, []int{0, 1, 0}, workersOf(decide(t, "br0:bypass", s)))
		require.Empty(t, decide(t, "br0:bypass,margin=0", s))
	})
	t.Run("of ranks where the prompt is safe the emptier one takes it", func(t *testing.T) {
		s := &Snapshot{Workers: level(3, 1000, 1), Pool: entries(50)}
		s.Workers[1].Running[0].Prompt, s.Workers[2].Running[0].Prompt = 800, 300
		require.Equal(t, []int{2}, workersOf(decide(t, "br0:bypass", s)))
	})
}

func TestAnOverdueEntryThatFitsNowhereGetsARankReserved(t *testing.T) {
	for _, spec := range []string{"pjsq-kv", "pjsq", "prr", "prandom", "pp2c", "br0:bypass"} {
		t.Run(spec, func(t *testing.T) {
			s := &Snapshot{Workers: level(2, 600, 2), Pool: entries(800, 50, 50, 50), MaxAgeMs: 1000}
			s.Workers[0].Capacity, s.Workers[1].Capacity = 1000, 1000
			s.Workers[0].Running[0].Prompt = 400 // most room
			s.Pool[0].WaitMs = 1000
			got := decide(t, spec, s)
			require.NotEmpty(t, got)
			require.NotContains(t, workersOf(got), 0, "its room must grow")
			s.Pool[0].WaitMs = 999
			require.Contains(t, workersOf(append(decide(t, spec, s), decide(t, spec+seed(spec), s)...)), 0)
		})
	}
}

// seed varies the draws of a random policy.
func seed(spec string) string {
	if spec == "prandom" || spec == "pp2c" {
		return ":seed=5"
	}
	return ""
}
