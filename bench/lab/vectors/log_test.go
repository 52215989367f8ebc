package vectors

import (
	"bytes"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
	"evenkeel/predictor"
)

// TestARecordedRoundIsDecidedTheSameWay: a line of the decision log holds all
// that the live policy saw.
func TestARecordedRoundIsDecidedTheSameWay(t *testing.T) {
	for _, spec := range []string{
		"br0", "br0:max_age_ms=1000,window=3", "brh:horizon=40", "brh:horizon=auto", "pjsq-kv", "evenkeel",
	} {
		t.Run(spec, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "decisions.jsonl")
			record(t, spec, file)
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			rounds := 0
			for line := range strings.Lines(string(text)) {
				var was struct{ Assign [][2]int64 }
				require.NoError(t, json.Unmarshal([]byte(line), &was))
				r, err := Decide([]byte(line), "")
				require.NoError(t, err)
				got := make([][2]int64, len(r.Assignments))
				for i, a := range r.Assignments {
					got[i] = [2]int64{int64(a.Entry), int64(a.Worker)}
				}
				require.Equal(t, was.Assign, got, line)
				rounds++
			}
			require.Greater(t, rounds, 100)
		})
	}
}

// record serves a few hundred requests and logs every round.
func record(t *testing.T, spec, file string) {
	synctest.Test(t, func(t *testing.T) {
		d, err := dispatcher.Start(t.Context(), dispatcher.Config{
			Config: board.Config{
				Policy: spec, Window: board.DefaultWindow, TickLimit: time.Hour,
				Predictor: board.PredictorConfig{Kind: predictor.KindSurvival},
				StepModel: board.StepModel{C0Ms: 20, C1Ms: 1e-3, RequestMs: 0.7},
			},
			DecisionLog: dispatcher.DecisionLogConfig{File: file},
		})
		require.NoError(t, err)
		workers := make([]board.Worker, 4)
		for i := range workers {
			workers[i] = board.Worker{ID: int32(i), Model: "m", Group: "main", Barrier: true, Slots: 4, Capacity: 60_000, Up: true}
		}
		d.SetWorkers(workers)
		rng := rand.New(rand.NewPCG(1, 2))
		type request struct {
			slot   *dispatcher.Slot
			output int
		}
		var waiting []<-chan dispatcher.Result
		var running []request
		for id := uint64(1); id <= 400; id++ {
			if id > 30 {
				time.Sleep(25 * time.Millisecond)
			}
			waiting = append(waiting, d.Enqueue(&pool.Entry{ID: id, Model: "m", Prompt: 100 + rng.IntN(9000)}))
			synctest.Wait()
			waiting = slices.DeleteFunc(waiting, func(c <-chan dispatcher.Result) bool {
				if len(c) == 0 {
					return false
				}
				running = append(running, request{(<-c).Slot, 1 + rng.IntN(60)})
				return true
			})
			running = slices.DeleteFunc(running, func(r request) bool {
				r.slot.Progress(r.slot.Generated() + 1)
				if r.slot.Generated() < r.output {
					return false
				}
				d.Release(r.slot, board.Outcome{Generated: r.output})
				return true
			})
		}
	})
}

