package watch

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/gateway/detect"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// proxy is one that a test makes up.
type proxy struct {
	mu      sync.Mutex
	asked   int
	silent  bool // its dispatcher does not answer
	engines []detect.Engine
}

func (p *proxy) host(reg prometheus.Registerer) Deps {
	return Deps{
		Sample: func(context.Context) (detect.Sample, bool) { return detect.Sample{At: time.Now()}, !p.silent },
		Facts: func(context.Context) detect.Facts {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.asked++
			return detect.Facts{At: time.Now(), Proxy: detect.Proxy{Ready: true}, Engines: p.engines}
		},
		Registerer: reg,
	}
}

// have has it have these engines, and says how often facts were asked for.
func (p *proxy) have(engines ...detect.Engine) (asked int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.engines = engines
	return p.asked
}

// series are those of evenkeel_incident, with their values.
func series(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	families, err := reg.Gather()
	require.NoError(t, err)
	all := map[string]float64{}
	for _, f := range families {
		if f.GetName() != "evenkeel_incident" {
			continue
		}
		for _, m := range f.GetMetric() {
			labels := ""
			for _, l := range m.GetLabel() {
				labels += l.GetName() + "=" + l.GetValue() + " "
			}
			all[labels] = m.GetGauge().GetValue()
		}
	}
	return all
}

// Whether anybody watches or not, an incident is counted as long as it lasts, and since when.
func TestIncidentsAreCountedThoughNobodyWatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, reg := &proxy{}, prometheus.NewRegistry()
		w := New(p.host(reg))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); w.Run(ctx) }()
		time.Sleep(20 * time.Second)
		require.Empty(t, series(t, reg))
		began := time.Now()
		asked := p.have(detect.Engine{ID: "d:1\xff", Role: "decode", State: "down", Why: "refused", SinceS: 3})
		require.Equal(t, 4, asked, "one look in five seconds")
		time.Sleep(10 * time.Second)
		got := series(t, reg)
		require.Len(t, got, 1)
		require.InDelta(t, float64(began.Unix()), got["kind=engine_down severity=bad subject=d:1? "], 5)
		p.have()
		time.Sleep(10 * time.Second)
		require.Empty(t, series(t, reg))
		cancel()
		<-done
	})
}

// Somebody who wants to see it has a snapshot in each second; a proxy that does not answer has a
// gap.
func TestSnapshotsAreShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, wanted, bins, looks := &proxy{}, false, 0, 0
		w := New(p.host(nil))
		w.OnSnapshot(func() bool { return wanted }, func(l *Snapshot) {
			looks++
			if l.EndsBin {
				bins++
			}
		})
		seconds := func(n int) {
			for range n {
				time.Sleep(time.Second)
				w.CheckOnce(t.Context())
			}
		}
		seconds(10)
		require.Equal(t, []int{2, 2}, []int{looks, bins})
		wanted = true
		seconds(10)
		require.Equal(t, []int{12, 4}, []int{looks, bins})
		p.silent = true
		seconds(10)
		require.Equal(t, []int{12, 4}, []int{looks, bins})
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		p.silent = false
		w.CheckOnce(gone)
		require.Equal(t, 12, looks, "what was cut short is not judged")
	})
}

// There are never more series than incidents that are kept.
func TestSeriesAreBounded(t *testing.T) {
	p, reg := &proxy{}, prometheus.NewRegistry()
	w := New(p.host(reg))
	for i := range 500 {
		p.engines = append(p.engines,
			detect.Engine{ID: fmt.Sprintf("h%d:1", i), Role: "decode", State: "down", Why: fmt.Sprintf("cause %c%c", 'a'+i%26, 'a'+i/26)})
	}
	w.CheckOnce(t.Context())
	got := len(series(t, reg))
	require.Positive(t, got)
	require.LessOrEqual(t, got, 65)
}

// A sample has how late timers were since the one before, and what the process used.
func TestASampleHasHowLateTimersWere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &proxy{}
		w := New(p.host(nil))
		for _, late := range []time.Duration{300 * time.Millisecond, 0} {
			w.pulse.sum.Add(int64(late))
			w.pulse.most.Store(int64(late))
			w.CheckOnce(t.Context())
			time.Sleep(time.Second) // one sample is kept for each second
			var last detect.Sample
			w.With(func(d *detect.Watch) { last = *d.Last() })
			require.Equal(t, float64(late.Milliseconds()), last.LateMs)
			require.Positive(t, last.CPUSeconds)
			require.Positive(t, last.Cores)
		}
	})
}
