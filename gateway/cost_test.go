package gateway

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/detect"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/live"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/watch"
	"evenkeel/pool"
)

// BenchmarkCost is what a page that is open costs a dispatcher of 144 ranks and
// 5,000 streams. An operation is a step: every stream tells a token, 35 end and
// as many begin. The steps of every other fifth of a second are watched, a
// hundred times as often as a page does: watched/unwatched is the ratio of
// their median times. The other figures are of single calls. A sample (the
// history, once a second, always) and a status (once a second while somebody
// watches) are made by the dispatcher's goroutine, and share-% is what both
// take of its time; a document is made beside it and compressed for one
// watcher, and kept for who wants to see it later, with the last decisions of as many
// requests that run.
func BenchmarkCost(b *testing.B) {
	f := newFloor(b)
	var took [2][]float64 // µs a step: unwatched, watched
	for began := time.Now(); b.Loop(); {
		watched := int(time.Since(began)/(200*time.Millisecond)) % 2
		f.looks.Store(watched == 1)
		at := time.Now()
		f.step()
		took[watched] = append(took[watched], float64(time.Since(at).Nanoseconds())/1e3)
	}
	b.StopTimer()
	f.stop()
	if len(took[1]) > 0 {
		b.ReportMetric(median(took[1])/median(took[0]), "watched/unwatched-at-100x")
	}
	sample, status := timed(func() { f.d.Loads(b.Context()) }), timed(func() { f.d.Status(b.Context()) })
	b.ReportMetric(sample, "sample-µs")
	b.ReportMetric(status, "status-µs")
	b.ReportMetric((sample+status)/1e6*100, "share-%")
	b.ReportMetric(timed(f.document), "document-µs")
	ring := receipt.NewRing(10_000, 1<<30)
	for i := range 5000 {
		ring.Open(&receipt.Receipt{ID: strconv.Itoa(i), Arrival: time.Now()})
	}
	b.ReportMetric(timed(func() { live.Decisions(ring.Latest(live.MostDecisions), time.Now()) }), "decisions-µs")
}

// floor is a dispatcher with its streams.
type floor struct {
	*testing.B
	d     *dispatcher.Dispatcher
	slots []*dispatcher.Slot
	told  []int // tokens
	ids   uint64
	zip   *gzip.Writer
	watch *watch.Watch
	live  *live.Live
	looks atomic.Bool // somebody watches
	stop  func()      // nobody does any more
}

func newFloor(b *testing.B) *floor {
	d, err := dispatcher.Start(b.Context(), dispatcher.Config{Config: board.Config{TickLimit: time.Hour}})
	require.NoError(b, err)
	f := &floor{B: b, d: d, zip: gzip.NewWriter(io.Discard)}
	f.watch = watch.New(watch.Deps{Sample: f.sample, Facts: f.facts})
	f.live = live.New(f.watch, live.Options{Log: zap.NewNop()})
	ws := make([]board.Worker, 144)
	for i := range ws {
		ws[i] = board.Worker{ID: int32(i), Name: "10.0.3.10:8000/" + strconv.Itoa(i), Model: "m", Group: "dp", Barrier: true, Slots: 48,
			Capacity: 400_000, Up: true}
	}
	d.SetWorkers(ws)
	for range 5000 {
		f.admit(1)
	}
	tick, over, ended := time.NewTicker(10*time.Millisecond), make(chan struct{}), make(chan struct{})
	f.stop = sync.OnceFunc(func() { close(over); <-ended })
	b.Cleanup(f.stop)
	go func() {
		defer close(ended)
		defer tick.Stop()
		for {
			select {
			case <-over:
				return
			case <-tick.C:
				if f.looks.Load() {
					f.document()
				}
			}
		}
	}()
	return f
}

// admit has n more streams.
func (f *floor) admit(n int) {
	results := make([]<-chan dispatcher.Result, n)
	for i := range results {
		f.ids++
		results[i] = f.d.Enqueue(&pool.Entry{ID: f.ids, Model: "m", Prompt: 500 + rand.IntN(6000), Arrival: time.Now()})
	}
	for _, r := range results {
		got := <-r
		require.NoError(f, got.Err)
		got.Slot.ReportStarted()
		f.slots, f.told = append(f.slots, got.Slot), append(f.told, 0)
	}
}

func (f *floor) step() {
	for i, s := range f.slots {
		f.told[i]++
		s.Progress(f.told[i])
	}
	const end = 35
	for range end {
		i := rand.IntN(len(f.slots))
		f.d.Release(f.slots[i], board.Outcome{Generated: f.told[i]})
		last := len(f.slots) - 1
		f.slots[i], f.told[i] = f.slots[last], f.told[last]
		f.slots, f.told = f.slots[:last], f.told[:last]
	}
	f.admit(end)
}

// facts are those of the dispatcher.
func (f *floor) facts(ctx context.Context) detect.Facts {
	s, g := f.d.Status(ctx), observer{&Gateway{fleet: fleet.New(fleet.Deps{Context: ctx})}}
	facts := detect.Facts{At: time.Now()}
	for i := range s.Models {
		facts.Models = append(facts.Models, g.modelFacts(&s.Models[i], 0))
	}
	return facts
}

// sample is what is kept of a second.
func (f *floor) sample(ctx context.Context) (detect.Sample, bool) {
	l, ok := f.d.Loads(ctx)
	return sampleOf(&l, &journal.Recent{}), ok
}

// document is what is done in a second in which somebody watches.
func (f *floor) document() {
	f.watch.CheckOnce(f.Context())
	data, err := json.Marshal(f.live.Document(f.Context()))
	if err != nil {
		f.Error(err)
	}
	_, _ = f.zip.Write(data) // to nobody
	_ = f.zip.Flush()
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// timed is the median time of a call, in µs.
func timed(f func()) float64 {
	all := make([]float64, 101)
	for i := range all {
		at := time.Now()
		f()
		all[i] = float64(time.Since(at).Nanoseconds()) / 1e3
	}
	return median(all)
}
