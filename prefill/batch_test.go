package prefill

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/mooncake"
	"evenkeel/prefill/ledger"
	"evenkeel/prefill/queue"
)

func batch(n int) Request {
	q := request(n)
	q.Model, q.Batch = testModel, true
	return q
}

// withSlots are engines whose hand-offs are decoded on one board, which has so many free slots.
func withSlots(free *int, ids ...string) (candidates []Candidate, change func(*Config)) {
	candidates = up(ids...)
	for i := range candidates {
		candidates[i].Board = "board"
	}
	return candidates, func(c *Config) { c.Free = func(string, string) (int, bool) { return *free, false } }
}

func TestBatchTakesOnlyWhatIsLeft(t *testing.T) {
	early := mooncake.Profile{Connector: mooncake.SGLang}.WithDefaults()
	for _, row := range []struct {
		name   string
		free   int
		before func(*testing.T, *Scheduler)
		set    func([]Candidate)
		waits  bool
	}{
		{"two slots are free", 2, nil, nil, false},
		{"the last slot is for the next request", 1, nil, nil, true},
		{"no slot is free", 0, nil, nil, true},
		{"one of three slots is for a prompt that is prefilled", 3, func(t *testing.T, scheduler *Scheduler) { hold(t, scheduler, "a", probing, 10) }, nil, false},
		{"one of two is", 2, func(t *testing.T, scheduler *Scheduler) { hold(t, scheduler, "a", probing, 10) }, nil, true},
		{"all engines have something to prefill", 9, func(t *testing.T, scheduler *Scheduler) {
			hold(t, scheduler, "a", probing, 10)
			hold(t, scheduler, "b", probing, 10)
		}, nil, true},
		{"a prompt waits for a slot", 9, func(t *testing.T, scheduler *Scheduler) { hold(t, scheduler, "a", pooled, 10) }, nil, true},
		{"a prompt has got one", 2, func(t *testing.T, scheduler *Scheduler) { hold(t, scheduler, "a", dispatched, 10) }, nil, false},
		{"a retry waits", 9, func(_ *testing.T, scheduler *Scheduler) {
			q := request(8)
			q.Model, q.HasPlace, q.Remote = testModel, true, &region{where: always(WaitsAlone)}
			scheduler.Offer(q, func(*Lease, error) {})
		}, nil, true},
		{"another request waits", 9, func(_ *testing.T, scheduler *Scheduler) {
			q := request(8)
			q.Model, q.Remote = testModel, &region{where: always(WaitsAlone)}
			scheduler.Offer(q, func(*Lease, error) {})
		}, nil, true},
		{"a request for an adapter of the model waits", 9, func(_ *testing.T, scheduler *Scheduler) {
			q := request(8)
			q.Model, q.Remote = "adapter", &region{where: always(WaitsAlone)}
			scheduler.Offer(q, func(*Lease, error) {})
		}, func(all []Candidate) {
			for i := range all {
				all[i].Models = []string{testModel, "adapter"}
			}
		}, true},
		{"a prompt waits for a slot before it is prefilled", 9, func(_ *testing.T, scheduler *Scheduler) {
			q := request(8)
			q.Model = testModel
			scheduler.Offer(q, func(*Lease, error) {})
		}, func(all []Candidate) {
			for i := range all {
				all[i].Profile = &early
			}
		}, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			candidates, change := withSlots(&row.free, "a", "b")
			if row.set != nil {
				row.set(candidates)
			}
			scheduler := newScheduler(t, candidates, change)
			if row.before != nil {
				row.before(t, scheduler)
			}
			if row.waits {
				mustWait(t, scheduler, batch(1))
			} else {
				acquire(t, scheduler, batch(1))
			}
			retry := batch(2)
			retry.HasPlace = true
			_, err := scheduler.Acquire(t.Context(), retry)
			require.NoError(t, err, "a retry is not held back")
		})
	}
}

