package engine

import (
	"errors"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/engine/circuit"
)

var errBroke = errors.New("the stream broke off")

const oneTokenAnswer = `{"choices":[{"index":0,"text":"b","finish_reason":"length"}]}`

// doubted runs body beside a monitor of f as the decode instance d0.
func doubted(t *testing.T, f *fake, body func(t *testing.T, m *Monitor, reg *prometheus.Registry)) {
	d0 := target(t, "http://d0:8000")
	in := Instance{ID: "d0", Role: "decode", Target: d0, Slots: 4, Ranks: 1, Canaries: []*Target{d0}}
	watchedAs(t, f, in, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, reg *prometheus.Registry) {
		body(t, m, reg)
	})
}

func decodes() *fake {
	f := newFake()
	f.set("/v1/completions", ok(oneTokenAnswer))
	return f
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

func TestWhatACanaryProves(t *testing.T) {
	scaling := refusing(503, `{"error":"`+saysScaling+`"}`)
	for _, row := range []struct {
		name, answer string
		heard        bool // a stream goes on meanwhile
		outcome      string
		state        string
	}{
		{"a completion: it computes", ok(oneTokenAnswer), false, "passed", "up"},
		{"a refusal of the request says nothing", status(400), false, "passed", "up"},
		{"nor does a model it does not know", status(404), false, "passed", "up"},
		{"a 500 for one token is the engine's", status(500), false, "failed", "wedged"},
		{"so is a 503", status(503), false, "failed", "wedged"},
		{"and an answer that is none", ok("{}"), false, "failed", "wedged"},
		{"silence", "", false, "failed", "wedged"},
		{"silence, but its streams go on: its batch is full", "", true, "vouched", "up"},
		{"a 500 although its streams go on", status(500), true, "failed", "wedged"},
		{"its group re-forms", scaling, false, "", "halted"},
		{"the proxy has no free sockets", "none", false, "", "out"},
		{"canaries are off", "off", false, "", "up"},
	} {
		t.Run(row.name, func(t *testing.T) {
			f := decodes()
			f.delay = time.Second
			f.set(completionsPath, row.answer)
			doubted(t, f, func(t *testing.T, m *Monitor, reg *prometheus.Registry) {
				m.Traffic("d0").Begin()
				time.Sleep(8 * time.Second) // until its facts are read
				switch row.answer {
				case scaling:
					f.set("/v1/models", scaling)
				case "none":
					f.failDials(syscall.EMFILE)
				case "off":
					m.cfg.Canary = 0
				}
				for range circuit.Limit {
					m.RecordOutcome("d0", Faulted, errBroke)
				}
				require.ErrorIs(t, m.Status("d0").Out, errBroke)
				require.EqualValues(t, 1, series(t, reg, "evenkeel_engine_state", "d0", "decode", "out"))
				require.EqualValues(t, 1, series(t, reg, "evenkeel_engine_outages_total", "d0", "failures"))
				time.Sleep(1500 * time.Millisecond) // an outage, and half of the canary's time
				asked := f.count(completionsPath)
				require.Equal(t, row.outcome != "" || row.answer == scaling, asked == 1)
				require.EqualValues(t, asked, m.Traffic("d0").sentWithoutSlot.Load(), "it has no slot")
				if row.heard {
					m.Traffic("d0").OnEvent()
				}
				for asked == 1 && m.Traffic("d0").sentWithoutSlot.Load() == 1 {
					time.Sleep(10 * time.Millisecond)
				}
				synctest.Wait()
				for _, outcome := range canaryOutcomes {
					n := series(t, reg, "evenkeel_engine_canaries_total", "d0", outcome)
					require.Equal(t, outcome == row.outcome, n == 1, outcome)
				}
				require.Equal(t, row.state, m.Status("d0").State().String())
				require.EqualValues(t, 1, series(t, reg, "evenkeel_engine_state", "d0", "decode", row.state))
			})
		})
	}
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

func TestAnAccusationIsClosedOnce(t *testing.T) {
	doubted(t, decodes(), func(t *testing.T, m *Monitor, _ *prometheus.Registry) {
		var closings []func()
		for range maxAccused + 1 {
			closings = append(closings, m.Accuse("d0"))
		}
		closings[0]()
		closings[0]()
		require.ErrorIs(t, m.Status("d0").Accused, errAccused)
		closings[1]()
		require.NoError(t, m.Status("d0").Accused)
		m.Accuse("gone")() // an engine that left meanwhile
		m.RecordOutcome("gone", Faulted, errBroke)
	})
}
