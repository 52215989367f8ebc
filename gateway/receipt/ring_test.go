package receipt

import (
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/internal/words"
)

func TestARequestIsFoundWhileItRunsAndAfterwards(t *testing.T) {
	g := NewRing(4, 1<<20)
	l := g.Open(&Receipt{ID: "a", ClientID: "mine", State: "parse"})
	l.Edit(func(r *Receipt) {
		r.AddAttempt(Attempt{N: 1, State: "queued"})
		r.State, r.FindAttempt("", 1).Waits.Queue = "queued", 2
	})
	for _, id := range []string{"a", "mine"} {
		r := one(t, g, id)
		require.Equal(t, "queued", r.State)
		require.Equal(t, "queued", r.Attempts[0].State)
	}
	require.Empty(t, g.Last(9, Filter{}, false))
	require.Len(t, g.Last(9, Filter{}, true), 1, "once, though it has two names")
	l.Edit(func(r *Receipt) {
		r.AddAttempt(Attempt{N: 2})
		r.FindAttempt("", 2).Waits.Queue = 3
	})
	l.End(func(r *Receipt) { r.Outcome = "ok" })
	r := one(t, g, "mine")
	require.Equal(t, Ended, r.State)
	require.Equal(t, Ended, r.Attempts[0].State)
	require.InDelta(t, 5, r.Waits.Queue, 0)
	require.Empty(t, g.Last(9, Filter{}, true))
	l.Edit(func(r *Receipt) { r.FindAttempt("", 1).Cause = "late" })
	require.Empty(t, r.Attempts[0].Cause, "what ended does not change any more")
}

func TestWhoWaits(t *testing.T) {
	g := NewRing(4, 1<<20)
	for i, r := range []Receipt{
		{Key: "batch", State: Queued}, {Key: "batch", State: Pooled}, {Key: "chat", State: Pooled}, {Key: "chat", State: "streaming"}, {Key: "chat", State: "parse"},
	} {
		r.ID = fmt.Sprint(i)
		g.Open(&r)
	}
	waiting := map[string]int{}
	for key, l := range g.Loads() {
		waiting[key] = l.Waiting
	}
	require.Equal(t, map[string]int{"batch": 2, "chat": 1}, waiting)
	require.Empty(t, (*Ring)(nil).Loads())
}

func TestTheLastAreKeptAndFoundByModel(t *testing.T) {
	g := NewRing(3, 1<<20)
	for i := range 5 {
		g.Open(&Receipt{ID: fmt.Sprint(i), Model: []string{"x", "y"}[i%2]}).End(func(*Receipt) {})
	}
	ids := func(list []*Receipt) (s string) {
		for _, r := range list {
			s += r.ID
		}
		return s
	}
	require.Equal(t, "432", ids(g.Last(9, Filter{}, false)))
	require.Equal(t, "4", ids(g.Last(1, Filter{}, false)))
	require.Equal(t, "42", ids(g.Last(9, Filter{Model: "x"}, false)))
	require.Empty(t, g.Find("1", 9), "the oldest are gone")

	came := time.Now()
	for i, id := range []string{"a", "b", "c", "d"} { // after those above
		l := g.Open(&Receipt{ID: id, Arrival: came.Add(time.Duration(i) * time.Second)})
		if id == "b" {
			defer l.End(func(*Receipt) {})
		}
		if id == "c" {
			l.End(func(*Receipt) {})
		}
	}
	require.Equal(t, "dcb", ids(g.Latest(3)), "running or not")
	require.Equal(t, "dcba43", ids(g.Latest(9)), "and all there are")
	require.Empty(t, (*Ring)(nil).Latest(3))
	ended, running := g.Count()
	require.Equal(t, []int{3, 3}, []int{ended, running})
}

// Anybody may send any X-Request-Id: also one that another client sends, and one
// of ours. Whoever asks for a request gets it, and sees that there are others.
func TestNoClientsNameHidesAnothersRequest(t *testing.T) {
	g := NewRing(4, 1<<20)
	at := func(second int64) time.Time { return time.Unix(second, 0) }
	g.Open(&Receipt{ID: "a", ClientID: "same", Arrival: at(1)}).End(func(*Receipt) {})
	second := g.Open(&Receipt{ID: "b", ClientID: "same", Arrival: at(2)})
	g.Open(&Receipt{ID: "c", ClientID: "a", Arrival: at(3)})
	g.Open(&Receipt{ID: "d", ClientID: "b", Arrival: at(4)}).End(func(*Receipt) {})
	ids := func(id string, n int) (s string) {
		for _, r := range g.Find(id, n) {
			s += r.ID
		}
		return s
	}
	require.Equal(t, "ba", ids("same", 9), "the latest first, whether it runs or not")
	require.Equal(t, "b", ids("same", 1))
	require.Equal(t, "ac", ids("a", 9), "who has the id itself first")
	require.Equal(t, "bd", ids("b", 9))
	second.End(func(*Receipt) {})
	require.Equal(t, "bd", ids("b", 9))
	require.Equal(t, "c", ids("c", 9))
	long := strings.Repeat("x", 2*words.MaxText)
	g.Open(&Receipt{ID: "e", ClientID: words.Clip(long)})
	require.Equal(t, "e", ids(long, 9), "it was cut")
}

