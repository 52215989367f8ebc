package journal

import (
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/gateway/detect"
	"evenkeel/gateway/openai"
)

func TestAMinuteRemembersTheLastOne(t *testing.T) {
	var m minute
	now := time.Date(2026, 1, 1, 0, 0, 2, 0, time.UTC)
	require.Zero(t, m.latency(now), "nothing came")
	for i := range 100 {
		m.add(float64(i+1)/100, now.Add(time.Duration(i)*400*time.Millisecond)) // 10 ms to 1 s, over 40 s
	}
	end := now.Add(40 * time.Second)
	l := m.latency(end)
	require.Equal(t, 100, l.Samples)
	require.InEpsilon(t, 0.5, l.P50Ms/1000, 0.06)
	require.InEpsilon(t, 0.99, l.P99Ms/1000, 0.06)

	l = m.latency(end.Add(35 * time.Second))
	require.Less(t, l.Samples, 90, "the first ones are over a minute old")
	require.Positive(t, l.Samples)
	require.Zero(t, m.latency(end.Add(2*time.Minute)), "all are forgotten, though nothing new came")
	m.add(0, end.Add(3*time.Minute))
	m.add(1e9, end.Add(3*time.Minute))
	require.Equal(t, 2, m.latency(end.Add(3*time.Minute)).Samples, "what is out of range is counted at its end")
}

func TestObservingAMinuteDoesNotAllocate(t *testing.T) {
	var m minute
	require.Zero(t, testing.AllocsPerRun(100, func() { m.Observe(0.1) }))
}

func TestFailuresAreKeptByTheirOutcome(t *testing.T) {
	var r recent
	counts, _ := r.failuresSoFar()
	require.Empty(t, counts)
	for _, fail := range []*openai.Error{
		nil, {Status: http.StatusBadRequest, Code: "invalid_json"}, {Status: http.StatusTooManyRequests, Code: "queue_full", Why: "it takes 40"},
		{Status: http.StatusTooManyRequests, Code: "queue_full"},
		{Status: http.StatusServiceUnavailable, Code: "an engine wrote this"},
	} {
		r.count(fail)
	}
	counts, whys := r.failuresSoFar()
	want := map[detect.Outcome]uint64{{Name: "queue_full", Status: 429}: 2, {Name: "engine_error", Status: 503}: 1}
	require.Equal(t, want, counts, "the client's own mistakes are none")
	require.Equal(t, "it takes 40", whys[detect.Outcome{Name: "queue_full", Status: 429}].Text)
	require.Len(t, whys, 1)
	require.Equal(t, uint64(5), r.ended.Load())
}

// A flood of strangers must not hide that the requests of others fail.
func TestMistakesOfStrangersAreNoRequestsThatEnded(t *testing.T) {
	g, err := New(Config{Registerer: prometheus.NewRegistry(), Log: zap.NewNop()})
	require.NoError(t, err)
	for _, status := range []int{http.StatusUnauthorized, http.StatusBadRequest, http.StatusRequestTimeout} {
		g.CountRefused(&openai.Error{Status: status, Code: "invalid_api_key"})
	}
	g.recent.count(&openai.Error{Status: http.StatusUnauthorized, Code: "invalid_api_key"}) // with a record
	g.CountRefused(&openai.Error{Status: http.StatusServiceUnavailable, Code: "overloaded"})
	g.CountRefused(&openai.Error{Status: http.StatusTooManyRequests, Code: "rate_limit_exceeded"})
	r := g.Recent()
	require.Equal(t, []uint64{2, 2}, []uint64{r.Ended, r.Failed})
	require.Equal(t, map[detect.Outcome]uint64{{Name: "overloaded", Status: 503}: 1, {Name: "rate_limit_exceeded", Status: 429}: 1},
		r.Failures)
}

// A key at its own limit must not hide which queue is full for all.
func TestALimitOfAllIsToldBeforeThatOfOneKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r recent
		own := &openai.Error{Status: http.StatusTooManyRequests, Code: "queue_full", Why: "key a has all its answers", ByKeyLimit: true}
		of := func() (string, bool) {
			_, whys := r.failuresSoFar()
			why := whys[detect.Outcome{Name: "queue_full", Status: 429}]
			return why.Text, why.ByKeyLimit
		}
		told := func(text string, own bool) {
			gotText, gotOwn := of()
			require.Equal(t, text, gotText)
			require.Equal(t, own, gotOwn)
		}
		r.count(own)
		told(own.Why, true)
		r.count(&openai.Error{Status: http.StatusTooManyRequests, Code: "queue_full", Why: "the arrival queue is full"})
		r.count(own)
		told("the arrival queue is full", false)
		time.Sleep(sharedReasonKeptFor)
		r.count(own)
		told(own.Why, true)
	})
}
