package engine

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

func TestAnEngineThatAnswersIsUpWithItsFacts(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, reg *prometheus.Registry) {
		s := m.Status("p0")
		require.Equal(t, Status{
			Up: true, Since: s.Since, Changed: s.Changed, Version: "0.27.1", StartTime: 100,
			Models:   []Model{{ID: "m", MaxModelLen: 1024}, {ID: "m-lora", Parent: "m"}},
			Memories: Memories{"0": {Capacity: Reading{1600, productLabels}, Block: Reading{16, blockLabel}}},
		}, s)
		require.EqualValues(t, 1, series(t, reg, "evenkeel_engine_up"))
		s.Models[0].ID, s.Memories["0"] = "x", Memory{}
		require.Equal(t, "m", m.Status("p0").Models[0].ID, "a status is a copy")
		require.EqualValues(t, 1600, m.Status("p0").Memories["0"].Capacity.Tokens)
		require.Zero(t, m.Status("p1"))

		time.Sleep(60 * time.Second)
		require.InDelta(t, 60, f.count("/health"), 8, "every second, a tenth to either side")
		require.InDelta(t, 6, f.count("/v1/models"), 2, "every ten")
		require.Equal(t, 1, f.count("/version"), "once a start")
		require.Equal(t, 1, f.most, "requests in flight at once")
	})
}

// What a check finds is in the status, the log and the metrics. TestHistoriesOfAnEngine has what
// many of them lead to.
func TestAnEngineThatGoesDownAndComesBack(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, reg *prometheus.Registry) {
		f.set("/health", status(503))
		time.Sleep(5 * time.Second)
		s := m.Status("p0")
		require.False(t, s.Up)
		require.ErrorContains(t, s.Err, "GET /health answered 503")
		require.Len(t, s.Models, 2, "what was known stays")
		require.Zero(t, series(t, reg, "evenkeel_engine_up"))
		f.set("/health", ok(""))
		time.Sleep(5 * time.Second)
		require.NoError(t, m.Status("p0").Err)
		require.EqualValues(t, 1, series(t, reg, "evenkeel_engine_up"))

		f.set("/health", "") // it hangs, but its streams go on
		for range 60 {
			time.Sleep(time.Second)
			m.Answered("p0")
			require.True(t, m.Status("p0").Up && !m.Status("p0").Hangs)
		}
		require.ErrorContains(t, m.Status("p0").Err, context.DeadlineExceeded.Error(), "it is shown")
		require.Greater(t, series(t, reg, "evenkeel_engine_late_checks_total"), 5.0, "and counted")
		time.Sleep(time.Minute)
		require.True(t, m.Status("p0").Hangs && !m.Status("p0").Up, "nothing was heard of it any more")
		m.Answered("nobody")
		f.set("/health", ok(""))
		time.Sleep(10 * time.Second)
		require.True(t, m.Status("p0").Up)
		require.Len(t, logs.FilterMessage("an engine is down").All(), 2)
		require.Len(t, logs.FilterMessage("an engine is up").All(), 3)
	})
}

func TestAnEngineThatNeverAnsweredIsLoggedOnceForEachReason(t *testing.T) {
	f := newFake()
	f.failDials(syscall.ECONNREFUSED)
	watched(t, f, func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, _ *prometheus.Registry) {
		last := func(lines int) (level zapcore.Level, message, reason string) {
			time.Sleep(10 * time.Minute)
			require.Len(t, logs.All(), lines)
			line := logs.All()[lines-1]
			require.Equal(t, "p0", line.ContextMap()["engine"])
			return line.Level, line.Message, fmt.Sprint(line.ContextMap()["error"])
		}
		level, message, reason := last(1)
		require.Equal(t, zap.WarnLevel, level)
		require.Contains(t, message, "does not answer yet")
		require.Contains(t, reason, "connection refused")

		f.failDials(nil)
		for _, path := range []string{"/health", "/v1/models"} { // as a web server does
			f.set(path, "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 15\r\n\r\n<html>hi</html>")
		}
		_, message, reason = last(2)
		require.Contains(t, message, "for another reason")
		require.Contains(t, reason, "check that the address is an engine's")
		require.False(t, m.Status("p0").Up)
		for range 60 { // reasons that change all the time
			f.set("/health", status(500))
			time.Sleep(2 * time.Second)
			f.set("/health", status(503))
			time.Sleep(2 * time.Second)
		}
		require.LessOrEqual(t, logs.Len(), 7, "a line a minute")
		f.set("/health", ok(""))
		f.set("/v1/models", newFake().answers["/v1/models"])
		time.Sleep(10 * time.Second)
		require.Len(t, logs.FilterMessage("an engine is up").All(), 1)
	})
}

