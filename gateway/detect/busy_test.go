package detect

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// busyFacts are those of a proxy with engines on ten hosts. lateShare is the share of the last
// seconds by which its timers were late.
func busyFacts(s int, lateShare float64, hung ...int) *Facts {
	f := &Facts{At: noon.Add(time.Duration(s) * time.Second), Proxy: Proxy{Ready: true}, Prefill: Prefill{ScrapeEveryMs: 1000}}
	f.Proxy.Own = Own{LateShare: lateShare, LatestMs: 5200 * lateShare, UsedCores: 0.3, Cores: 2}
	for i := range 10 {
		prefiller := fmt.Sprintf("10.0.0.%d:80", i)
		f.Engines = append(f.Engines, Engine{ID: prefiller, Role: prefillRole, State: "up", Ranks: 1, SinceS: 999})
		f.Prefill.Engines = append(f.Prefill.Engines, PrefillEngine{ID: prefiller + "/0", State: "open"})
	}
	for _, i := range hung {
		e := &f.Engines[i]
		e.State, e.Hangs, e.SinceS, e.Why = "down", true, 1, "it does not answer its health check (5 s)"
	}
	return f
}

// What became late at many hosts, while the proxy's own timers are late, is told to follow from
// that.
func TestABusyMachineIsToldFirst(t *testing.T) {
	var b Book
	for s := range 60 {
		f := busyFacts(s, 0.6, 2, 5, 7)
		if s < 5 {
			f = busyFacts(s, 0.1)
		}
		for i := range f.Prefill.Engines {
			if s > 12 {
				f.Prefill.Engines[i].ScrapeAgeMs = 9000
			}
		}
		b.Observe(f.At, Find(f, Ended{}))
		if s < 10 {
			continue
		}
		in := b.Incidents()
		require.Len(t, in, 1, "after %d s", s)
		require.Equal(t, []any{ProxyBusy, "", Bad}, []any{in[0].Kind, in[0].Subject, in[0].Severity}, "after %d s", s)
		require.Contains(t, in[0].What, "it used 0.3 of its 2 cores")
		require.Contains(t, in[0].Clients, "These follow from it: 3 prefill engines take connections, but do not answer")
	}
}

// One engine that hangs beside a busy machine is told as itself, and the machine first.
func TestAnEngineHangsBesideABusyMachine(t *testing.T) {
	var b Book
	for s := range 30 {
		f := busyFacts(s, 0.4, 3)
		b.Observe(f.At, Find(f, Ended{}))
	}
	in := b.Incidents()
	require.Len(t, in, 2)
	require.Equal(t, []Kind{ProxyBusy, EngineHangs}, []Kind{in[0].Kind, in[1].Kind})
}

// Without late timers, engines of many hosts that hang are engines that hang.
func TestManyEnginesHangAndTheMachineIsIdle(t *testing.T) {
	var b Book
	for s := range 30 {
		f := busyFacts(s, 0.02, 1, 2, 3, 4, 5)
		b.Observe(f.At, Find(f, Ended{}))
	}
	in := b.Incidents()
	require.Len(t, in, 1)
	require.Equal(t, EngineHangs, in[0].Kind)
}

// An engine that has hung for long when the machine becomes busy stays an incident of its own, and
// one that hung just before does not. A moment in which the machine has time changes nothing.
func TestWhatHungBeforeTheMachineWasBusy(t *testing.T) {
	var b Book
	for s := range 150 {
		f := busyFacts(s, 0, 3)
		switch {
		case s >= 90 && s < 100:
			f = busyFacts(s, 0, 3, 4)
		case s >= 100:
			f = busyFacts(s, 0.5, 3, 4, 5, 6)
			if s == 120 || s == 140 {
				f.Proxy.Own.LateShare = 0.1
			}
		}
		b.Observe(f.At, Find(f, Ended{}))
		if s < 105 {
			continue
		}
		var open []subject
		for _, in := range b.Incidents() {
			if in.UntilMs == 0 {
				open = append(open, subject{in.Kind, in.Subject})
			}
		}
		require.Equal(t, []subject{{ProxyBusy, ""}, {EngineHangs, "10.0.0.3:80"}}, open, "after %d s", s)
	}
}

// When the machine is well again and an engine hangs on, it is told as itself.
func TestWhatHangsOnIsToldAsItself(t *testing.T) {
	var b Book
	for s := range 240 {
		f := busyFacts(s, 0.5, 2, 5, 7)
		if s > 60 {
			f = busyFacts(s, 0, 5)
		}
		b.Observe(f.At, Find(f, Ended{}))
	}
	in := b.Incidents()
	require.Equal(t, []any{EngineHangs, "10.0.0.5:80"}, []any{in[0].Kind, in[0].Subject})
	require.Zero(t, in[0].UntilMs)
}

// What is measured of the proxy itself is a mean over the last 20 seconds.
func TestLateTimersOfTheLastSeconds(t *testing.T) {
	var r Ring
	for s := range 40 {
		late := 0
		if s >= 30 && s < 36 {
			late = 500
		}
		r.Add(Sample{At: noon.Add(time.Duration(s) * time.Second), LateMs: float64(late), LatestMs: float64(late), CPUSeconds: 0.5 * float64(s)})
	}
	own := r.own()
	require.InDelta(t, 0.15, own.LateShare, 0.001)
	require.InDelta(t, 500, own.LatestMs, 0.001)
	require.InDelta(t, 0.5, own.UsedCores, 0.001)
}
