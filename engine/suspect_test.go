package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

var errBroke = errors.New("the stream broke off")

const oneTokenAnswer = `{"choices":[{"index":0,"text":"b","finish_reason":"length"}]}`

// doubted runs body beside a monitor of f as the decode instance d0, whose
// canary has 10 s.
func doubted(t *testing.T, f *fake, body func(t *testing.T, m *Monitor, reg *prometheus.Registry)) {
	synctest.Test(t, func(t *testing.T) {
		core, _ := observer.New(zap.InfoLevel)
		reg := prometheus.NewPedanticRegistry()
		c := NewClient(Options{Dial: f.dial})
		m := NewMonitor(MonitorConfig{Client: c, Registerer: reg, Log: zap.New(core), Canary: 10 * time.Second})
		d0 := target(t, "http://d0:8000")
		m.Set([]Instance{{ID: "d0", Role: "decode", Target: d0, Slots: 4, Canaries: []*Target{d0}}})
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); m.Run(ctx) }()
		synctest.Wait()
		body(t, m, reg)
		stop()
		<-done
		c.Close()
	})
}

func decodes() *fake {
	f := newFake()
	f.set("/v1/completions", ok(oneTokenAnswer))
	return f
}

func judge(m *Monitor, v Verdict, times int) {
	for range times {
		m.RecordOutcome("d0", v, errBroke)
	}
	synctest.Wait()
}

func TestFiveFailuresInARowTakeAnEngineOutAndACanaryBringsItBack(t *testing.T) {
	f := decodes()
	doubted(t, f, func(t *testing.T, m *Monitor, reg *prometheus.Registry) {
		judge(m, Faulted, 4)
		judge(m, Served, 1)
		judge(m, Faulted, 4)
		require.NoError(t, m.Status("d0").Out, "an answer ends the row")
		judge(m, Faulted, 1)
		s := m.Status("d0")
		require.True(t, s.Up, "its health check is fine")
		require.ErrorIs(t, s.Out, errBroke)
		require.False(t, s.Wedged, "nobody has tried it yet")
		require.EqualValues(t, 1, series(t, reg, "evenkeel_engine_state", "d0", "decode", "out"))
		require.Zero(t, f.count("/v1/completions"))

		time.Sleep(time.Second)
		synctest.Wait()
		require.NoError(t, m.Status("d0").Out)
		require.Equal(t, 1, f.count("/v1/completions"))
		require.EqualValues(t, 1, series(t, reg, "evenkeel_engine_canaries_total", "d0", "passed"))
		require.EqualValues(t, 1, series(t, reg, "evenkeel_engine_state", "d0", "decode", "up"))

		judge(m, Faulted, 5)
		time.Sleep(2*time.Second - 1)
		require.Error(t, m.Status("d0").Out, "one token is no request served: twice as long")
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.NoError(t, m.Status("d0").Out)
	})
}

// The log says that an engine answers its health check only if it does.
func TestWhatTheLogSaysOfAnEngineThatIsOut(t *testing.T) {
	dead := &Error{Target: "d0", Phase: PhaseConnect, Err: syscall.ECONNREFUSED}
	const canary = time.Second
	for _, tt := range []struct {
		canary time.Duration
		why    error
		failed int
		want   string
	}{
		{0, errBroke, 0, "an engine is out of service although it answers its health check; it gets requests again after a while"},
		{0, errBroke, 1, "an engine is out of service, because requests and its last health check failed"},
		{canary, errBroke, 0, "an engine is out of service although it answers its health check; requests of one token will tell when it works again"},
		{canary, errBroke, 1, "an engine is out of service, because requests and its last health check failed"},
		{canary, dead, 0, "an engine is out of service, because it takes no connection"},
	} {
		core, logs := observer.New(zap.InfoLevel)
		m := NewMonitor(MonitorConfig{Client: NewClient(Options{}), Log: zap.New(core), Canary: tt.canary})
		d0 := target(t, "http://d0:8000")
		m.Set([]Instance{{ID: "d0", Role: "decode", Target: d0, Canaries: []*Target{d0}}})
		m.watches["d0"].failedChecks = tt.failed
		for range 5 {
			m.RecordOutcome("d0", Faulted, tt.why)
		}
		require.Equal(t, tt.want, logs.All()[len(logs.All())-1].Message)
		m.cfg.Client.Close()
	}
}

