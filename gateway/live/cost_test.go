package live

import (
	"compress/gzip"
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

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/incident"
	"evenkeel/gateway/receipt"
	"evenkeel/gateway/timeline"
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
	b.ReportMetric(timed(func() { Decisions(ring.Latest(mostDecisions), time.Now()) }), "decisions-µs")
}

// floor is a dispatcher with its streams.
type floor struct {
	*testing.B
	d     *dispatcher.Dispatcher
	slots []*dispatcher.Slot
	told  []int // tokens
	ids   uint64
	zip   *gzip.Writer
	book  incident.Book
	past  past
	looks atomic.Bool // somebody watches
	stop  func()      // nobody does any more
}

func newFloor(b *testing.B) *floor {
	d, err := dispatcher.Start(b.Context(), dispatcher.Config{Config: board.Config{TickLimit: time.Hour}})
	require.NoError(b, err)
	f := &floor{B: b, d: d, zip: gzip.NewWriter(io.Discard)}
	ws := make([]board.Worker, 144)
	for i := range ws {
		ws[i] = board.Worker{ID: int32(i), Name: "10.0.3.10:8000/" + strconv.Itoa(i), Model: "m", Group: "dp", Barrier: true, Slots: 48, Capacity: 400_000, Up: true}
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
					f.d.Loads(b.Context())
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
		got.Slot.Started()
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

// document is what a turn of Live does with what it was told.
func (f *floor) document() {
	s := f.d.Status(f.Context())
	var d Document
	for i := range s.Models {
		d.Models = append(d.Models, model(&s.Models[i], rankStates{}, 0, true))
	}
	f.book.Observe(time.Now(), findingsOf(&d, timeline.Ended{}))
	d.Incidents = f.book.Incidents()
	data, err := json.Marshal(&d)
	if err != nil {
		f.Error(err)
	}
	f.past.keep(time.Now().UnixMilli(), data)
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