// Groups of ranks that prefill and decode have one slot for what waits there, and one for what
// comes next.
func TestAGroupOfRanksThatDoBothTakesBatchLast(t *testing.T) {
	free := 2
	scheduler := newScheduler(t, doBoth("g"), func(c *Config) { c.Free = func(string, string) (int, bool) { return free, false } })
	first := acquire(t, scheduler, batch(1))
	mustWait(t, scheduler, batch(2)) // the first has no rank yet
	free--
	first.MarkSent()
	mustWait(t, scheduler, batch(2))
	acquire(t, scheduler, request(3)) // which finds one at once
}

func TestBatchWaitsLongerAndHasAnEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		free := 1
		candidates, change := withSlots(&free, "a")
		scheduler := newScheduler(t, candidates, change)
		ctx, leave := context.WithCancel(t.Context())
		waits, gone := start(t.Context(), scheduler, batch(1)), start(ctx, scheduler, batch(2))
		require.Equal(t, BatchStatus{Waiting: 2}, scheduler.Batch())
		require.Zero(t, scheduler.Overview().Waiting, "nobody waits for batch")
		require.Zero(t, scheduler.Waiting(testModel))
		require.Empty(t, scheduler.Backlogs())
		leave()
		require.ErrorIs(t, (<-gone).err, context.Canceled)
		got := <-waits
		require.ErrorIs(t, got.err, ErrQueueTimeout)
		require.ErrorContains(t, got.err, "prefill.queue.batch_timeout")
		require.Equal(t, 10*time.Minute, got.after)

		waits = start(t.Context(), scheduler, batch(3))
		scheduler.SetCandidates(nil)
		require.ErrorIs(t, (<-waits).err, ErrUnavailable)

		scheduler.SetCandidates(candidates)
		waits = start(t.Context(), scheduler, batch(4))
		time.Sleep(5 * time.Second)
		free = 2
		scheduler.Wake()
		got = <-waits
		require.NoError(t, got.err)
		require.Equal(t, BatchStatus{Ran: 1, HeldS: 5}, scheduler.Batch())
		got.lease.Release()
		requireIdle(t, scheduler)
	})
}

// However much batch comes, it has half of the queue at most, and gives way in that.
func TestAFloodOfBatchLeavesTheQueueToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := newPlaces(0)
		scheduler := newScheduler(t, up("a"), withPlaces(pool), func(c *Config) { c.Queue.Max = 4 })
		old, young := start(t.Context(), scheduler, batch(1)), start(t.Context(), scheduler, batch(2))
		_, err := scheduler.Acquire(t.Context(), batch(3))
		require.ErrorIs(t, err, ErrQueueFull)
		require.ErrorContains(t, err, "2 requests wait")
		var online []<-chan outcome
		for n := range 3 {
			online = append(online, start(t.Context(), scheduler, Request{ID: fmt.Sprint(n), Priority: -100}))
		}
		require.ErrorIs(t, (<-young).err, ErrQueueFull)
		require.Empty(t, old)
		pool.wake = scheduler.Wake
		for range 4 {
			pool.Release()
		}
		for _, o := range online {
			(<-o).lease.Release()
		}
		require.NoError(t, (<-old).err, "when nobody else waits")
	})
}

// A site has engines, a board of decode slots and a pool, without a clock that moves by itself.
// What it is told, it checks.
type site struct {
	*Scheduler
	r       *rapid.T
	free    int
	places  *places
	probing []*Lease
	pooled  []*Lease
	running []*Lease
	waiting map[int]func()
	batch   map[int]bool // of those that wait
	next    int
}

// offer sends a request. A batch request that is served must have left the others what they need.
func (s *site) offer(q Request) {
	n := s.next
	s.next++
	q.ID, q.Model, q.PromptTokens = fmt.Sprint(n), testModel, 10
	s.waiting[n], s.batch[n] = func() {}, q.Batch
	withdraw := s.Offer(q, func(l *Lease, err error) {
		require.NoError(s.r, err)
		delete(s.waiting, n)
		delete(s.batch, n)
		s.probing = append(s.probing, l)
		if q.Batch {
			require.False(s.r, s.models[testModel].queue.HasOnline(), "an online request waits")
			require.Empty(s.r, s.pooled, "a request waits in the pool")
			require.GreaterOrEqual(s.r, s.free, len(s.probing)+1, "no slot is left for the next request")
		}
	})
	if s.waiting[n] != nil {
		s.waiting[n] = withdraw
	}
}