func TestAWedgedEngineIsFoundByItsFirstSilence(t *testing.T) {
	f := decodes()
	doubted(t, f, func(t *testing.T, m *Monitor, reg *prometheus.Registry) {
		f.set("/v1/completions", "") // and /health answers 200
		judge(m, Silent, 1)
		require.NoError(t, m.Status("d0").Out, "it has the canary's time")
		time.Sleep(10 * time.Second)
		synctest.Wait()
		s := m.Status("d0")
		require.True(t, s.Up && s.Wedged)
		require.ErrorIs(t, s.Out, context.DeadlineExceeded)
		require.EqualValues(t, 1, series(t, reg, "evenkeel_engine_state", "d0", "decode", "wedged"))
		for _, out := range []time.Duration{1, 2, 4, 8} {
			time.Sleep(out*time.Second + 10*time.Second) // an outage, and a canary that fails
			synctest.Wait()
			require.True(t, m.Status("d0").Wedged)
		}
		require.Equal(t, 5, f.count("/v1/completions"))
		f.set("/v1/completions", ok(oneTokenAnswer))
		time.Sleep(16 * time.Second)
		synctest.Wait()
		require.NoError(t, m.Status("d0").Out)
		require.False(t, m.Status("d0").Wedged)
	})
}

func TestWhatACanaryProves(t *testing.T) {
	for _, row := range []struct {
		name, answer string
		heard        bool // a stream goes on meanwhile
		out          bool
		outcome      string
	}{
		{"a completion: it computes", ok(oneTokenAnswer), false, false, "passed"},
		{"a refusal of the request says nothing", status(400), false, false, "passed"},
		{"nor does a model it does not know", status(404), false, false, "passed"},
		{"a 500 for one token is the engine's", status(500), false, true, "failed"},
		{"so is a 503", status(503), false, true, "failed"},
		{"and an answer that is none", ok("{}"), false, true, "failed"},
		{"silence", "", false, true, "failed"},
		{"silence, but its streams go on: its batch is full", "", true, false, "vouched"},
		{"a 500 although its streams go on", status(500), true, true, "failed"},
	} {
		t.Run(row.name, func(t *testing.T) {
			f := decodes()
			f.set("/v1/completions", row.answer)
			doubted(t, f, func(t *testing.T, m *Monitor, reg *prometheus.Registry) {
				m.Traffic("d0").Begin()
				judge(m, Silent, 1)
				time.Sleep(5 * time.Second)
				if row.heard {
					m.Traffic("d0").OnEvent()
				}
				time.Sleep(5 * time.Second)
				synctest.Wait()
				require.Positive(t, series(t, reg, "evenkeel_engine_canaries_total", "d0", row.outcome))
				if row.out {
					require.EqualValues(t, 1, series(t, reg, "evenkeel_engine_state", "d0", "decode", "wedged"))
				} else {
					require.NoError(t, m.Status("d0").Out)
				}
			})
		})
	}
}

func TestDoubtsAreTriedOneAtATime(t *testing.T) {
	f := decodes()
	doubted(t, f, func(t *testing.T, m *Monitor, reg *prometheus.Registry) {
		for range 60 {
			judge(m, Unclear, 100)
			time.Sleep(time.Second)
		}
		require.InDelta(t, 12, f.count("/v1/completions"), 1, "one in five seconds")
		require.NoError(t, m.Status("d0").Out)
		require.Zero(t, series(t, reg, "evenkeel_engine_outages_total", "d0", "failures"), "what is unclear is not counted")
	})
}

// A proxy that can open no more sockets does not know whether its engines work, so it blames none of them.
func TestAProxyWithoutFreeDescriptorsBlamesNoEngine(t *testing.T) {
	own := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", syscall.EMFILE)}
	failed := &Error{Target: "d0", Phase: PhaseConnect, Err: own}
	f := decodes()
	doubted(t, f, func(t *testing.T, m *Monitor, _ *prometheus.Registry) {
		f.failDials(own)
		m.cfg.Client.idle.closeHost(target(t, "http://d0:8000").key())
		m.RecordOutcome("d0", Silent, errBroke) // so that canaries are due
		for range 60 {
			m.ReportFailure("d0", failed)
			m.RecordOutcome("d0", Faulted, failed)
			time.Sleep(time.Second)
			s := m.Status("d0")
			require.True(t, s.Up)
			require.NoError(t, s.Out)
			require.False(t, s.Wedged)
		}
		require.ErrorIs(t, m.Status("d0").Err, syscall.EMFILE, "the status shows it")
		require.Zero(t, f.count("/v1/completions"))
		f.failDials(nil)
		time.Sleep(15 * time.Second)
		require.NoError(t, m.Status("d0").Err)
		require.Equal(t, 1, f.count("/v1/completions"), "the canary that was due is sent")
		f.refuseAll(true)
		m.ReportFailure("d0", &Error{Target: "d0", Phase: PhaseConnect, Err: syscall.ECONNREFUSED})
		require.False(t, m.Status("d0").Up, "nobody listens there now")
	})
}