func one(t *testing.T, g *Ring, id string) *Receipt {
	t.Helper()
	found := g.Find(id, 9)
	require.Len(t, found, 1)
	return found[0]
}

func TestNoRingKeepsNothing(t *testing.T) {
	var none *Ring
	require.Nil(t, NewRing(0, 1<<20))
	l := none.Open(&Receipt{ID: "a"})
	l.Edit(func(*Receipt) { t.Fatal("noted") })
	l.End(func(*Receipt) { t.Fatal("noted") })
	require.Empty(t, none.Find("a", 9))
	require.Empty(t, none.Last(1, Filter{}, false))
	require.Zero(t, testing.AllocsPerRun(10, func() {
		at := 1.5
		l.Edit(func(r *Receipt) { r.TTFT = at })
	}))
}

func TestAttemptsOfOneRequestAreBounded(t *testing.T) {
	var r Receipt
	for i := range MaxAttempts {
		r.AddAttempt(Attempt{N: i, Leg: "a"})
		require.Same(t, &r.Attempts[i], r.FindAttempt("a", i))
		require.Nil(t, r.FindAttempt("b", i))
	}
	r.AddAttempt(Attempt{N: MaxAttempts, Leg: "a"})
	require.Nil(t, r.FindAttempt("a", MaxAttempts))
	require.Equal(t, 1, r.LeftOut)
}

// However receipts come and go, the ring stays within its bytes, finds what it
// lists, and forgets the names of what it dropped.
func TestTheRingKeepsItsBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := int64(rapid.IntRange(1, 20_000).Draw(t, "bytes"))
		g := NewRing(rapid.IntRange(1, 8).Draw(t, "last"), limit)
		var open []*RunningReceipt
		for i := range rapid.IntRange(1, 40).Draw(t, "steps") {
			if len(open) > 0 && rapid.Bool().Draw(t, "end") {
				open[0].End(func(*Receipt) {})
				open = open[1:]
				continue
			}
			l := g.Open(&Receipt{ID: fmt.Sprint(i), ClientID: rapid.SampledFrom([]string{"", "p", "q"}).Draw(t, "name"),
				Model: strings.Repeat("m", rapid.IntRange(0, 200).Draw(t, "model"))})
			for range rapid.IntRange(0, 4).Draw(t, "attempts") {
				l.Edit(func(r *Receipt) {
					r.AddAttempt(Attempt{Decode: &Decode{Best: make([]Choice, rapid.IntRange(0, 8).Draw(t, "best"))}})
				})
			}
			open = append(open, l)
		}
		var bytes int64
		list := g.Last(100, Filter{}, false)
		for _, r := range list {
			bytes += r.size()
			require.Equal(t, []*Receipt{r}, g.Find(r.ID, 9))
		}
		require.Equal(t, g.bytes, bytes)
		require.True(t, bytes <= limit || len(list) == 1)
		require.Len(t, g.byID, len(list))
		require.Len(t, g.Last(100, Filter{}, true), len(open))
	})
}

func TestReceiptsAreReadWhileTheyAreWritten(*testing.T) {
	g := NewRing(16, 1<<20)
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for k := range 200 {
				l := g.Open(&Receipt{ID: fmt.Sprint(i, k), Arrival: time.Unix(int64(k), 0)})
				l.Edit(func(r *Receipt) { r.AddAttempt(Attempt{N: k}) })
				l.End(func(r *Receipt) { r.Outcome = "ok" })
			}
		})
		all.Go(func() {
			for k := range 200 {
				g.Last(10, Filter{}, k%2 == 0)
				g.Find(fmt.Sprint(i, k), 9)
			}
		})
	}
	all.Wait()
}

// More receipts than fit into their memory are never kept, so they need no places either.
func TestPlacesForReceiptsTakeNoMoreMemoryThanTheReceipts(t *testing.T) {
	const limit = 1 << 16
	g := NewRing(math.MaxInt, limit)
	for i := range 500 {
		g.Open(&Receipt{ID: fmt.Sprint(i)}).End(func(*Receipt) {})
	}
	kept, _ := g.Count()
	require.Greater(t, kept, 50)
	require.LessOrEqual(t, g.bytes, int64(limit))
	require.Less(t, len(g.ended), limit/sizeReceipt+2)
	list := g.Last(1, Filter{}, false)
	require.Len(t, list, 1)
	require.Equal(t, "499", list[0].ID)
}
