package engine

import (
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

// The core of a rank may read the KV of a request after its hold, and keep it for the next prompt
// with that prefix. Only requests with the same salt on the same rank find it there.
func TestWhatWaitsBesideAHoldThatEndsIsWithheld(t *testing.T) {
	now := time.Now()
	var traffic Traffic
	send := func(rank int, until time.Duration, w Wait) *PendingPull {
		if until > 0 {
			w.KeptUntil, w.MaxSilence = now.Add(until), time.Minute
		}
		return traffic.Liveness(rank).AddPull(now, w)
	}
	traffic.Liveness(0)
	traffic.Liveness(1)
	lost, beside, elsewhere := send(0, time.Minute, Wait{}), send(0, 0, Wait{}), send(1, time.Hour, Wait{})
	anywhere, whole := send(1, 0, Wait{AnyRank: true}), send(0, time.Hour, Wait{OnePiece: true})
	require.Empty(t, lost.Salt())
	at := now.Add(time.Minute)
	later := traffic.Liveness(0).AddPull(at, Wait{})
	require.NotEmpty(t, later.Salt(), "the hold is over, whoever still waits")
	for p, want := range map[*PendingPull]bool{lost: false, beside: false, elsewhere: true, anywhere: false, whole: false, later: true} {
		require.Equal(t, want, believed(p, at))
		p.End(at, true)
		p.End(at, true)
	}
	require.Equal(t, later.Salt(), traffic.pulls.Salt(at), "one hold that ends changes the salt once")
	require.Empty(t, traffic.pulls.waiting)
}

// A call that the proxy ends, or whose connection breaks, may have reached an engine that stands
// still.
func TestACallThatEndedCountsUntilItsHoldIsOver(t *testing.T) {
	now := time.Now()
	for _, row := range []struct {
		name  string
		piece bool
		over  bool // the engine does not pull any more
		want  bool // another salt
	}{
		{"a stream", false, false, true}, {"a stream that the engine has refused", false, true, false},
		{"an answer in one piece", true, false, true}, {"one whose end the engine has reported", true, true, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			l := NewLiveness()
			p := l.AddPull(now, Wait{KeptUntil: now.Add(time.Minute), MaxSilence: time.Minute, OnePiece: row.piece})
			p.End(now.Add(time.Second), row.over)
			next := l.AddPull(now.Add(2*time.Second), Wait{})
			require.Empty(t, next.Salt())
			at := now.Add(time.Minute)
			require.Equal(t, !row.want, believed(next, at), "it has the prefix")
			next.End(at, true)
			require.Equal(t, row.want, l.pulls.Salt(at) != "")
			require.Empty(t, l.pulls.waiting)
		})
	}
}

// An answer in one piece does not show when its KV was read. A core that has made steps all the
// time has read it in time.
func TestAnAnswerInOnePieceIsJudgedByTheSilenceOfItsCore(t *testing.T) {
	now := time.Now()
	for _, row := range []struct {
		name          string
		silent, until time.Duration // since and until
		anyRank       bool
		want, salted  bool
	}{
		{"none", 0, 0, false, true, false},
		{"as long as the margin", 5 * time.Second, 65 * time.Second, false, true, false},
		{"longer, before the hold ends", 5 * time.Second, 66 * time.Second, false, false, true},
		{"longer, when it ends", 50 * time.Second, 115 * time.Second, false, false, true},
		{"on a rank that is not known", 0, 0, true, false, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			l := NewLiveness()
			p := l.AddPull(now, Wait{KeptUntil: now.Add(90 * time.Second), MaxSilence: time.Minute, OnePiece: true, AnyRank: row.anyRank})
			for d := time.Duration(0); d <= 3*time.Minute; d += time.Second {
				if d <= row.silent || d >= row.until {
					l.RecordSign(now.Add(d))
				}
			}
			at := now.Add(3 * time.Minute)
			require.Equal(t, row.want, believed(p, at))
			if !row.want {
				p.Withhold()
			}
			p.End(at, true)
			require.Equal(t, row.salted, l.pulls.Salt(at) != "")
		})
	}
	t.Run("and others are withheld as soon as it works again", func(t *testing.T) {
		l := NewLiveness()
		l.AddPull(now, Wait{KeptUntil: now.Add(90 * time.Second), MaxSilence: time.Minute, OnePiece: true})
		l.RecordSign(now.Add(30 * time.Second))
		at := now.Add(95 * time.Second)
		beside := l.AddPull(at.Add(-time.Second), Wait{})
		require.False(t, believed(beside, at))
		require.NotEmpty(t, l.AddPull(at, Wait{}).Salt())
	})
}