func TestARestartIsForgiven(t *testing.T) {
	f := decodes()
	doubted(t, f, func(t *testing.T, m *Monitor, _ *prometheus.Registry) {
		f.set("/v1/completions", status(500))
		judge(m, Silent, 1)
		time.Sleep(100 * time.Second)
		require.True(t, m.Status("d0").Wedged)
		f.set("/health", status(503))
		time.Sleep(5 * time.Second)
		f.set("/metrics", ok(metricsPage(200)))
		f.set("/health", ok(""))
		time.Sleep(2 * time.Second)
		require.True(t, m.Status("d0").Up)
		require.NoError(t, m.Status("d0").Out, "that was another process")
	})
}

func gauges(generated, running int) string {
	return fmt.Sprintf("vllm:generation_tokens_total{engine=\"0\"} %d\nvllm:num_requests_running{engine=\"0\"} %d\n", generated, running)
}

func TestGaugesThatStandStillUnderLoadRaiseASuspicion(t *testing.T) {
	for _, row := range []struct {
		name    string
		running bool // a stream of ours
		moving  bool // the engine's token counter
		frozen  bool
	}{
		{"still, with a stream running", true, false, true},
		{"still, while nothing runs", false, false, false},
		{"moving", true, true, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			f := decodes()
			f.set("/metrics", ok(gauges(0, 1)))
			doubted(t, f, func(t *testing.T, m *Monitor, reg *prometheus.Registry) {
				if row.running {
					m.Traffic("d0").Begin()
				}
				for n := range 60 {
					time.Sleep(time.Second)
					if row.moving {
						f.set("/metrics", ok(gauges(n+1, 1)))
					}
				}
				synctest.Wait()
				require.EqualValues(t, gaugeValue(row.frozen), series(t, reg, "evenkeel_engine_gauges_frozen", "d0"))
				require.Equal(t, row.frozen, f.count("/v1/completions") == 1, "one canary for a suspicion")
				require.NoError(t, m.Status("d0").Out, "it computes, so it stays")
				f.set("/metrics", ok(gauges(999, 1)))
				time.Sleep(15 * time.Second)
				require.Zero(t, series(t, reg, "evenkeel_engine_gauges_frozen", "d0"), "they move again")
			})
		})
	}
}

// A vLLM with --disable-log-stats has none of these gauges on its page, so they cannot stand still.
func TestGaugesThatAnEngineDoesNotHaveAreNotFrozen(t *testing.T) {
	f := decodes()
	doubted(t, f, func(t *testing.T, m *Monitor, reg *prometheus.Registry) {
		m.Traffic("d0").Begin()
		for range 60 {
			time.Sleep(time.Second)
			require.Zero(t, series(t, reg, "evenkeel_engine_gauges_frozen", "d0"))
		}
		require.Zero(t, f.count("/v1/completions"), "nothing makes it suspect")
	})
}

func TestMoreRequestsThanSlots(t *testing.T) {
	f := decodes()
	f.set("/metrics", ok(gauges(0, 7)))
	doubted(t, f, func(t *testing.T, _ *Monitor, reg *prometheus.Registry) {
		require.EqualValues(t, 3, series(t, reg, "evenkeel_engine_over_slots", "d0"))
		f.set("/metrics", ok(gauges(0, 4)))
		time.Sleep(20 * time.Second)
		require.Zero(t, series(t, reg, "evenkeel_engine_over_slots", "d0"))
	})
}

// What we sent beyond the slots ourselves is no mistake of anybody's, for as long as it
// is there: everything else is.
func TestRequestsSentBeyondTheSlotsAreNoAlarm(t *testing.T) {
	f := decodes() // with four slots
	f.set("/metrics", ok(gauges(0, 4)))
	doubted(t, f, func(t *testing.T, m *Monitor, reg *prometheus.Registry) {
		over := func(running int) int {
			f.set("/metrics", ok(gauges(0, running)))
			time.Sleep(20 * time.Second)
			synctest.Wait()
			return int(series(t, reg, "evenkeel_engine_over_slots", "d0"))
		}
		ours := m.Traffic("d0")
		ours.AddSentWithoutSlot(3)
		require.Zero(t, over(7))
		require.Equal(t, 1, over(8))
		ours.AddSentWithoutSlot(-1)
		require.Equal(t, 1, over(7), "one of ours has gone, and yet as many run")
		require.Zero(t, over(6))
	})
}

