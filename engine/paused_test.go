package engine

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/engine/circuit"
)

func TestWhatIsSaidOfTheEngineAndNotOfTheRequest(t *testing.T) {
	scaling, retired := `{"error":"`+saysScaling+`"}`, `{"error":"`+saysRetired+`"}`
	for _, row := range []struct {
		name   string
		status int
		body   string
		rank   int // of a target whose first rank is the engine's 10th, from 10 on
		want   error
	}{
		{"vLLM changes the number of its ranks", 503, scaling, -1, ErrReforming},
		{"it has retired the rank", 503, retired, 3, ErrRetired},
		{"it is only full", 503, `{"error":{"message":"` + saysScaling + `","code":503}}`, -1, nil},
		{"its core is paused", 503, `{"error":{"message":"` + saysPaused + `","type":"ServiceUnavailableError","param":null,"code":503}}`, -1, ErrPaused},
		{"another status", 500, scaling, -1, nil},
		{"no JSON", 503, saysScaling, -1, nil},
		{"vLLM has fewer ranks", 400, `{"error":{"message":"data_parallel_rank 3 is out of range [0, 2).","type":"BadRequestError"}}`, 3, &RankError{3, 2}},
		{"SGLang has, whose requests name the rank in the body", 400, `{"object":"error","message":"routed_dp_rank=5 out of range [0, 4)"}`, -1, &RankError{5, 4}},
		{"it means another rank than the one that was named", 400, `{"message":"data_parallel_rank 3 is out of range [0, 2)."}`, 2, nil},
		{"a node of several counts the ranks of all", 400, `{"message":"data_parallel_rank 13 is out of range [0, 12)."}`, 13, &RankError{3, 2}},
		{"none of the node's is left", 400, `{"message":"data_parallel_rank 10 is out of range [0, 8)."}`, 10, nil},
		{"an engine that quotes a client", 400, `{"message":"bad input: data_parallel_rank 3 is out of range [0, 2)."}`, 3, nil},
		{"a rank that there is", 400, `{"message":"data_parallel_rank 3 is out of range [0, 4)."}`, 3, nil},
		{"no rank is left", 400, `{"message":"data_parallel_rank 3 is out of range [0, 0)."}`, 3, nil},
		{"a number that is none", 400, `{"message":"data_parallel_rank 99999999999999999999 is out of range [0, 99999999999999999999)."}`, -1, nil},
	} {
		t.Run(row.name, func(t *testing.T) {
			at := &Target{Rank: row.rank}
			if row.rank >= 10 {
				at.First, at.Rank = 10, row.rank-10
			}
			require.Equal(t, row.want, ParseRefusal(row.status, []byte(row.body), at))
		})
	}
}

func refusing(code int, body string) string {
	return fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s", code, len(body), body)
}

// A report of one request is enough. That it is over is seen by the next check, although GET /health says nothing of it.
func TestAnEngineThatReformsIsHalted(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, reg *prometheus.Registry) {
		since := m.Status("p0").Since
		f.set("/v1/models", refusing(503, `{"error":"`+saysScaling+`"}`))
		f.set("/metrics", refusing(503, `{"error":"`+saysScaling+`"}`))
		m.ReportFailure("p0", fmt.Errorf("prefill p0: %w", ErrReforming))
		s := m.Status("p0")
		require.True(t, s.Halted())
		require.Equal(t, "halted", s.State().String())
		require.EqualValues(t, 1, series(t, reg, "evenkeel_engine_state", "p0", "prefill", "halted"))
		for range 60 {
			time.Sleep(time.Second)
			require.True(t, m.Status("p0").Halted())
		}
		require.Len(t, m.Status("p0").Models, 2, "what was known stays")
		f.set("/v1/models", newFake().answers["/v1/models"])
		time.Sleep(2 * time.Second)
		s = m.Status("p0")
		require.Equal(t, "up", s.State().String())
		require.NoError(t, s.Err)
		require.Equal(t, since, s.Since, "it was up all the while")
		require.WithinRange(t, s.Changed, time.Now().Add(-2*time.Second), time.Now(), "and takes requests since a moment ago")
		require.Len(t, logs.FilterMessage("an engine takes no requests for now, and its requests wait").All(), 1)
		m.ReportFailure("nobody", ErrReforming)
	})
}

