package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	trials "evenkeel/bench/lab/trial" // a trial of the demo has the plain name
)

// bothRoles starts an engine whose ranks prefill and decode behind one address.
func bothRoles(t *testing.T, cfg refengine.Config) (addr string) {
	t.Helper()
	cfg.DPMode = "internal"
	cfg.Steps.C0, cfg.Slots = time.Millisecond, 4
	e, err := refengine.Start(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { e.Close() })
	return strings.TrimPrefix(e.URLs()[0], "http://")
}

// The short form is the whole trial with little in it: what is looked at is that all is there, and
// never how fast it was.
func TestATrialOfSeconds(t *testing.T) {
	addr := bothRoles(t, refengine.Config{Role: refengine.Aggregated, DPSize: 4})
	file := filepath.Join(t.TempDir(), "trial.json")
	status, out, errs := line("survey", "--trial", "--short", "--engines", addr, "--slots", "4", "--law", "gpt-oss-120b,vllm,H200,4", "--out",
		file)
	require.Zero(t, status, errs)
	for _, says := range []string{
		"4 ranks of 4 slots", "By what is expected", "simulated under the law gpt-oss-120b,vllm,H200,4", "4. short prompts, long answers: ",
		"2 pairs of", "TPOT p95, ms", "The nearest of ",
	} {
		require.Contains(t, out, says)
	}
	require.NotContains(t, out, "NOT THE WHOLE")
	require.Less(t, strings.Index(out, "Expected of evenkeel"), strings.Index(out, "means over the blocks"),
		"the expectation stands before what was measured")

	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NotContains(t, string(text), "127.0.0.1", "the file has no hosts")
	require.Contains(t, errs, file+" is written")
	var r trials.Report
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&r))
	require.Equal(t, []any{trials.Format, trials.Version, true, true}, []any{r.Format, r.Version, r.Complete, r.Short})
	require.Equal(t, "vllm", r.Engine.Kind)
	require.Equal(t, "evenkeel", r.Program.Policy)
	require.Equal(t, []string{"gpt-oss-120b,vllm,H200,4"}, r.Expects.Laws)
	require.Len(t, r.Loads, 4)
	for _, l := range r.Loads {
		require.NotNil(t, l.Expected, l.Name)
		require.Len(t, l.Pairs, shortPairs, l.Name)
		require.Zero(t, l.Dropped, l.Name)
		for i, p := range l.Pairs {
			require.Equal(t, []trials.Way{trials.Straight, trials.Ours}[i%2], p.First, "in turn: ABBA")
			for way, b := range map[trials.Way]trials.Block{trials.Straight: p.Engine, trials.Ours: p.Evenkeel} {
				require.Equal(t, way, b.Way)
				require.Equal(t, []int{l.Requests, l.Requests, 0}, []int{b.Sent, b.OK, b.Failed}, l.Name)
				require.Positive(t, b.Tokens, l.Name)
			}
			require.Equal(t, p.Engine.PromptTokens, p.Evenkeel.PromptTokens, "both ways have the same requests")
			require.Equal(t, p.Engine.OutputTokens, p.Evenkeel.OutputTokens)
		}
		require.Equal(t, shortPairs, l.Gain.TTFT95.Pairs)
	}
	require.Positive(t, r.Law.Seen)
	require.Positive(t, r.Law.Nearest.Error)
	require.NotEmpty(t, r.Law.Nearest.Form)
}

func TestATrialIsPlannedWithoutBeingPlayed(t *testing.T) {
	t.Chdir(t.TempDir())
	addr := bothRoles(t, refengine.Config{Role: refengine.Aggregated, DPSize: 2})
	status, out, errs := line("survey", "--trial", "--plan", "--engines", addr, "--slots", "4")
	require.Zero(t, status, errs)
	require.Contains(t, out, "Together that is about 40 minutes, and 88 minutes at most.")
	require.Contains(t, out, "The table of laws has none with 2 ranks of vllm, so nothing is expected.")
	files, err := os.ReadDir(".")
	require.NoError(t, err)
	require.Empty(t, files)
}

