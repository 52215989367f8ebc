package engine

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
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

// If an engine's core gives no sign of life while a hand-off waits there, the engine gets nothing
// new until there is one: a token of any stream, a gauge that moves, or the canary.
func TestAnEngineThatGivesNoSignOfLifeGetsNothingNew(t *testing.T) {
	for _, row := range []struct {
		name, canary string // its answer; empty: none
		gaugesMove   bool
		wait         func() Wait
		quiet        bool // for longer than a moment
		believed     bool // the client gets what comes after a minute
	}{
		{"nothing moves", "", false, kept, true, false},
		{"its canaries are answered", ok(oneTokenAnswer), false, whole, false, true},
		{"a refusal of the canary says nothing of its core", refusing(404, "{}"), false, whole, true, false},
		{"gauges move", "", true, whole, false, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			f := decodes()
			f.set(completionsPath, row.canary)
			doubted(t, f, func(t *testing.T, m *Monitor, _ *prometheus.Registry) {
				quiet := func() bool { return errors.Is(m.Status("d0").Accused, errSilent) }
				l := m.Traffic("d0").Liveness(-1)
				p := l.AddPull(time.Now(), row.wait())
				for n := range 60 {
					if row.gaugesMove {
						f.set("/metrics", ok(gauges(n, 1)))
					}
					require.False(t, n <= 7 && quiet())
					time.Sleep(time.Second)
				}
				synctest.Wait()
				require.Equal(t, row.gaugesMove, f.count(completionsPath) == 0)
				require.Equal(t, row.quiet, quiet() || m.Status("d0").Wedged)
				require.Equal(t, row.believed, believed(p, time.Now()))
				p.End(time.Now(), true)
			})
		})
	}
	f := decodes()
	f.set(completionsPath, "")
	doubted(t, f, func(t *testing.T, m *Monitor, _ *prometheus.Registry) {
		l := m.Traffic("d0").Liveness(-1)
		p := l.AddPull(time.Now(), kept())
		time.Sleep(9 * time.Second)
		p.End(time.Now(), true)
		time.Sleep(3 * time.Second)
		require.ErrorIs(t, m.Status("d0").Accused, errSilent, "nothing waits there any more, and nothing has spoken for it")
		l.RecordSign(time.Now())
		time.Sleep(2 * time.Second)
		require.NoError(t, m.Status("d0").Accused)
	})
}

// What reads a sample knows its sign of life: gauges that have changed are of a step since the
// scrape before.
func TestAChangedSampleIsASignOfLifeBeforeItIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := decodes()
		f.set("/metrics", ok(gauges(1, 1)))
		c := NewClient(Options{Dial: f.dial})
		m := NewMonitor(MonitorConfig{Client: c})
		signs := make(chan time.Time, 1000)
		m.OnSample(func(string, *Sample, time.Time) { signs <- m.Traffic("d0").Liveness(-1).LastSign() })
		d0 := target(t, "http://d0:8000")
		m.Set([]Instance{{ID: "d0", Role: "decode", Target: d0, Slots: 4, Canaries: []*Target{d0}}})
		end := runs(t, m, c)
		<-signs
		still := <-signs
		f.set("/metrics", ok(gauges(2, 1)))
		require.True(t, (<-signs).After(still), "the first sample that has changed")
		end()
	})
}