// From 0.33 on vLLM says how far a change of its ranks is. After one that failed it never takes requests again, so nothing waits for it.
func TestAChangeOfRanksThatFailedIsNotWaitedFor(t *testing.T) {
	const path = "/is_scaling_elastic_ep"
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
		says := func(body string) Status {
			f.set(path, ok(body))
			time.Sleep(3 * time.Second)
			return m.Status("p0")
		}
		phase := func(p string, ranks int, why string) string {
			return fmt.Sprintf(`{"is_scaling_elastic_ep":%v,"phase":%q,"epoch":"1","error":%s,"requested_data_parallel_size":%d}`, p != "failed", p, why, ranks)
		}
		require.Equal(t, "up", says(phase("preparing", 8, "null")).State().String(), "it takes requests until it commits")
		require.Zero(t, f.count(path), "nothing asks an engine that takes requests")

		for _, p := range []string{"/v1/models", "/metrics"} {
			f.set(p, refusing(503, `{"error":"`+saysScaling+`"}`))
		}
		m.ReportFailure("p0", fmt.Errorf("prefill p0: %w", ErrReforming))
		s := says(phase("committing", 8, "null"))
		require.Equal(t, "halted", s.State().String())
		require.ErrorContains(t, s.Halt, "its group re-forms, because vLLM changes the number of its ranks (elastic EP); it is to have 8")
		for _, old := range []string{`{"is_scaling_elastic_ep":true}`, `{"phase":"committing","error":null,"requested_data_parallel_size":null}`, "<html>",
			`{"phase":"committing","requested_data_parallel_size":-3}`} {
			require.Equal(t, "halted", says(old).State().String(), old)
		}
		f.set(path, status(503)) // its store cannot be reached just now
		time.Sleep(3 * time.Second)
		require.Equal(t, "halted", m.Status("p0").State().String())

		s = says(phase("failed", 8, `"rank 3: RuntimeError"`))
		require.Equal(t, "down", s.State().String())
		require.ErrorContains(t, s.Err, `takes no requests until all of them are restarted; it was to have 8, and says: "rank 3: RuntimeError"`)

		for _, p := range []string{"/v1/models", "/metrics"} {
			f.set(p, newFake().answers[p])
		}
		time.Sleep(3 * time.Second)
		require.Equal(t, "up", m.Status("p0").State().String())
		require.NoError(t, m.Status("p0").Err)
	})
}

// refusesTokens has a decode engine of one rank say to requests, canaries too, that its group re-forms.
func refusesTokens(t *testing.T, m *Monitor, f *fake) {
	m.cfg.Canary = time.Second
	base := target(t, "http://p0:8000")
	m.Set([]Instance{{ID: "d0", Role: "decode", Target: base, Ranks: 1, Canaries: []*Target{base}}})
	time.Sleep(2 * time.Second)
	f.set(completionsPath, refusing(503, `{"error":"`+saysScaling+`"}`))
}

// What requests are told, and no check, is a failure of theirs: an engine that goes on with it is out, and its canaries become rare.
func TestAnEngineThatTellsOnlyRequestsThatItReforms(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, _ *prometheus.Registry) {
		refusesTokens(t, m, f)
		f.setDelay(time.Millisecond) // so that the check after a report is not over at once
		for range circuit.Limit {
			synctest.Wait() // for a check of the same instant
			require.NoError(t, m.Status("d0").Out)
			m.ReportFailure("d0", ErrReforming)
			require.True(t, m.Status("d0").Halted())
			time.Sleep(2 * time.Second)
			require.NoError(t, m.Status("d0").Halt)
		}
		f.setDelay(0)
		require.ErrorContains(t, m.Status("d0").Out,
			"it refuses requests again and again, although its health checks do not say so: its group re-forms")
		time.Sleep(2 * time.Minute)
		require.InDelta(t, 8, f.count(completionsPath), 2, "after 1, 2, 4 s and so on, at most 30")
		require.Less(t, logs.Len(), 20)
		f.set(completionsPath, ok(`{"choices":[{}]}`))
		time.Sleep(time.Minute)
		require.Equal(t, "up", m.Status("d0").State().String())
	})
}