// Facts that only help may be missing. Without its models an engine gets no requests, so these are
// read at every check.
func TestAnEngineIsNotKeptWaitingByItsFacts(t *testing.T) {
	for _, tt := range []struct{ name, answer string }{
		{"404", status(404)}, {"500", status(500)}, {"silent", ""}, {"not understood", ok("{")}} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFake()
			f.set("/version", tt.answer)
			f.set("/metrics", tt.answer)
			f.set("/v1/models", status(503))
			watched(t, f, func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, _ *prometheus.Registry) {
				time.Sleep(3 * time.Second)
				s := m.Status("p0")
				require.True(t, s.Up)
				require.Empty(t, s.Version)
				require.Empty(t, s.Memories)
				require.Zero(t, s.StartTime)
				f.set("/v1/models", newFake().answers["/v1/models"])
				time.Sleep(5 * time.Second)
				require.Len(t, m.Status("p0").Models, 2)
				require.NoError(t, m.Status("p0").Err)
				require.Len(t, logs.FilterMessageSnippet("its models are not known").All(), 1)
			})
		})
	}
}

func TestARefusedCredentialIsDownAndAlarmsOnce(t *testing.T) {
	for path, code := range map[string]int{"/health": 401, "/v1/models": 403} {
		t.Run(path, func(t *testing.T) {
			f := newFake()
			good := f.answers[path]
			watched(t, f, func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, _ *prometheus.Registry) {
				for alarms := 1; alarms <= 2; alarms++ { // again after it was mended
					f.set(path, status(code))
					time.Sleep(30 * time.Second)
					require.False(t, m.Status("p0").Up)
					require.ErrorContains(t, m.Status("p0").Err, "refused the proxy's API key")
					require.Len(t, logs.FilterLevelExact(zap.ErrorLevel).All(), alarms)
					f.set(path, good)
					time.Sleep(5 * time.Second)
					require.True(t, m.Status("p0").Up)
				}
			})
		})
	}
}

func TestARestartIsNoticedBetweenTwoChecks(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, _ *prometheus.Registry) {
		f.set("/metrics", ok(metricsPage(200)))
		f.set("/version", ok(`{"version":"0.28.0"}`))
		time.Sleep(15 * time.Second)
		s := m.Status("p0")
		require.True(t, s.Up)
		require.Equal(t, 200.0, s.StartTime)
		require.Equal(t, "0.28.0", s.Version)
		require.EqualValues(t, 3200, s.Memories.Of(0).Capacity.Tokens)
		require.NotEmpty(t, logs.FilterMessageSnippet("restarted").All())
	})
}

func TestKVThatIsReadTooLateIsSeen(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
		read := func(start, late int) Expiries {
			f.set("/metrics", ok(metricsPage(start)+fmt.Sprintf("vllm:nixl_num_kv_expired_reqs_total{engine=\"0\"} 4\n"+
				"vllm:nixl_num_notifications_after_expiry_total{engine=\"0\"} %d\n", late)))
			time.Sleep(time.Second)
			return m.ExpiriesNow(t.Context(), "p0")
		}
		read(100, 0)
		grown := read(100, 2)
		require.Equal(t, time.Now(), grown.ReadLateAt)
		require.EqualValues(t, 2, grown.ReadLate)
		require.Equal(t, grown.ReadLateAt, read(200, 5).ReadLateAt, "another process: when it was cannot be told")
	})
}

