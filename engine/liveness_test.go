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

	"evenkeel/mooncake"
)

// kept is a hand-off of vLLM's NIXL that is sent as soon as it is prefilled: certainly kept for 26.25 s by itself, and for
// 11.25 s after a sign of life.
func kept() mooncake.Hold {
	p := mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()
	now := time.Now()
	return p.Hold(now, now.Add(p.PulledWithin()), &p)
}

// seen gives signs of life for so long, and returns with the last one.
func seen(l *Liveness, d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		l.RecordSign(time.Now())
	}
	l.RecordSign(time.Now())
}

func TestAWaitEndsWhenTheCoreHasBeenQuietForTooLong(t *testing.T) {
	for _, row := range []struct {
		name         string
		alive        time.Duration // it gives signs for so long, and none later
		after, limit time.Duration // the wait ends
	}{
		{"without any sign, with the hold", 0, 26 * time.Second, 26250 * time.Millisecond},
		{"after a minute of signs, when their renewal is over", time.Minute, 71 * time.Second, 71250 * time.Millisecond},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := NewLiveness()
				began, expired := time.Now(), make(chan struct{})
				p := l.AddPull(began, kept())
				p.OnExpiry(func() { close(expired) })
				if row.alive > 0 {
					seen(l, row.alive)
				}
				<-expired
				require.GreaterOrEqual(t, time.Since(began), row.after)
				require.LessOrEqual(t, time.Since(began), row.limit)
				require.True(t, p.CheckExpired(time.Now()))
				p.End()
				require.NotEmpty(t, l.AddPull(time.Now(), kept()).Salt(), "what it may have left in the prefix cache is not found again")
			})
		})
	}
}

func TestAnAnswerIsBelievedIfTheCoreWasAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLiveness()
		p := l.AddPull(time.Now(), kept())
		p.OnExpiry(func() { t.Error("it was given up") })
		seen(l, 5*time.Minute)
		require.True(t, p.RecordFirstEvent(time.Now()))
		p.End()
		require.Empty(t, l.AddPull(time.Now(), kept()).Salt())
	})
}

// The engine caches the KV that it read too late, and other requests that it holds by then may find it there. Later ones
// cannot, because they have another salt.
func TestOneLossIsThatOfAllThatWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLiveness()
		first := l.AddPull(time.Now(), kept())
		time.Sleep(20 * time.Second)
		second := l.AddPull(time.Now(), kept())
		time.Sleep(10 * time.Second)
		require.False(t, first.RecordFirstEvent(time.Now()), "its hold is over")
		third := l.AddPull(time.Now(), kept())
		require.NotEqual(t, first.Salt(), third.Salt())
		require.False(t, second.RecordFirstEvent(time.Now()), "its own hold is not over")
		require.True(t, third.RecordFirstEvent(time.Now()))
		for _, p := range []*PendingPull{first, second, third, third} {
			p.End()
		}
		require.Empty(t, l.pendingPulls)
	})
}

// The profiles of two prefill engines may have different hold times, and their requests may wait for the same rank.
func TestALongHoldDoesNotHideTheGapOfAShortOne(t *testing.T) {
	holdOf := func(timeout time.Duration) mooncake.Hold {
		p := mooncake.Profile{Connector: mooncake.NIXLPull, KVHoldTimeout: timeout}.WithDefaults()
		return p.Hold(time.Now(), time.Now().Add(p.PulledWithin()), &p)
	}
	const short, long = 20 * time.Second, 470 * time.Second // the short one is certainly kept for 7.5 s after a sign of life
	for _, first := range []time.Duration{short, long} {
		synctest.Test(t, func(t *testing.T) {
			l := NewLiveness()
			pulls := map[time.Duration]*PendingPull{first: l.AddPull(time.Now(), holdOf(first))}
			second := short + long - first
			pulls[second] = l.AddPull(time.Now(), holdOf(second))
			seen(l, time.Minute)
			time.Sleep(8 * time.Second)
			l.RecordSign(time.Now())
			require.False(t, pulls[short].RecordFirstEvent(time.Now()), "%v came first", first)
			pulls[short].End()
			pulls[long].End()
		})
	}
}

// Other streams of the rank give signs of life at the moment of a first event. It is judged all the same.
func TestAFirstEventIsJudgedWhileOthersGiveSigns(t *testing.T) {
	l := NewLiveness()
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				l.RecordSign(time.Now())
			}
		}
	}()
	believed := 0
	for range 20_000 {
		now := time.Now()
		lost, sameSalt := l.AddPull(now, kept()), l.AddPull(now, kept())
		lost.MarkLost()
		if sameSalt.RecordFirstEvent(now) {
			believed++
		}
		lost.End()
		sameSalt.End()
	}
	close(stop)
	<-done
	require.Zero(t, believed, "it may be made of KV that the rank has read too late for the other request")
}

func TestASignOfLifeAllocatesNothing(t *testing.T) {
	l := NewLiveness()
	p := l.AddPull(time.Now(), kept())
	defer p.End()
	at := time.Now()
	require.Zero(t, testing.AllocsPerRun(100, func() {
		at = at.Add(20 * time.Millisecond)
		l.RecordSign(at)
		l.RecordSign(at.Add(time.Second)) // a gap
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
			p.End()
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
			p := m.Traffic("d0").Liveness(-1).AddPull(time.Now(), kept())
			p.OnExpiry(func() { t.Error("it was given up") })
			time.Sleep(time.Minute)
			require.True(t, p.RecordFirstEvent(time.Now()), "its canaries were answered all the time")
			p.End()
			require.Greater(t, f.count("/v1/completions"), 3)
		})
	})
	t.Run("and a refusal says nothing of its core", func(t *testing.T) {
		f := decodes()
		f.set("/v1/completions", "HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
		doubted(t, f, func(t *testing.T, m *Monitor, _ *prometheus.Registry) {
			p := m.Traffic("d0").Liveness(-1).AddPull(time.Now(), kept())
			expired := make(chan struct{})
			p.OnExpiry(func() { close(expired) })
			began := time.Now()
			<-expired
			require.LessOrEqual(t, time.Since(began), 27*time.Second)
			require.Positive(t, f.count("/v1/completions"))
			p.End()
		})
	})
	t.Run("and not while gauges move", func(t *testing.T) {
		f := decodes()
		doubted(t, f, func(t *testing.T, m *Monitor, _ *prometheus.Registry) {
			p := m.Traffic("d0").Liveness(-1).AddPull(time.Now(), kept())
			p.OnExpiry(func() { t.Error("it was given up") })
			for n := range 60 {
				f.set("/metrics", ok(gauges(n, 1)))
				time.Sleep(time.Second)
				require.False(t, quiet(m))
			}
			require.True(t, m.Traffic("d0").Liveness(-1).HasGauges())
			require.True(t, p.RecordFirstEvent(time.Now()))
			p.End()
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
