package engine

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
)

// kept is the wait for a hand-off of vLLM's NIXL that is sent as soon as it is prefilled.
func kept() Wait {
	return Wait{KeptUntil: time.Now().Add(26250 * time.Millisecond), MaxSilence: 11250 * time.Millisecond}
}

// whole is the same for an answer in one piece.
func whole() Wait {
	w := kept()
	w.OnePiece = true
	return w
}

// believed says whether the client gets the answer of which p is the wait.
func believed(p *PendingPull, at time.Time) bool { return !p.FirstEvent(at).MayBeAnotherPrompts() }

// seen gives signs of life for so long, and returns with the last one.
func seen(l *Liveness, d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		l.RecordSign(time.Now())
	}
	l.RecordSign(time.Now())
}

func TestASignOfLifeAllocatesNothing(t *testing.T) {
	l := NewLiveness()
	defer l.AddPull(time.Now(), whole()).End(time.Now(), true)
	at := time.Now()
	require.Zero(t, testing.AllocsPerRun(100, func() {
		at = at.Add(20 * time.Millisecond)
		l.RecordSign(at)
		at = at.Add(time.Minute) // a silence
		l.RecordSign(at)
	}))
}

// If an engine's core gives no sign of life while a hand-off waits there, the engine gets nothing new until there is one:
// a token of any stream, a gauge that moves, or the canary.
func TestAnEngineThatGivesNoSignOfLifeGetsNothingNew(t *testing.T) {
	quiet := func(m *Monitor) bool { return errors.Is(m.Status("d0").Accused, errSilent) }
	t.Run("until a token comes", func(t *testing.T) {
		f := decodes()
		f.set("/v1/completions", "") // the canary is not answered
		doubted(t, f, func(t *testing.T, m *Monitor, _ *prometheus.Registry) {
			l := m.Traffic("d0").Liveness(-1)
			p := l.AddPull(time.Now(), kept())
			time.Sleep(7 * time.Second)
			require.False(t, quiet(m))
			time.Sleep(2 * time.Second)
			require.True(t, quiet(m))
			require.True(t, m.Status("d0").Up)
			p.End(time.Now(), true)
			time.Sleep(3 * time.Second)
			require.True(t, quiet(m), "nothing waits there any more, and nothing has spoken for it")
			l.RecordSign(time.Now())
			time.Sleep(2 * time.Second)
			require.False(t, quiet(m))
		})
	})
	t.Run("until the canary passes", func(t *testing.T) {
		f := decodes()
		doubted(t, f, func(t *testing.T, m *Monitor, _ *prometheus.Registry) {
			p := m.Traffic("d0").Liveness(-1).AddPull(time.Now(), whole())
			time.Sleep(time.Minute)
			require.True(t, believed(p, time.Now()), "its canaries were answered all the time")
			p.End(time.Now(), true)
			require.Greater(t, f.count("/v1/completions"), 3)
		})
	})
	t.Run("and a refusal says nothing of its core", func(t *testing.T) {
		f := decodes()
		f.set("/v1/completions", "HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
		doubted(t, f, func(t *testing.T, m *Monitor, _ *prometheus.Registry) {
			p := m.Traffic("d0").Liveness(-1).AddPull(time.Now(), kept())
			time.Sleep(27 * time.Second)
			require.Positive(t, f.count("/v1/completions"))
			p.End(time.Now(), true)
		})
	})
	t.Run("and not while gauges move", func(t *testing.T) {
		f := decodes()
		doubted(t, f, func(t *testing.T, m *Monitor, _ *prometheus.Registry) {
			p := m.Traffic("d0").Liveness(-1).AddPull(time.Now(), whole())
			for n := range 60 {
				f.set("/metrics", ok(gauges(n, 1)))
				time.Sleep(time.Second)
				require.False(t, quiet(m))
			}
			require.True(t, believed(p, time.Now()))
			p.End(time.Now(), true)
			require.Zero(t, f.count("/v1/completions"))
		})
	})
}

// What reads a sample knows its sign of life: gauges that have changed are of a step since the scrape before.
func TestAChangedSampleIsASignOfLifeBeforeItIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := decodes()
		f.set("/metrics", ok(gauges(1, 1)))
		c := NewClient(Options{Dial: f.dial})
		m := NewMonitor(MonitorConfig{Client: c, Registerer: prometheus.NewPedanticRegistry(), Log: zap.NewNop(), Canary: time.Hour})
		signs := make(chan time.Time, 1000)
		m.OnSample(func(string, *Sample, time.Time) { signs <- m.Traffic("d0").Liveness(-1).LastSign() })
		d0 := target(t, "http://d0:8000")
		m.Set([]Instance{{ID: "d0", Role: "decode", Target: d0, Slots: 4, Canaries: []*Target{d0}}})
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); m.Run(ctx) }()
		<-signs
		still := <-signs
		f.set("/metrics", ok(gauges(2, 1)))
		require.True(t, (<-signs).After(still), "the first sample that has changed")
		stop()
		<-done
		c.Close()
	})
}