// pick takes one of them out.
func pick(r *rapid.T, from *[]*Lease) *Lease {
	i := rapid.IntRange(0, len(*from)-1).Draw(r, "which")
	l := (*from)[i]
	*from = append((*from)[:i:i], (*from)[i+1:]...)
	return l
}

// settled checks that nobody waits who could be served.
func (s *site) settled() {
	idle := false
	for _, c := range s.candidates {
		idle = idle || c.load.Leases[ledger.Probing] == 0
	}
	online, waits := 0, 0
	for _, b := range s.batch {
		if b {
			waits++
		} else {
			online++
		}
	}
	require.Equal(s.r, waits, s.Batch().Waiting)
	require.Equal(s.r, online, s.Waiting(testModel))
	if waits > 0 && online == 0 && idle && len(s.pooled) == 0 && s.places.Room() {
		require.LessOrEqual(s.r, s.free-len(s.probing), 1, "batch waits although nothing else does and more than one slot is free")
	}
}

// Whatever comes and goes: batch takes nothing that another request waits for, it is served once
// nothing else waits and more than one slot is free, and nothing is lost.
func TestBatchBesideOnline(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		slots, size := rapid.IntRange(1, 5).Draw(r, "slots"), rapid.Int64Range(1, 6).Draw(r, "places")
		now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
		s := &site{r: r, free: slots, places: newPlaces(size), waiting: map[int]func(){}, batch: map[int]bool{}}
		candidates, change := withSlots(&s.free, "a", "b")
		s.Scheduler = newScheduler(t, candidates, change, withPlaces(s.places), func(c *Config) {
			c.Clock = func() time.Time { return now }
			c.Push.MaxUnanswered, c.Queue.Max = 2, 1000
		})
		s.places.wake = s.Wake
		step := func(what string) {
			switch {
			case what == "online":
				s.offer(Request{Priority: rapid.IntRange(-100, 100).Draw(r, "priority"), Key: rapid.SampledFrom([]string{"a", "b"}).Draw(r, "key")})
			case what == "batch":
				s.offer(Request{Batch: true, Priority: rapid.IntRange(-100, 100).Draw(r, "priority"),
					Key: rapid.SampledFrom([]string{"a", "b"}).Draw(r, "key")})
			case what == "answered" && len(s.probing) > 0:
				l := pick(r, &s.probing)
				s.pooled = append(s.pooled, l)
				l.Answered(Usage{PromptTokens: 10}, now.Add(time.Hour))
			case what == "bound" && len(s.pooled) > 0 && s.free > 0:
				l := pick(r, &s.pooled)
				s.free--
				s.running = append(s.running, l)
				l.Dispatched()
				s.places.Release()
			case what == "ended" && len(s.running) > 0:
				l := pick(r, &s.running)
				s.free++
				l.Release()
				s.Wake() // as the dispatcher does that has more room
			case what == "left":
				for n, withdraw := range s.waiting {
					withdraw()
					delete(s.waiting, n)
					delete(s.batch, n)
					break
				}
			}
			now = now.Add(time.Millisecond)
			s.settled()
		}
		for range rapid.IntRange(1, 120).Draw(r, "steps") {
			step(rapid.SampledFrom([]string{"online", "batch", "batch", "answered", "bound", "ended", "left"}).Draw(r, "step"))
		}
		for round := 0; len(s.probing)+len(s.pooled)+len(s.running) > 0; round++ { // nothing comes any more
			require.Less(r, round, 2000)
			for _, what := range []string{"answered", "bound", "ended"} {
				step(what)
			}
		}
		for n := range s.waiting {
			require.True(r, s.batch[n] && slots < 2, "online is served whatever batch does, and batch where there are two slots")
		}
		for _, withdraw := range s.waiting {
			withdraw()
		}
		require.Equal(r, size, s.places.free.Load(), "places free at the end")
		requireIdle(r, s.Scheduler)
	})
}

func TestBatchHasAShareOfEveryQueue(t *testing.T) {
	require.Equal(t, []int{1, 1, 1, 2}, []int{queue.MaxBatch(1), queue.MaxBatch(2), queue.MaxBatch(3), queue.MaxBatch(4)})
}
