package dispatcher

import (
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/fakes"
	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

func start(t *testing.T, cfg Config) *Dispatcher {
	t.Helper()
	d, err := Start(t.Context(), cfg)
	require.NoError(t, err)
	return d
}

func TestEnqueueFailsAtTheDeadline(t *testing.T) {
	for _, c := range []struct {
		name  string
		entry func(now time.Time) pool.Entry
		want  error
	}{
		{"the pool's TTL ends first", func(time.Time) pool.Entry { return pool.Entry{} }, board.ErrPoolTimeout},
		{"the hand-off's deadline ends first", func(now time.Time) pool.Entry { return pool.Entry{Deadline: now.Add(10 * time.Second)} }, board.ErrExpired},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // time here moves only while every goroutine is blocked
				cfg := testConfig()
				cfg.TTL = 10 * time.Second
				if errors.Is(c.want, board.ErrExpired) {
					cfg.TTL = 20 * time.Second
				}
				d := start(t, cfg)
				d.SetWorkers(ranks(1, 1, 0))
				<-d.Enqueue(&pool.Entry{ID: 1, Model: "m"}) // takes the only slot
				e := c.entry(time.Now())
				e.ID, e.Model = 2, "m"
				got := d.Enqueue(&e)
				time.Sleep(10*time.Second - 1)
				synctest.Wait()
				require.Empty(t, got, "answered before the deadline")
				time.Sleep(time.Nanosecond)
				require.ErrorIs(t, (<-got).Err, c.want)
			})
		})
	}
}

func TestTheWindowCoalescesABurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := testConfig()
		cfg.Window = board.DefaultWindow
		d := start(t, cfg)
		d.SetWorkers(ranks(1, 2, 0))
		a, b := <-d.Enqueue(&pool.Entry{ID: 1, Model: "m"}), <-d.Enqueue(&pool.Entry{ID: 2, Model: "m"})
		first, second := d.Enqueue(&pool.Entry{ID: 3, Model: "m"}), d.Enqueue(&pool.Entry{ID: 4, Model: "m"})
		began := time.Now()
		d.Release(a.Slot, board.Outcome{})
		time.Sleep(2 * time.Millisecond)
		d.Release(b.Slot, board.Outcome{})
		s := (<-first).Slot
		require.Equal(t, 3*time.Millisecond, time.Since(began))
		require.Equal(t, 3*time.Millisecond, s.Wait)
		synctest.Wait()
		require.Len(t, second, 1, "in the same round")
	})
}

func TestAnEntryGoesAtOnceWhereASlotIsFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := testConfig()
		cfg.Window = time.Hour
		d := start(t, cfg)
		d.SetWorkers(ranks(1, 1, 0))
		began := time.Now()
		r := <-d.Enqueue(&pool.Entry{ID: 1, Model: "m", Prompt: 10})
		require.NoError(t, r.Err)
		require.Zero(t, time.Since(began))
		require.Equal(t, "d0", r.Slot.WorkerName)
		require.Equal(t, "main", r.Slot.Group)
		require.Equal(t, "pooled", r.Slot.Policy)
		require.EqualValues(t, 1, r.Slot.Stage)
	})
}

func TestCancelAnswersEverybodyAndHangsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cfg := testConfig()
		cfg.Places = pool.NewSemaphore(1)
		d, err := Start(ctx, cfg)
		require.NoError(t, err)
		d.SetWorkers(ranks(1, 1, 0))
		running := (<-d.Enqueue(&pool.Entry{ID: 1, Model: "m"})).Slot
		got := d.Enqueue(&pool.Entry{ID: 2, Model: "m"})
		synctest.Wait()
		require.True(t, cfg.Places.TryAcquire())
		cancel()
		require.ErrorIs(t, (<-got).Err, board.ErrDraining)
		synctest.Wait()
		require.Zero(t, cfg.Places.Used())

		late := &pool.Entry{ID: 3, Model: "m"}
		require.True(t, cfg.Places.TryAcquire())
		require.ErrorIs(t, (<-d.Enqueue(late)).Err, board.ErrDraining)
		require.Zero(t, cfg.Places.Used(), "the place of one that came too late")
		d.Withdraw(late)
		d.Release(running, board.Outcome{})
		d.SetWorkers(nil)
		require.ErrorIs(t, d.SetPolicy("immediate"), board.ErrDraining)
		require.Equal(t, 1, d.Status(t.Context()).Models[0].Workers[0].Used, "what was left at the end")
	})
}

func TestASecondReleaseIsCountedAndChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := start(t, testConfig())
		d.SetWorkers(ranks(1, 2, 0))
		s, other := (<-d.Enqueue(&pool.Entry{ID: 1, Model: "m"})).Slot, (<-d.Enqueue(&pool.Entry{ID: 2, Model: "m"})).Slot
		d.Release(s, board.Outcome{})
		d.Release(s, board.Outcome{})
		d.Release(s, board.Outcome{})
		require.EqualValues(t, 2, count(t, d.metrics.doubleReleases))
		require.Equal(t, 1, d.Status(t.Context()).Models[0].Workers[0].Used)
		d.Release(other, board.Outcome{})
	})
}

func TestProgressIsMonotonic(t *testing.T) {
	s := &Slot{}
	for _, n := range []int{3, 1, 7, 7, 5} {
		s.Progress(n)
	}
	require.Equal(t, 7, s.Generated())
}