// Only a list of models says that an engine takes requests again: not a check that had begun before, nor any other failure.
func TestNothingButAListOfModelsEndsWhatAnEngineSaid(t *testing.T) {
	for _, row := range []struct {
		why   error
		says  string
		state string
	}{{ErrReforming, saysScaling, "halted"}, {ErrRetired, saysRetired, "down"}} {
		f := newFake()
		watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
			f.setDelay(time.Second)
			time.Sleep(3 * time.Second)
			for asked := f.count("/health"); f.count("/health") == asked; {
				time.Sleep(10 * time.Millisecond)
			}
			m.ReportFailure("p0", row.why)
			f.set("/v1/models", refusing(503, `{"error":"`+row.says+`"}`))
			for range 100 {
				time.Sleep(100 * time.Millisecond)
				require.Equal(t, row.state, m.Status("p0").State().String(), "a check was under way")
			}
			f.setDelay(0)
			for _, fails := range []string{"", status(500), status(503), ok("{}")} {
				f.set("/v1/models", fails)
				for range 300 {
					time.Sleep(100 * time.Millisecond)
					s := m.Status("p0")
					state := s.State().String()
					require.True(t, state == row.state || fails == ok("{}") && state == "down", "%q: %v", fails, s)
				}
			}
			f.set("/v1/models", newFake().answers["/v1/models"])
			time.Sleep(3 * time.Second)
			require.Equal(t, "up", m.Status("p0").State().String())
		})
	}
}

// After a commit that failed vLLM keeps refusing requests. Nothing waits for it for ever.
func TestAHaltThatDoesNotEndIsAnOutage(t *testing.T) {
	scaling := refusing(503, `{"error":"`+saysScaling+`"}`)
	for _, path := range []string{"/v1/models", "/health"} { // of 0.33, and before
		f := newFake()
		watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, reg *prometheus.Registry) {
			before := f.answers[path]
			f.set(path, scaling)
			m.ReportFailure("p0", ErrReforming)
			time.Sleep(LongestHalt - time.Second)
			require.Equal(t, "halted", m.Status("p0").State().String())
			for range 60 {
				time.Sleep(3 * time.Second)
				require.Equal(t, "down", m.Status("p0").State().String())
				require.ErrorContains(t, m.Status("p0").Err, "it has taken no requests for 10 minutes: its group re-forms")
			}
			require.Zero(t, gauge(t, reg))
			f.set(path, before)
			time.Sleep(3 * time.Second)
			require.Equal(t, "up", m.Status("p0").State().String())
			f.set(path, scaling)
			m.ReportFailure("p0", ErrReforming)
			time.Sleep(LongestHalt - time.Second)
			require.Equal(t, "halted", m.Status("p0").State().String(), "it counts anew")
		})
	}
}

