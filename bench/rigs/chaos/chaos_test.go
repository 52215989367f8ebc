package main

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/testbed"
)

// program is what all tests run.
var program testbed.Program

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = program.Remove()
		os.Exit(code)
	}))
}

// eachDriver plays a scene with event loops and with a goroutine per answer, both at the same time.
func eachDriver(t *testing.T, s scenario, seed uint64, judge func(t *testing.T, r *report)) {
	if testing.Short() {
		t.Skip("takes 10 to 20 s")
	}
	binary, err := program.Binary()
	require.NoError(t, err)
	for name, loops := range map[string]int{"event loops": 1, "goroutines": -1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, err := play(t.Context(), s, options{Options: testbed.Options{Bin: binary}, seed: seed, loops: loops})
			require.NoError(t, err)
			require.NoError(t, r.writeTable(t.Output()))
			require.Empty(t, r.Breaches)
			judge(t, r)
		})
	}
}

// TestAWhileOfEverything is `make chaos`, short: every kind of trouble, and no
// invariant broken.
func TestAWhileOfEverything(t *testing.T) {
	s, err := scenarioOf("mixed")
	require.NoError(t, err)
	s.duration, s.streams, s.wide, s.lag, s.hold = 8*time.Second, 40, 2, 1, 4*time.Second
	s.rate = 0.03
	eachDriver(t, s, 4, func(t *testing.T, r *report) {
		require.NotEmpty(t, r.Actions)
		require.NotEmpty(t, r.Struck)
		require.Positive(t, r.Clients.Left)
	})
}

// Requests that are bound before their prefill are as safe as the others. One of the runs is
// recorded.
func TestLivesOfBoundRequests(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 20 s")
	}
	binary, err := program.Binary()
	require.NoError(t, err)
	for _, c := range []refengine.Connector{refengine.AscendLayerwise, refengine.SGLang, refengine.NIXLPush} {
		t.Run(string(c), func(t *testing.T) {
			t.Parallel()
			s, err := scenarioOf("lives")
			require.NoError(t, err)
			s.connector, s.count, s.streams, s.wide, s.lag, s.hold = c, 150, 30, 1, 1, 4*time.Second
			o := options{Options: testbed.Options{Bin: binary}, seed: 9}
			if c == refengine.SGLang {
				o.Bin, o.record = "", filepath.Join(t.TempDir(), "recording")
			}
			r, err := play(t.Context(), s, o)
			require.NoError(t, err)
			require.NoError(t, r.writeTable(t.Output()))
			require.Empty(t, r.Breaches)
			require.NotEmpty(t, r.Struck)
			require.Positive(t, r.Clients.Left)
			if o.record != "" {
				text, err := os.ReadFile(o.record)
				require.NoError(t, err)
				for _, begins := range []string{`"Value":`, `"Event":`, `"Traits":`, `"Call":`} {
					require.Greater(t, bytes.Count(text, []byte(begins)), s.count, "lines with %s", begins)
				}
				text, err = os.ReadFile(o.record + ".rosters")
				require.NoError(t, err)
				for _, has := range []string{"roster.Entered", "roster.Health", `"Lists":`} {
					require.Positive(t, bytes.Count(text, []byte(has)), "lines with %s", has)
				}
			}
		})
	}
}

// The default retry budget and its attempts are enough for engines that refuse a
// fifth of what they are asked.
func TestPrefillEnginesThatRefuseFailFewRequests(t *testing.T) {
	s, err := scenarioOf("busy-prefill")
	require.NoError(t, err)
	s.count = 400
	eachDriver(t, s, 6, func(t *testing.T, r *report) { require.Greater(t, r.Struck["busy"], 40) })
}

func TestStrangersHarmNoOtherCaller(t *testing.T) {
	s, err := scenarioOf("strangers")
	require.NoError(t, err)
	s.count = 200
	eachDriver(t, s, 5, func(t *testing.T, r *report) {
		require.Equal(t, 200, r.Clients.Right)
		require.Len(t, r.TTFT, 2)
		require.NotEmpty(t, r.Actions)
	})
}

func TestNegativeFlagsAreRefused(t *testing.T) {
	for _, flag := range []string{"-duration=-1s", "-count=-1", "-rate=-0.1", "-rate=NaN"} {
		_, err := run(t.Context(), []string{flag, "-scenario", "none"}, io.Discard)
		require.ErrorContains(t, err, "cannot be negative", flag)
	}
}

