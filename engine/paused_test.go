package engine

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest/observer"
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

// A report of one request is enough. That it is over is seen by the next check, although GET
// /health says nothing of it.
func TestAnEngineThatReformsIsHalted(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, reg *prometheus.Registry) {
		m.ReportFailure("p0", ErrReforming)
		time.Sleep(2 * time.Second)
		require.Len(t, logs.All(), 1, "it is up, and no check has seen that it re-forms")
		require.Zero(t, f.count(scalingPath), "nothing asks an engine that takes requests")
		f.set("/v1/models", refusing(503, `{"error":"`+saysScaling+`"}`))
		f.set("/metrics", refusing(503, `{"error":"`+saysScaling+`"}`))
		f.set(scalingPath, ok(`{"phase":"committing","requested_data_parallel_size":8}`))
		m.ReportFailure("p0", fmt.Errorf("prefill p0: %w", ErrReforming))
		require.True(t, m.Status("p0").Halted())
		require.EqualValues(t, 1, series(t, reg, "evenkeel_engine_state", "p0", "prefill", "halted"))
		time.Sleep(time.Minute)
		require.ErrorContains(t, m.Status("p0").Halt, "it is to have 8")
		require.Len(t, m.Status("p0").Models, 2, "what was known stays")
		f.set("/v1/models", newFake().answers["/v1/models"])
		time.Sleep(2 * time.Second)
		require.Equal(t, "up", m.Status("p0").State().String())
		require.Len(t, logs.FilterMessage("an engine takes no requests for now, and its requests wait").All(), 1)
		require.Len(t, logs.FilterMessage("an engine takes requests again").All(), 1)
		m.ReportFailure("nobody", ErrReforming)
	})
}

const scalingPath = "/is_scaling_elastic_ep"

// From 0.33 on vLLM says how far a change of its ranks is. After one that failed it never takes
// requests again, so nothing waits for it.
func TestWhatAnEngineSaysOfAChangeOfItsRanks(t *testing.T) {
	const reforms = "its group re-forms, because vLLM changes the number of its ranks (elastic EP)"
	for answer, want := range map[string]string{
		ok(`{"phase":"committing","error":null,"requested_data_parallel_size":8}`):               reforms + "; it is to have 8",
		ok(`{"phase":"failed","error":"rank 3: RuntimeError","requested_data_parallel_size":8}`): errScaleFailed.Error() + `; it was to have 8, and says: "rank 3: RuntimeError"`,
		ok(`{"is_scaling_elastic_ep":true}`):                                                     reforms,
		ok(`{"phase":"committing","error":null,"requested_data_parallel_size":null}`):            reforms,
		ok(`{"phase":"committing","requested_data_parallel_size":-3}`):                           reforms + "; ",
		ok("<html>"): reforms,
		status(503):  reforms, // its store cannot be reached just now
	} {
		err := asksOnce(t, answer).readScaling(t.Context())
		require.ErrorContains(t, err, want, answer)
		require.Equal(t, strings.HasPrefix(want, reforms), errors.Is(err, ErrReforming))
	}
}

// asksOnce returns a watch of an engine that gives one answer.
func asksOnce(t *testing.T, raw string) *watch {
	c, to := listen(t, once(raw))
	m := NewMonitor(MonitorConfig{Client: c, Registerer: prometheus.NewRegistry()})
	m.Set([]Instance{{ID: "p0", Role: "prefill", Target: to}})
	return m.watches["p0"]
}

// A core may wait for its recovery, and GET /health answers 200.
func TestWhatAnEngineSaysOfAFault(t *testing.T) {
	says := func(engine string) string {
		return ok(`{"schema_version":1,"total_engines":1,"engines":[` + engine + `]}`)
	}
	for answer, want := range map[string][2]string{ // the fault, and why there is no answer
		says(`{"id":4,"status":"healthy"}`): {},
		says(`{"id":4,"status":"healthy"},{"id":5,"status":"unhealthy","fault_info":"RuntimeError"}`): {`it has met a fault ("RuntimeError") and waits for its recovery`, ""},
		says(`{"id":4,"status":"dead"}`): {"one of its workers has died", ""},
		ok(`{"engines":[]}`):             {"", errNoFaultReport.Error()},
		status(500):                      {"", "answered 500"},
	} {
		fault, err := asksOnce(t, answer).readFault(t.Context(), time.Minute)
		require.Contains(t, errorText(fault), want[0], answer)
		require.Contains(t, errorText(err), want[1], answer)
		require.Equal(t, want == [2]string{}, fault == nil && err == nil, answer)
	}
}

// It is asked at each check, but once only if it does not have the path. Without an answer, what it
// said last counts.
func TestFaultsAndPausesAreSeenAtTheNextCheck(t *testing.T) {
	for path, answers := range map[string][2]string{
		"/fault_tolerance/status": {`{"schema_version":1,"engines":[{"status":"healthy"}]}`, `{"schema_version":1,"engines":[{"status":"unhealthy"}]}`},
		"/is_paused":              {`{"is_paused":false}`, `{"is_paused":true}`},
	} {
		works, halted := ok(answers[0]), ok(answers[1])
		for _, first := range []string{works, halted, status(500), ""} { // the last two are asked again
			f := newFake()
			f.set(path, first)
			watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
				time.Sleep(2 * time.Second)
				require.Equal(t, first == halted, m.Status("p0").Halted(), "it is not kept waiting")
				f.set(path, halted)
				time.Sleep(20 * time.Second)
				require.True(t, m.Status("p0").Halted())
				f.set(path, status(500))
				time.Sleep(5 * time.Second)
				require.True(t, m.Status("p0").Halted(), "it has not said that it is over")
				f.set(path, works)
				time.Sleep(3 * time.Second)
				require.Equal(t, "up", m.Status("p0").State().String())
			})
		}
		f := newFake()
		watched(t, f, func(t *testing.T, _ *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
			time.Sleep(time.Minute)
			require.Equal(t, 1, f.count(path))
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
		m.ReportFailure("d0", &RankError{Rank: 2, Ranks: 2})
		for range 5 {
			m.ReportFailure("d0", &RankError{Rank: 1, Ranks: 1})
			reads, checks := f.count("/v1/models"), f.count("/health")
			for f.count("/v1/models") == reads {
				s := m.Status("d0")
				require.True(t, s.Lacks(1) && s.Lacks(2) && !s.Lacks(0) && !s.Lacks(-1))
				time.Sleep(100 * time.Millisecond)
			}
			synctest.Wait()
			require.Greater(t, f.count("/health"), checks)
			require.False(t, m.Status("d0").Lacks(1))
		}
		require.Equal(t, 2, logs.FilterMessageSnippet("has lost ranks").Len(), "each number once")
	})
}