// A core that waits for its recovery is seen at the next check, and one that goes down meanwhile is down.
func TestAFaultIsSeenAtTheNextCheck(t *testing.T) {
	healthy := ok(`{"schema_version":1,"total_engines":1,"engines":[{"id":4,"status":"healthy"}]}`)
	f := newFake()
	f.set("/fault_tolerance/status", healthy)
	watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
		f.set("/fault_tolerance/status", ok(`{"schema_version":1,"total_engines":1,"engines":[{"id":4,"status":"unhealthy","fault_info":"RuntimeError"}]}`))
		time.Sleep(2 * time.Second)
		require.ErrorContains(t, m.Status("p0").Halt, `it has met a fault ("RuntimeError") and waits for its recovery`)
		f.set("/fault_tolerance/status", status(500))
		time.Sleep(5 * time.Second)
		require.True(t, m.Status("p0").Halted(), "it has not said that it is over")
		f.set("/fault_tolerance/status", healthy)
		time.Sleep(2 * time.Second)
		require.Equal(t, "up", m.Status("p0").State().String())
		f.set("/fault_tolerance/status", ok(`{"schema_version":1,"total_engines":1,"engines":[{"id":4,"status":"dead"}]}`))
		time.Sleep(2 * time.Second)
		require.ErrorContains(t, m.Status("p0").Err, "one of its workers has died")
		require.Equal(t, "down", m.Status("p0").State().String())
		f.set("/fault_tolerance/status", healthy)
		time.Sleep(2 * time.Second)
		require.Equal(t, "up", m.Status("p0").State().String())
	})
	f = newFake()
	watched(t, f, func(t *testing.T, _ *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
		time.Sleep(time.Minute)
		require.Equal(t, 1, f.count("/fault_tolerance/status"), "an engine without it is asked once")
	})
	for _, fails := range []string{status(500), ""} {
		f = newFake()
		f.set("/fault_tolerance/status", fails)
		watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
			time.Sleep(2 * time.Second)
			require.Equal(t, "up", m.Status("p0").State().String(), "it is not kept waiting")
			f.set("/fault_tolerance/status", ok(`{"schema_version":1,"engines":[{"id":4,"status":"unhealthy"}]}`))
			time.Sleep(20 * time.Second)
			require.True(t, m.Status("p0").Halted(), "it is asked again")
		})
	}
}

// Ranks from the engine's number on are lost until its facts are read next, and no other health
// check brings them back.
func TestRanksThatAnEngineDoesNotHave(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, _ *prometheus.Registry) {
		m.Set([]Instance{{ID: "d0", Role: "decode", Target: target(t, "http://p0:8000"), Ranks: 3}})
		time.Sleep(2 * time.Second)
		m.ReportFailure("d0", &RankError{Rank: 3, Ranks: 3})
		require.NoError(t, m.Status("d0").LostRanks(), "the config has no rank 3")

		m.ReportFailure("d0", errors.Join(errors.New("decode d0"), &RankError{Rank: 2, Ranks: 2}))
		m.ReportFailure("d0", &RankError{Rank: 1, Ranks: 1})
		s := m.Status("d0")
		require.EqualError(t, s.LostRanks(), "rank 1 and those above it are lost: the engine has only 1 ranks now (elastic EP)")
		require.False(t, s.Lacks(-1) || s.Lacks(0))
		require.True(t, s.Lacks(1) && s.Lacks(2))
		require.Equal(t, "up", s.State().String())
		require.NoError(t, s.Err)

		for range 5 {
			reads, checks := f.count("/v1/models"), f.count("/health")
			for f.count("/v1/models") == reads {
				require.True(t, m.Status("d0").Lacks(1))
				time.Sleep(100 * time.Millisecond)
			}
			synctest.Wait()
			require.Greater(t, f.count("/health"), checks)
			require.False(t, m.Status("d0").Lacks(1))
			m.ReportFailure("d0", &RankError{Rank: 1, Ranks: 1})
			require.True(t, m.Status("d0").Lacks(1), "it still has only one")
		}
		require.Equal(t, 2, logs.FilterMessageSnippet("has lost ranks").Len(), "each number once")
		m.ReportFailure("d0", ErrReforming)
		f.set("/v1/models", refusing(503, `{"error":"`+saysScaling+`"}`))
		time.Sleep(3 * time.Second)
		require.True(t, m.Status("d0").Halted())
		f.set("/v1/models", newFake().answers["/v1/models"])
		time.Sleep(3 * time.Second)
		require.False(t, m.Status("d0").Lacks(1), "its group has changed")
	})
}