// A canary runs beside requests that have all slots.
func TestACanaryThatRunsIsNoAlarm(t *testing.T) {
	f := decodes() // with four slots
	f.set("/metrics", ok(gauges(0, 4)))
	f.set("/v1/completions", "") // the canary runs until its time is over, after 10 s
	doubted(t, f, func(t *testing.T, m *Monitor, reg *prometheus.Registry) {
		time.Sleep(5 * time.Second)
		judge(m, Silent, 1)
		require.Equal(t, 1, f.count("/v1/completions"))
		before := f.count("/metrics")
		f.set("/metrics", ok(gauges(1, 5)))
		for f.count("/metrics") == before {
			time.Sleep(100 * time.Millisecond)
		}
		synctest.Wait()
		require.Zero(t, series(t, reg, "evenkeel_engine_over_slots", "d0"))
		f.set("/v1/completions", ok(oneTokenAnswer)) // the next one passes
		time.Sleep(30 * time.Second)
		require.EqualValues(t, 1, series(t, reg, "evenkeel_engine_over_slots", "d0"), "the canary has ended, so this request is another's")
	})
}

// Requests that were admitted while there were more slots run on when these are
// lowered. They are no mistake.
func TestLoweredSlotsAreNoAlarm(t *testing.T) {
	f := decodes()
	f.set("/metrics", ok(gauges(0, 4)))
	doubted(t, f, func(t *testing.T, m *Monitor, reg *prometheus.Registry) {
		over := func(running int) int {
			f.set("/metrics", ok(gauges(0, running)))
			for scrapes := f.count("/metrics"); f.count("/metrics") == scrapes; { // one, at a moment that jitters
				time.Sleep(100 * time.Millisecond)
			}
			synctest.Wait()
			return int(series(t, reg, "evenkeel_engine_over_slots", "d0"))
		}
		slots := func(n int) {
			in := m.watches["d0"].in
			in.Slots = n
			m.Set([]Instance{in})
		}
		require.Zero(t, over(4))
		slots(1)
		require.Zero(t, over(4), "they run on")
		require.Zero(t, over(1))
		require.Zero(t, over(3), "they were pulling their KV")
		require.Zero(t, over(1))
		require.Zero(t, over(1))
		require.Equal(t, 2, over(3), "now nothing excuses them")
		slots(3)
		require.Zero(t, over(3))
	})
}

func TestWithoutACanaryAnEngineComesBackByItself(t *testing.T) {
	f := decodes()
	doubted(t, f, func(t *testing.T, m *Monitor, reg *prometheus.Registry) {
		m.cfg.Canary = 0
		judge(m, Faulted, 5)
		require.Error(t, m.Status("d0").Out)
		time.Sleep(time.Second)
		synctest.Wait()
		require.NoError(t, m.Status("d0").Out)
		require.Zero(t, f.count("/v1/completions"))
		for _, outcome := range []string{canaryPassed, canaryNotSent} {
			require.Zero(t, series(t, reg, "evenkeel_engine_canaries_total", "d0", outcome), "none was sent")
		}
	})
}

func TestAnInstanceWithoutCanariesIsNotJudged(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
		for range 9 {
			m.RecordOutcome("p0", Faulted, errBroke)
		}
		require.NoError(t, m.Status("p0").Out)
		m.RecordOutcome("nobody", Faulted, errBroke)
	})
}

func TestTrafficOfAnInstanceThatIsGoneIsForgotten(t *testing.T) {
	m := NewMonitor(MonitorConfig{})
	in := Instance{ID: "d0", Role: "decode", Target: &Target{}}
	m.Set([]Instance{in})
	was := m.Traffic("d0")
	was.Begin()
	m.Set([]Instance{in})
	require.Same(t, was, m.Traffic("d0"))
	m.Set(nil)
	require.Empty(t, m.traffic)
	was.End()
}

// An engine that fails at once is always free: until it is known whose the
// failures were, it gets nothing new.
func TestFailuresThatMayBeTheRequestsOwnPauseAnEngine(t *testing.T) {
	doubted(t, decodes(), func(t *testing.T, m *Monitor, _ *prometheus.Registry) {
		var settle []func()
		for n := 1; n < maxAccused; n++ {
			settle = append(settle, m.Accuse("d0"))
			require.NoError(t, m.Status("d0").Accused, "%d may be anybody's", n)
		}
		settle = append(settle, m.Accuse("d0"))
		require.ErrorContains(t, m.Status("d0").Accused, "until another engine has answered one of them")
		require.NoError(t, m.Status("d0").Out)
		settle[0]()
		settle[0]()
		require.NoError(t, m.Status("d0").Accused, "one is settled, once")
		settle = append(settle, m.Accuse("d0"))
		require.Error(t, m.Status("d0").Accused)
		for _, s := range settle {
			s()
		}
		require.NoError(t, m.Status("d0").Accused)
		m.Accuse("gone")() // an engine that left meanwhile
	})
}