// Other streams of the rank give signs of life at the moment of a first event. It is judged all the
// same.
func TestAFirstEventIsJudgedWhileOthersGiveSigns(t *testing.T) {
	l := NewLiveness()
	var stop atomic.Bool
	var others sync.WaitGroup
	others.Go(func() {
		for !stop.Load() {
			l.RecordSign(time.Now())
		}
	})
	wrong := 0
	for range 20_000 {
		now := time.Now()
		lost, sameSalt := l.AddPull(now, kept()), l.AddPull(now, kept())
		lost.Withhold()
		if believed(sameSalt, now) {
			wrong++
		}
		lost.End(now, true)
		sameSalt.End(now, true)
	}
	stop.Store(true)
	others.Wait()
	require.Zero(t, wrong, "it may be made of KV that the rank has read too late for the other request")
}

// A reload corrects how many ranks an engine has behind its address, and so gives them other
// numbers. What a core reads too late under its number before is not found under the new one.
func TestAReloadOfTheNumberOfRanksKeepsTheSalt(t *testing.T) {
	now := time.Now()
	for _, numbers := range [][2]int{{-1, 0}, {-1, 1}, {1, -1}} {
		var traffic Traffic
		before := traffic.Liveness(numbers[0]).AddPull(now, Wait{KeptUntil: now.Add(time.Minute)})
		require.Empty(t, before.Salt())
		after := traffic.Liveness(numbers[1]).AddPull(now, Wait{})
		require.NotEmpty(t, after.Salt())
		require.True(t, believed(after, now.Add(time.Hour)))
	}
}

// A reload gives an engine another role, or none for a while, and so another Traffic. Its process
// is the same, with the same prefix cache.
func TestASaltBelongsToTheAddress(t *testing.T) {
	m := NewMonitor(MonitorConfig{Registerer: prometheus.NewRegistry()})
	at := func(role, host string) Instance {
		return Instance{ID: role + " " + host, Role: role,
			Target: &Target{ID: host, URL: &url.URL{Scheme: "http", Host: host}, Rank: -1}}
	}
	send := func(in Instance, w Wait) *PendingPull { return m.Traffic(in.ID).Liveness(-1).AddPull(time.Now(), w) }
	before, after, other := at("decode", "a:1"), at("aggregated", "a:1"), at("aggregated", "b:1")
	m.Set([]Instance{before})
	late := send(before, Wait{KeptUntil: time.Now()})
	m.Set(nil)
	m.Set([]Instance{after, other})
	late.End(time.Now(), false)
	require.NotEmpty(t, send(after, Wait{}).Salt())
	require.Equal(t, send(after, Wait{}).Salt(), m.Salt("prefill a:1"), "one that also prefills hands over what is in its cache")
	require.Empty(t, send(other, Wait{}).Salt())
	m.Set(nil)
	require.Contains(t, m.pulls, "a:1", "its salt is kept")
	require.Contains(t, m.pulls, "b:1", "a request waits there")
	m.Set([]Instance{before})
	require.NotEmpty(t, send(before, Wait{}).Salt())

	idle := at("decode", "c:1")
	m.Set([]Instance{idle})
	send(idle, Wait{}).End(time.Now(), true)
	m.Set(nil)
	require.NotContains(t, m.pulls, "c:1")
}
