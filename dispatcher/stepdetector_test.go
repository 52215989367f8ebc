package dispatcher

import (
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// streams are requests of one group. Each of them gets tokens once per step.
type streams struct {
	detector *stepDetector
	spoke    []Slot
	told     int
}

func newStreams(n int) *streams {
	s := &streams{spoke: make([]Slot, n)}
	s.detector = newStepDetector(func() { s.told++ })
	return s
}

func (s *streams) speak(i int) { s.detector.onToken(&s.spoke[i].firstStep, &s.spoke[i].lastStep) }

// step has all streams speak, spread over some time.
func (s *streams) step(spread time.Duration) {
	for i := range s.spoke {
		s.speak(i)
		time.Sleep(spread / time.Duration(len(s.spoke)))
	}
}

func TestStepsAreHeardInTheStreams(t *testing.T) {
	for _, c := range []struct {
		name   string
		spread time.Duration
	}{
		{"all at once", 0},
		{"spread over half of the step", 25 * time.Millisecond},
		{"spread over nearly all of it", 49 * time.Millisecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStreams(100)
				time.Sleep(time.Second)
				for range 20 {
					s.step(c.spread)
					time.Sleep(50*time.Millisecond - c.spread)
				}
				got := s.detector.take(nil)
				require.Len(t, got, 19, "the first one is known by the second")
				require.Zero(t, got[0].Length)
				for _, step := range got[1:] {
					require.InDelta(t, 50*time.Millisecond, step.Length, 1e6)
				}
				require.Equal(t, 19, s.told)
				require.Empty(t, s.detector.take(nil))
			})
		})
	}
}

func TestAStreamThatCatchesUpIsNoStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStreams(10)
		s.detector.minLength.Store(int64(20 * time.Millisecond)) // as the owner sets it once it knows the steps
		rng := rand.New(rand.NewPCG(1, 2))
		owed := 0 // events the last stream has not delivered
		for range 50 {
			for i := range 9 {
				s.speak(i)
			}
			owed++
			time.Sleep(10 * time.Millisecond)
			if rng.IntN(3) == 0 {
				for ; owed > 0; owed-- {
					s.speak(9)
				}
			}
			time.Sleep(40 * time.Millisecond)
		}
		got := s.detector.take(nil)
		require.Len(t, got, 49)
		for _, step := range got[1:] {
			require.Equal(t, 50*time.Millisecond, step.Length)
		}
	})
}

func TestAPauseIsNoStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := testConfig()
		d := start(t, cfg)
		d.SetWorkers(ranks(1, 1, 0))
		generate := func() {
			s := (<-d.Enqueue(&pool.Entry{ID: 1, Model: "m"})).Slot
			for n := range 5 {
				time.Sleep(30 * time.Millisecond)
				s.Progress(n + 1)
			}
			d.Release(s, board.Outcome{})
		}
		generate()
		time.Sleep(time.Hour)
		generate()
		synctest.Wait()
		g := d.Status(t.Context()).Models[0].Groups[0]
		require.EqualValues(t, 6, g.Steps.Count, "three a request: its first event joins a step, its second begins one")
		require.InDelta(t, 6*.03, g.Steps.Seconds, 1e-9)
		require.EqualValues(t, 6, g.Steps.Buckets[.03])
		require.Zero(t, g.Steps.Buckets[.02])
		require.InDelta(t, 30, g.Step.MeanMs, 1e-6)
	})
}

func TestABeatDoesNotAllocate(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 1, 0))
	s := h.put(pool.Entry{}).slotNow(t)
	n := 0
	h.told = make([]func(*scheduler), 0, 4096)
	require.Zero(t, testing.AllocsPerRun(1000, func() { n++; s.Progress(n) }))
}

// What an event costs at the board: 144 ranks of 40 streams in one group.
func BenchmarkProgress(b *testing.B) {
	h := newHand(b, testConfig())
	h.fleet(ranks(144, 40, 0))
	slots := make([]*Slot, 0, 144*40)
	for _, w := range h.putAll(144*40, func() pool.Entry { return pool.Entry{Prompt: 10} }) {
		slots = append(slots, w.slotNow(b))
	}
	h.wake = func(func(*scheduler)) bool { return true }
	b.ReportAllocs()
	b.ResetTimer()
	var next atomic.Int64
	b.RunParallel(func(p *testing.PB) {
		i := int(next.Add(1)) * 1000
		for p.Next() {
			s := slots[i%len(slots)]
			s.Progress(s.Generated() + 1)
			i++
		}
	})
}