func TestALogLineReadsBackAsItWas(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		whole := func(most int32, what string) int32 { return rapid.Int32Range(0, most).Draw(t, what) }
		number := func(what string) float32 { return rapid.Float32Range(0, 1e6).Draw(t, what) }
		s := policy.Snapshot{
			MaxAgeMs: number("guard"), StepMs: number("step"), C0Ms: number("c0"), C1Ms: number("c1"), Budget: whole(4000, "budget"),
			RequestTokens: int64(whole(40_000, "tokens of a request")), RowTokens: int64(whole(40_000, "of the rank with most")),
			Early: rapid.Bool().Draw(t, "early"),
		}
		if s.Aggregated = rapid.Bool().Draw(t, "mixed"); s.Aggregated {
			s.OwnPromptMs, s.NotStarted, s.PromptRate = number("own"), number("unbegun"), number("rate")
			s.RequestTokens = int64(whole(1<<20, "request"))
		}
		slot := int32(0)
		for id := range whole(3, "workers") {
			w := policy.Worker{ID: id * 3, Free: whole(9, "free") - 4, Up: rapid.Bool().Draw(t, "up"), Capacity: int64(whole(1<<30, "capacity")),
				Cost: rapid.Float32Range(0, 1000).Draw(t, "cost")}
			for range whole(4, "running") {
				w.Running = append(w.Running, policy.Request{
					Prompt: whole(1<<20, "prompt"), Generated: whole(1<<20, "generated"), Age: whole(1<<20, "age"), Rhat: number("rhat"),
					Key: rapid.Uint64().Draw(t, "key"), ID: rapid.Uint64().Draw(t, "id"), Slot: slot,
				})
				slot++
			}
			if n := len(w.Running); n > 0 && rapid.Bool().Draw(t, "strays") {
				q := &w.Running[n-1]
				q.KVElsewhere = whole(q.Prompt+q.Generated, "away")
			}
			if s.Aggregated {
				w.Backlog = int64(whole(1<<30, "backlog"))
			}
			s.Workers = append(s.Workers, w)
		}
		for id := range whole(4, "pool") {
			s.Pool = append(s.Pool, policy.Entry{
				ID: uint64(id) + 1<<63, Prompt: whole(1<<20, "prompt"), Age: whole(1<<20, "age"), WaitMs: number("wait"),
				Urgent: rapid.Bool().Draw(t, "urgent"), Express: rapid.Bool().Draw(t, "express"), Key: rapid.Uint64().Draw(t, "key"),
			})
			if s.Aggregated {
				var e policy.EntryDetails
				e.HeldMs, e.UrgentInMs = -1, rapid.Float64Range(0, 1e9).Draw(t, "urgent in")
				if rapid.Bool().Draw(t, "held") {
					e.HeldMs = rapid.Float64Range(0, 1e9).Draw(t, "ms")
				}
				for rank := range whole(2, "hits") {
					e.Hits = append(e.Hits, policy.Hit{Worker: 3*rank + whole(2, "rank"), Tokens: int(whole(1<<20, "tokens"))})
				}
				s.Waits = append(s.Waits, e)
			}
		}
		outputs := rapid.SliceOfN(rapid.Int32Range(1, 1<<16), 0, 9).Draw(t, "outputs")
		slices.Sort(outputs)
		line := dispatcher.LogLine{
			Tick: 1, Group: rapid.String().Draw(t, "group"), Policy: "br0", Snapshot: &s, Outputs: outputs,
			Assign: []policy.Assignment{{Entry: 1, Worker: 2}},
		}
		got, params, err := ReadSnapshot(line.AppendJSON(nil))
		require.NoError(t, err)
		require.Equal(t, "br0", params.Policy)
		if len(outputs) > 0 {
			require.Equal(t, predictor.NewSurvival(outputs).MeanOutput(), got.MeanOutput)
			got.MeanOutput = 0
		}
		require.Equal(t, s, got)
	})
}

// Whatever a snapshot holds, the line that the decision log makes of it is one
// line of JSON and reads back as the same snapshot.
func FuzzLogLine(f *testing.F) {
	f.Add([]byte(snapshot), "main", uint64(7), uint64(3), int32(1))
	f.Add([]byte(saturated), "a \"group\"\n", uint64(0), uint64(1)<<63, int32(-1))
	f.Add([]byte(`{"workers":[{"id":1,"up":false,"cost":1e-30,"running":[{"id":18446744073709551615,"age":-1,"rhat":0.1,"slot":0,"key":9}]}],"pool":[{"id":1,"prompt":2,"urgent":true,"age_ms":3e38}]}`), "\xff", uint64(1), uint64(1), int32(1))
	f.Fuzz(func(t *testing.T, data []byte, group string, tick, entry uint64, worker int32) {
		s, _, err := ReadSnapshot(data)
		if err != nil || math.IsInf(float64(s.MaxAgeMs), 0) { // no policy has an age that JSON cannot say
			return
		}
		s.MeanOutput = 0 // the outputs stand beside it
		l := dispatcher.LogLine{
			Tick: tick, TimeMs: -1, Group: group, Policy: "br0", Snapshot: &s, Outputs: []int32{1, 5},
			Assign: []policy.Assignment{{Entry: entry, Worker: worker}},
		}
		line := l.AppendJSON(nil)
		require.Equal(t, len(line)-1, bytes.IndexByte(line, '\n'), "%q", line)
		back, p, err := ReadSnapshot(line)
		require.NoError(t, err, "%s", line)
		require.Equal(t, "br0", p.Policy)
		require.EqualValues(t, 3, back.MeanOutput)
		back.MeanOutput = 0
		require.Equal(t, s, back, "%s", line)
		var was struct {
			Tick   uint64
			Assign [][2]json.Number
		}
		require.NoError(t, json.Unmarshal(line, &was))
		require.Equal(t, tick, was.Tick)
		require.Equal(t, [][2]json.Number{{json.Number(strconv.FormatUint(entry, 10)), json.Number(strconv.Itoa(int(worker)))}}, was.Assign)
	})
}