// A process that dies cuts what it served. Nobody waits for the next check then.
func TestABrokenConnectionIsLookedIntoAtOnce(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
		f.failDials(syscall.ECONNREFUSED)
		m.ReportFailure("unknown", errCut)
		m.ReportFailure("p0", errCut)
		synctest.Wait() // no time passes
		require.False(t, m.Status("p0").Up)
	})
}

func TestSetKeepsTheStateOfThoseThatStay(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
		before := m.Status("p0")
		same := Instance{ID: "p0", Role: "prefill", Target: target(t, "http://p0:8000")}
		m.Set([]Instance{same, {ID: "d0", Role: "decode", Target: target(t, "http://d0:8000")}})
		require.Equal(t, before, m.Status("p0"))
		synctest.Wait()
		require.True(t, m.Status("d0").Up)
		require.Equal(t, 2, testutil.CollectAndCount(m.metrics.up))

		held := same
		held.Held, held.Slots = &Held{"paused at noon"}, 7
		m.Set([]Instance{held})
		require.Zero(t, m.Status("d0"))
		require.Equal(t, 1, testutil.CollectAndCount(m.metrics.up))
		require.EqualError(t, m.Status("p0").Halt, "paused at noon", "at once")
		require.Equal(t, before.Since, m.Status("p0").Since)
		require.Equal(t, 7, m.watches["p0"].in.Slots)
		m.Set([]Instance{same})
		require.NoError(t, m.Status("p0").Halt)

		moved := same
		moved.Target = target(t, "http://p0:9000")
		m.Set([]Instance{moved})
		asked := f.count("/health")
		time.Sleep(20 * time.Second)
		require.True(t, m.Status("p0").Up)
		require.InDelta(t, 20, f.count("/health")-asked, 4, "one instance is asked, the others are left alone")
	})
}

func TestOnChangeTellsTheLatestOneAtATime(t *testing.T) {
	f := newFake()
	synctest.Test(t, func(t *testing.T) {
		c := NewClient(Options{Dial: f.dial})
		m := NewMonitor(MonitorConfig{Client: c})
		var seen []string
		m.OnChange(func(id string, s Status) {
			seen = append(seen, fmt.Sprint(id, " ", s.Up))
			require.Equal(t, s.Up, m.Status(id).Up, "the monitor may be asked from the callback")
		})
		end := runs(t, m, c)
		synctest.Wait()
		m.Set([]Instance{{ID: "p0", Role: "prefill", Target: target(t, "http://p0")}})
		time.Sleep(25 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"p0 true"}, seen, "no change, no call")
		f.failDials(syscall.ECONNREFUSED)
		m.ReportFailure("p0", errNoListener)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.Equal(t, "p0 false", seen[1])
		end()
		m.Set(nil)
		m.Set([]Instance{{ID: "p1", Role: "prefill", Target: target(t, "http://p1")}})
		time.Sleep(10 * time.Second)
		require.False(t, m.Status("p1").Up, "nothing is watched after Run has returned")
	})
}

func TestTwoMonitorsShareTheGauge(t *testing.T) {
	reg := prometheus.NewRegistry()
	a, b := NewMonitor(MonitorConfig{Registerer: reg}), NewMonitor(MonitorConfig{Registerer: reg})
	require.Same(t, a.metrics.up, b.metrics.up)
}

// If GET /health computes something, the engine gets it only if the path that costs nothing is
// missing or says no.
func TestAnEngineWhoseHealthCostsSomething(t *testing.T) {
	for _, row := range []struct {
		name, ready, health string
		up, asked           bool // for its health
	}{
		{"it says at once that it is ready", status(200), status(503), true, false},
		{"an older version has no such path", status(404), status(200), true, true},
		{"it repeats what was found before", status(503), status(200), true, true},
		{"it is ill", status(503), status(503), false, true},
		{"it is of another kind", status(500), status(200), false, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			f := newFake()
			f.delay = 10 * time.Millisecond
			f.set("/ready", row.ready)
			f.set("/health", row.health)
			quick := Instance{ID: "p0", Role: "prefill", Target: target(t, "http://p0:8000"), Ready: "/ready"}
			watchedAs(t, f, quick, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
				time.Sleep(5 * time.Second)
				synctest.Wait()
				require.Equal(t, row.up, m.Status("p0").Up)
				require.Equal(t, row.asked, f.count("/health") > 0)
				require.Equal(t, row.up && !row.asked, m.RTT("p0") > 0, "a check that costs something is no round trip")
			})
		})
	}
}