func TestATrialThatCannotBePlayed(t *testing.T) {
	there := textFile(t, "trial.json", "an older one")
	both := bothRoles(t, refengine.Config{Role: refengine.Aggregated, DPSize: 2})
	one := bothRoles(t, refengine.Config{Role: refengine.Aggregated})
	pair := bothRoles(t, refengine.Config{Role: refengine.Prefill, Connector: refengine.NIXLPull, DPSize: 2})
	for name, tt := range map[string]struct {
		flags []string
		says  string
	}{
		"nobody listens":          {[]string{"--engines", "127.0.0.1:1"}, "does not answer (dial"},
		"one rank":                {[]string{"--engines", one, "--slots", "4"}, "start vLLM with --data-parallel-size 8, or SGLang with --enable-dp-attention --dp-size 8"},
		"a pair":                  {[]string{"--engines", pair}, "belongs to a pair of prefill and decode engines"},
		"slots that are not told": {[]string{"--engines", both}, "add --slots with its --max-num-seqs"},
		"two addresses":           {[]string{"--engines", both, one}, "name one address, that of all ranks"},
		"an unknown law":          {[]string{"--engines", both, "--slots", "4", "--law", "mine"}, "write MODEL,ENGINE,GPU,RANKS"},
		"a law of others":         {[]string{"--engines", both, "--slots", "4", "--law", "Kimi-K2.5,vllm,H200,8"}, "is of 8 ranks, and the engine has 2"},
		"a file that is there":    {[]string{"--engines", both, "--slots", "4", "--short", "--out", there}, "exists already"},
		"too short":               {[]string{"--engines", both, "--each", "1ms"}, "take a second to four hours"},
		"a flag of the watch":     {[]string{"--engines", both, "--for", "1h"}, "with --trial, use --each"},
	} {
		t.Run(name, func(t *testing.T) {
			status, _, errs := line(append([]string{"survey", "--trial"}, tt.flags...)...)
			require.NotZero(t, status)
			require.Contains(t, errs, tt.says)
		})
	}
	status, _, errs := line("survey", "--engines", both, "--short")
	require.Equal(t, 2, status)
	require.Contains(t, errs, "are for --trial; add it")
	_, _, errs = line("survey", "--trial", "--engines", both, "--slots", "4", "--short", "--out", there)
	require.NotContains(t, errs, "simulating", "a file that is there is said at once")
	require.NoFileExists(t, trialFile, "nothing is left of what was not played")
	kept, err := os.ReadFile(there)
	require.NoError(t, err)
	require.Equal(t, "an older one", string(kept))
}

// What fails after a trial takes nothing from it.
func TestALateErrorKeepsTheFile(t *testing.T) {
	for name, tt := range map[string]struct {
		whole bool
		late  error
		fails string
	}{
		"all is well":                   {true, nil, ""},
		"evenkeel does not end":         {true, errors.New("a request is stuck"), "did not end as it should: a request is stuck"},
		"nor after a part of the trial": {false, errors.New("a request is stuck"), "did not end as it should: a request is stuck"},
		"a part of the trial":           {false, nil, errFailed.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			r := trials.New(&trials.Engine{Kind: "vllm"}, []*trials.Load{{Name: "chat"}}, nil)
			r.Complete, r.Loads[0].Pairs = tt.whole, make([]trials.Pair, 1)
			r.Seconds = math.NaN()
			var out, errs bytes.Buffer
			c := surveyCmd{Out: filepath.Join(t.TempDir(), "trial.json")}
			err := withNewFile(c.Out, func(file *os.File) error {
				return c.writeResults(streams{&out, &errs}, r, file, func() error {
					require.Contains(t, out.String(), "evenkeel learned no law", "it is told before evenkeel ends")
					return tt.late
				})
			})
			require.Equal(t, tt.fails == "", err == nil)
			if err != nil {
				require.ErrorContains(t, err, tt.fails)
			}
			require.Equal(t, tt.late == nil && !tt.whole, errors.Is(err, errFailed), "the error is printed")
			text, err := os.ReadFile(c.Out)
			require.NoError(t, err)
			require.True(t, json.Valid(text), string(text))
		})
	}
}

// Ctrl-C ends a trial with what was played, and so does a terminal that is gone. Here the signal
// comes with the first request of the second load. evenkeel gives requests ids of its own, so that
// only runs that go straight to the engine are told apart.
func TestATrialThatIsInterrupted(t *testing.T) {
	for _, by := range []syscall.Signal{syscall.SIGINT, syscall.SIGHUP} {
		t.Run(by.String(), func(t *testing.T) { interrupted(t, by) })
	}
}

func interrupted(t *testing.T, by syscall.Signal) {
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, by) // whatever the trial does, it does not end the test
	defer signal.Stop(caught)
	const runs = 1 + 1 + shortPairs + 1 // the question, the one that is not counted, the pairs, and the next
	var mu sync.Mutex
	seen := map[string]bool{}
	addr := bothRoles(t, refengine.Config{Role: refengine.Aggregated, DPSize: 2,
		Hooks: refengine.Hooks{OnRequest: func(_ string, h http.Header) {
			mu.Lock()
			defer mu.Unlock()
			if m := runOf.FindString(h.Get("X-Request-Id")); m != "" && !seen[m] {
				if seen[m] = true; len(seen) == runs {
					_ = syscall.Kill(os.Getpid(), by)
				}
			}
		}}})
	file := filepath.Join(t.TempDir(), "trial.json")
	status, out, errs := line("survey", "--trial", "--short", "--engines", addr, "--slots", "4", "--out", file)
	require.Equal(t, 1, status, errs)
	require.Contains(t, out, "THIS IS NOT THE WHOLE TRIAL: it was ended by a signal")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var r trials.Report
	require.NoError(t, json.Unmarshal(text, &r))
	require.False(t, r.Complete)
	require.Len(t, r.Loads[0].Pairs, shortPairs)
	require.Empty(t, r.Loads[1].Pairs)
}

var runOf = regexp.MustCompile(`^load-[0-9a-f]+-`)