// What a canary says of a rank that the engine does not have, and of a group that re-forms, says nothing of the engine.
func TestACanaryThatIsWithheldProvesNothing(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
		refusesTokens(t, m, f)
		f.set("/v1/models", refusing(503, `{"error":"`+saysScaling+`"}`))
		m.RecordOutcome("d0", Silent, context.DeadlineExceeded)
		time.Sleep(2 * time.Second)
		s := m.Status("d0")
		require.True(t, s.Halted())
		require.False(t, s.Wedged)
		f.set("/v1/models", newFake().answers["/v1/models"])
		time.Sleep(2 * time.Second)
		require.Equal(t, "up", m.Status("d0").State().String())
	})
}

// vLLM with VLLM_SERVER_DEV_MODE=1 says that it is paused: to a proxy that has paused it and was restarted since, and to one that is told
// nothing of it.
func TestAnEngineThatSaysThatItIsPausedIsHalted(t *testing.T) {
	f := newFake()
	f.set("/is_paused", ok(`{"is_paused":true}`))
	watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
		require.Equal(t, "halted", m.Status("p0").State().String())
		require.ErrorIs(t, m.Status("p0").Halt, ErrPaused)
		f.set("/is_paused", status(500))
		time.Sleep(3 * time.Second)
		require.True(t, m.Status("p0").Halted(), "what it said last counts")
		f.set("/is_paused", ok(`{"is_paused":false}`))
		time.Sleep(3 * time.Second)
		require.Equal(t, "up", m.Status("p0").State().String())

		f.set("/is_paused", ok(`{"is_paused":true}`))
		m.ReportFailure("p0", fmt.Errorf("prefill p0: %w", ErrPaused))
		require.True(t, m.Status("p0").Halted(), "at once")
		f.set("/is_paused", ok(`{"is_paused":false}`))
		time.Sleep(3 * time.Second)
		require.Equal(t, "up", m.Status("p0").State().String())
	})
}

// Nothing that an engine does while it is held is held against it, but that no process listens there.
func TestAnEngineThatIsHeldIsNotJudged(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, _ *prometheus.Registry) {
		to := target(t, "http://p0:8000")
		set := func(held *Held) {
			m.Set([]Instance{{ID: "d0", Role: "decode", Target: to, Canaries: []*Target{to}, Held: held}})
		}
		set(nil)
		time.Sleep(2 * time.Second)
		since := m.Status("d0").Since
		f.set(completionsPath, "") // it never answers, and nothing is to be asked
		for range circuit.Limit - 1 {
			m.RecordOutcome("d0", Faulted, errors.New("500"))
		}
		set(&Held{"paused at noon"})
		require.EqualError(t, m.Status("d0").Halt, "paused at noon", "at once")
		for range circuit.Limit {
			m.RecordOutcome("d0", Faulted, errors.New("500"))
			m.RecordOutcome("d0", Silent, errors.New("silent"))
			m.ReportFailure("d0", fmt.Errorf("decode d0: %w", ErrPaused))
		}
		f.set("/health", status(503))
		time.Sleep(time.Minute)
		f.setDelay(time.Minute)
		time.Sleep(time.Minute)
		s := m.Status("d0")
		require.True(t, s.Up && s.Halted() && s.Out == nil && !s.Hangs, "%+v", s)
		require.Equal(t, since, s.Since)
		require.Zero(t, f.count(completionsPath))
		require.Zero(t, logs.FilterMessageSnippet("out of service").Len())

		f.setDelay(0)
		f.set("/health", ok(""))
		set(&Held{"paused at noon"})
		set(nil)
		s = m.Status("d0")
		require.True(t, s.Up && !s.Halted(), "%+v", s)
		m.RecordOutcome("d0", Faulted, errors.New("500"))
		require.NoError(t, m.Status("d0").Out, "what failed before counts no more")

		set(&Held{"paused again"})
		f.refuseAll(true)
		m.ReportFailure("d0", &Error{Phase: PhaseConnect, Err: errors.New("refused")})
		require.False(t, m.Status("d0").Up)
	})
}