// SGLang tells its version among the settings of all its ranks, which may be long.
func TestAVersionAtAnotherPath(t *testing.T) {
	f := newFake()
	f.set("/server_info", ok(`{"internal_states":["`+strings.Repeat("x", 2*answerLimit)+`"],"version":"0.5.23"}`))
	sglang := Instance{ID: "p0", Role: "prefill", Target: target(t, "http://p0:8000"), Version: "/server_info"}
	watchedAs(t, f, sglang, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, "0.5.23", m.Status("p0").Version)
		require.Equal(t, 1, f.count("/server_info"), "once a start")
		require.Zero(t, f.count("/version"))
	})
}

// A list may have thousands of LoRA adapters. One that is too long to be read is told of, once, and
// the last one stays.
func TestALongListOfModels(t *testing.T) {
	f := newFake()
	list := func(n int) string {
		return ok(`{"data":[{"id":"m"}` + strings.Repeat(`,{"id":"`+strings.Repeat("a", 80)+`","parent":"m"}`, n) + `]}`)
	}
	f.set("/v1/models", list(20_000))
	watched(t, f, func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, _ *prometheus.Registry) {
		require.Len(t, m.Status("p0").Models, 20_001)
		f.set("/v1/models", list(200_000))
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Len(t, m.Status("p0").Models, 20_001)
		require.Equal(t, 1, logs.FilterMessageSnippet("too long").Len())
	})
}

// An operator corrects first_rank: canaries go to the ranks that there are from now on.
func TestCanariesFollowTheFirstRank(t *testing.T) {
	m := NewMonitor(MonitorConfig{Client: NewClient(Options{})})
	from := func(first int) []Instance {
		base := target(t, "http://p0:8000")
		base.First = first
		one := *base
		one.Rank = 0
		return []Instance{{ID: "d0", Role: "decode", Target: base, Ranks: 1, Canaries: []*Target{&one}}}
	}
	m.Set(from(0))
	m.Set(from(4))
	require.Equal(t, 4, m.watches["d0"].in.Canaries[0].First)
}

// A check that is asked for begins after the question, however many ask.
func TestACheckThatIsAskedFor(t *testing.T) {
	f := newFake()
	f.set("/is_paused", ok(`{"is_paused":false}`))
	watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
		for _, row := range []struct{ path, answer, want string }{
			{"", "", ""},
			{"/is_paused", ok(`{"is_paused":true}`), ""},               // and its requests aborted
			{"/is_paused", status(500), "GET /is_paused answered 500"}, // its core ends, and only its server answers
			{"/health", status(503), "GET /health answered 503"},
			{"/v1/models", refusing(503, `{"error":"`+saysScaling+`"}`), ErrReforming.Error()},
		} {
			right := f.answers[row.path]
			time.Sleep(3300 * time.Millisecond) // between two checks
			before := f.count("/health")
			f.set(row.path, row.answer)
			var all sync.WaitGroup
			for range 100 {
				all.Go(func() {
					err := m.CheckNow(t.Context(), "p0")
					require.Contains(t, errorText(err), row.want)
					require.Equal(t, row.want == "", err == nil)
				})
			}
			all.Wait()
			require.LessOrEqual(t, f.count("/health")-before, 2, "all share a check, or one more")
			f.set(row.path, right)
		}
		require.ErrorIs(t, m.CheckNow(t.Context(), "p1"), errNotWatched)
		f.set("/health", "") // silence
		time.Sleep(3300 * time.Millisecond)
		ctx, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		require.ErrorIs(t, m.CheckNow(ctx, "p0"), context.DeadlineExceeded)
		f.set("/health", ok(""))
		time.Sleep(time.Minute) // the checks that got no answer are over
	})
}