func TestStartRefusesWhatCannotWork(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(*Config)
		says string
	}{
		{"an unknown policy", func(c *Config) { c.Policy = "br9" }, "br9"},
		{"an unknown policy for ranks without barrier", func(c *Config) { c.DensePolicy = "jsq-9" }, "jsq-9"},
		{"a negative window", func(c *Config) { c.Window = -1 }, "window"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := testConfig()
			c.edit(&cfg)
			_, err := Start(t.Context(), cfg)
			require.ErrorContains(t, err, c.says)
		})
	}
	t.Run("a registry that has a dispatcher already", func(t *testing.T) {
		cfg := testConfig()
		cfg.Registerer = prometheus.NewRegistry()
		ctx, cancel := context.WithCancel(t.Context())
		d, err := Start(ctx, cfg)
		require.NoError(t, err)
		_, err = Start(ctx, cfg)
		require.ErrorContains(t, err, "registerer")
		cancel()
		<-d.done
	})
	t.Run("a decision log that cannot be opened, and then one that can", func(t *testing.T) {
		cfg := testConfig()
		cfg.Registerer = prometheus.NewRegistry()
		folder := filepath.Join(t.TempDir(), "logs")
		cfg.DecisionLog.File = filepath.Join(folder, "decisions.jsonl")
		ctx, cancel := context.WithCancel(t.Context())
		_, err := Start(ctx, cfg)
		require.ErrorIs(t, err, fs.ErrNotExist)
		require.NoError(t, os.Mkdir(folder, 0o700))
		d, err := Start(ctx, cfg)
		require.NoError(t, err, "the first start has left no metrics")
		cancel()
		<-d.done
	})
}

func TestSetPolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := start(t, testConfig())
		d.SetWorkers(ranks(1, 1, 0))
		<-d.Enqueue(&pool.Entry{ID: 1, Model: "m"})
		waits := d.Enqueue(&pool.Entry{ID: 2, Model: "m"})
		require.Error(t, d.SetPolicy("br9"))
		require.Equal(t, "pooled", d.Policy(), "a policy that does not parse changes nothing")
		require.NoError(t, d.SetPolicy("immediate"))
		require.Equal(t, "immediate", d.Policy())
		require.Equal(t, "immediate", (<-waits).Slot.Policy, "those that wait are decided anew")
	})
}

func TestARankThatIsTakenOutGetsNothingAfterwards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		decides, goes := make(chan struct{}), make(chan struct{})
		d := start(t, testConfig(&fake{Spec: "pooled", Decides: func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
			decides <- struct{}{}
			<-goes
			return fakes.LeastKV(false)(s, dst)
		}}))
		d.SetWorkers(ranks(1, 1, 0))
		got := d.Enqueue(&pool.Entry{ID: 1, Model: "m"})
		<-decides
		var out atomic.Bool
		go func() {
			d.SetWorkers(nil)
			out.Store(true)
		}()
		synctest.Wait()
		require.False(t, out.Load(), "a round decides on the ranks of before")
		close(goes)
		synctest.Wait()
		require.True(t, out.Load())
		require.Len(t, got, 1, "bound before")
		require.NoError(t, (<-got).Err)
	})
}

// Many goroutines use every call at once: nothing is lost, nothing hangs and
// the books are level afterwards.
func TestManyCallersAtOnce(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cfg := testConfig()
	cfg.Window = 200 * time.Microsecond
	cfg.Places = pool.NewSemaphore(1 << 20)
	cfg.Registerer = prometheus.NewRegistry()
	d, err := Start(ctx, cfg)
	require.NoError(t, err)
	fleet := ranks(6, 3, 20_000)
	d.SetWorkers(fleet)

	var ids, slots, errs atomic.Int64
	var callers sync.WaitGroup
	const goroutines, each = 32, 60
	for g := range goroutines {
		callers.Go(func() {
			rng := rand.New(rand.NewPCG(7, uint64(g)))
			for range each {
				cfg.Places.TryAcquire()
				e := &pool.Entry{ID: uint64(ids.Add(1)), Model: "m", Prompt: rng.IntN(4000)}
				got := d.Enqueue(e)
				if rng.IntN(3) == 0 {
					d.Withdraw(e)
				}
				r := <-got
				if r.Err != nil {
					errs.Add(1)
					continue
				}
				slots.Add(1)
				r.Slot.ReportStarted()
				for n := range rng.IntN(50) {
					r.Slot.Progress(n)
				}
				d.Release(r.Slot, board.Outcome{Kind: board.Finished})
			}
		})
	}
	stop := make(chan struct{})
	var admin sync.WaitGroup
	admin.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			ws := append([]board.Worker(nil), fleet...)
			ws[i%6].Up = i%2 == 0
			d.SetWorkers(ws)
			if err := d.SetPolicy([]string{"pooled", "immediate"}[i%2]); err != nil {
				t.Error(err)
			}
			d.Status(ctx)
		}
	})
	callers.Wait()
	close(stop)
	admin.Wait()

	require.EqualValues(t, goroutines*each, slots.Load()+errs.Load())
	s := d.Status(ctx)
	require.Zero(t, s.Drift)
	require.Zero(t, s.Models[0].Pool)
	require.EqualValues(t, slots.Load(), s.Models[0].Finished)
	for _, w := range s.Models[0].Workers {
		require.Zero(t, w.Used)
		require.Zero(t, w.KVTokens)
	}
	require.Zero(t, cfg.Places.Used())
	cancel()
	<-d.done
}