func TestSavedCountsWhatARetryCouldSave(t *testing.T) {
	reset, reject, comments := refengine.Rule{Fault: refengine.Reset}, refengine.Rule{Fault: refengine.Reject},
		refengine.Rule{Fault: refengine.Comments}
	for _, row := range []struct {
		name    string
		strikes map[uint64][]refengine.Rule
		failed  []load.Failure
		want    saved
	}{
		{"nothing happened", nil, nil, saved{Share: 1}},
		{"a fault once is savable, and was saved", map[uint64][]refengine.Rule{1: {reset}}, nil, saved{Struck: 1, Savable: 1, Share: 1}},
		{"and was not", map[uint64][]refengine.Rule{1: {reset}, 2: {reset}}, []load.Failure{{Answer: 1}}, saved{Struck: 2, Savable: 2, Lost: []load.Failure{{Answer: 1, Detail: " [reset  ]"}}, Share: 0.5}},
		{"a no is the client's", map[uint64][]refengine.Rule{1: {reject}}, []load.Failure{{Answer: 1}}, saved{Struck: 1, Final: 1, Share: 1}},
		{"two faults may be too many", map[uint64][]refengine.Rule{1: {reset, reset}}, []load.Failure{{Answer: 1}}, saved{Struck: 1, Often: 1, Share: 1}},
		{"an answer without its ids is not taken up when it is lost", map[uint64][]refengine.Rule{1: {{Fault: refengine.Swallow}, reset}}, nil, saved{Struck: 1, Often: 1, Share: 1}},
		{"one of them harmless is one", map[uint64][]refengine.Rule{1: {reset, comments}}, nil, saved{Struck: 1, Savable: 1, Share: 1}},
		{"a failure without a fault is not saved", map[uint64][]refengine.Rule{1: {reset}}, []load.Failure{{Answer: 9}}, saved{Struck: 1, Savable: 1, Lost: []load.Failure{{Answer: 9}}, Share: 0}},
		{"a caller over its limit is no failure", nil, []load.Failure{{Answer: 9, Kind: "http_429/queue_full"}}, saved{Share: 1}},
	} {
		t.Run(row.name, func(t *testing.T) {
			l := newLedger()
			for answer, rules := range row.strikes {
				for _, r := range rules {
					l.struck(answer, r)
				}
			}
			require.Equal(t, row.want, l.saved(row.failed))
		})
	}
}

func TestReadTellsAClearErrorFromASilentEnd(t *testing.T) {
	const event = `data: {"choices":[{"index":1,"text":"a"}]}` + "\n\n"
	for _, row := range []struct {
		name   string
		status int
		stream bool
		body   string
		told   bool
		wrong  string
	}{
		{"a whole stream", 200, true, event + "data: [DONE]\n\n", false, ""},
		{"a stream that just ends", 200, true, event, false, "without a word"},
		{"a stream that ends with an error", 200, true, event + `data: {"error":{"message":"m"}}` + "\n\ndata: [DONE]\n\n", true, ""},
		{"an event after the end", 200, true, "data: [DONE]\n\n" + event, false, "after [DONE]"},
		{"an answer in one piece", 200, false, `{"choices":[{"index":0,"text":"a"}]}`, false, ""},
		{"an error under 200", 200, false, `{"error":{"message":"m"}}`, false, "status 200 for an error"},
		{"an error status", http.StatusBadGateway, true, `{"error":{"message":"m"}}`, true, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			_, err := read(row.status, row.stream, []byte(row.body))
			switch {
			case row.told:
				require.ErrorIs(t, err, errTold)
			case row.wrong != "":
				require.ErrorContains(t, err, row.wrong)
				require.False(t, errors.Is(err, errTold))
			default:
				require.NoError(t, err)
			}
		})
	}
}

// Whatever the rate, it is the share of requests that meet a fault.
func TestRatesAddUp(t *testing.T) {
	all := map[refengine.Fault]bool{}
	for _, c := range spoken {
		sum, kinds := 0.0, map[refengine.Fault]bool{}
		for _, r := range faultRules(0.01, c) {
			require.NoError(t, r.Validate())
			sum += r.Probability
			kinds[r.Fault], all[r.Fault] = true, true
		}
		require.InDelta(t, 0.01, sum, 1e-9)
		if c == refengine.AscendMooncake {
			require.Len(t, kinds, len(refengine.FaultNames())-1, "all but KV of another prompt")
		}
	}
	require.Len(t, all, len(refengine.FaultNames())+len(refengine.BoundFaultNames())-2,
		"and each of those that bound requests meet, but a masked rank: that ends the server of whoever names its rank, as these proxies do")
	require.NotContains(t, all, refengine.MaskedRank)
}
