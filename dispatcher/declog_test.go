package dispatcher

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// logged is a line of the decision log as a stranger reads it.
type logged struct {
	Tick   uint64
	TimeMs int64 `json:"t_ms"`
	Group  string
	In     struct {
		Policy  string
		Workers []struct {
			ID       int32
			Capacity int64 `json:"capacity_tokens"`
			Running  []struct{ Prompt, Generated int32 }
		}
		Pool    []struct{ ID uint64 }
		Outputs []int32
	}
	Assign [][2]int64
}

func readLog(t *testing.T, path string) (lines []logged) {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		var l logged
		require.NoError(t, json.Unmarshal([]byte(line), &l), line)
		lines = append(lines, l)
	}
	return lines
}

func TestEveryRoundIsInTheDecisionLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := realConfig("br0")
		cfg.DecisionLog.File = filepath.Join(t.TempDir(), "decisions.jsonl")
		d := start(t, cfg)
		d.SetWorkers(ranks(2, 1, 500))
		a := <-d.Enqueue(&pool.Entry{ID: 11, Model: "m", Prompt: 100})
		time.Sleep(time.Second)
		a.Slot.Progress(7)
		<-d.Enqueue(&pool.Entry{ID: 12, Model: "m", Prompt: 50})
		d.Enqueue(&pool.Entry{ID: 13, Model: "m", Prompt: 9}) // no slot is free: no round
		synctest.Wait()
		lines := readLog(t, cfg.DecisionLog.File)
		require.Len(t, lines, 2)
		first, second := lines[0], lines[1]
		require.Equal(t, [][2]int64{{11, 0}}, first.Assign)
		require.Equal(t, [][2]int64{{12, 1}}, second.Assign)
		require.EqualValues(t, 1, first.Tick)
		require.EqualValues(t, 1000, second.TimeMs-first.TimeMs)
		require.Equal(t, "main", second.Group)
		require.Equal(t, "br0", second.In.Policy)
		require.Len(t, second.In.Workers, 2)
		require.EqualValues(t, 7, second.In.Workers[0].Running[0].Generated)
		require.EqualValues(t, 500, second.In.Workers[0].Capacity)
		require.EqualValues(t, 12, second.In.Pool[0].ID)
		require.Empty(t, second.In.Outputs, "br0 reads no table")
	})
}

func TestTheLogHasTheTableThePolicySaw(t *testing.T) {
	cfg := realConfig("evenkeel")
	h := newHand(t, cfg)
	var err error
	file := filepath.Join(t.TempDir(), "log")
	h.declog, err = openDecisionLog(DecisionLogConfig{File: file}, h.cfg.Log, h.metrics)
	require.NoError(t, err)
	h.fleet(ranks(2, 5, 0))
	h.put(pool.Entry{}).slotNow(t)
	h.teach(lengths(60))
	h.put(pool.Entry{}).slotNow(t)
	for range 2 {
		h.declog.write(<-h.declog.queue)
	}
	lines := readLog(t, file)
	require.Empty(t, lines[0].In.Outputs)
	require.Len(t, lines[1].In.Outputs, 60)
	require.NoError(t, h.declog.file.Close())
}

func TestTheDecisionLogIsBounded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "log")
	require.NoError(t, os.WriteFile(file, []byte(strings.Repeat("x", 90)+"\n"), 0o600), "what is there stays")
	m := newMetrics()
	l, err := openDecisionLog(DecisionLogConfig{File: file, MaxBytes: 2000}, testConfig().withDefaults().Log, m)
	require.NoError(t, err)
	for range 200 {
		require.NoError(t, l.append([]byte(strings.Repeat("y", 99)+"\n")))
	}
	sizes := int64(0)
	for _, name := range []string{file, file + ".1"} {
		info, err := os.Stat(name)
		require.NoError(t, err)
		require.LessOrEqual(t, info.Size(), int64(1000))
		sizes += info.Size()
	}
	require.Greater(t, sizes, int64(1000))
	files, err := os.ReadDir(filepath.Dir(file))
	require.NoError(t, err)
	require.Len(t, files, 2)
	require.NoError(t, l.file.Close())
}

func TestRoundsThatCannotBeWrittenAreCounted(t *testing.T) {
	h := newHand(t, testConfig())
	var err error
	dir := filepath.Join(t.TempDir(), "sub")
	require.NoError(t, os.Mkdir(dir, 0o700))
	h.declog, err = openDecisionLog(DecisionLogConfig{File: filepath.Join(dir, "log"), MaxBytes: 100}, h.cfg.Log, h.metrics)
	require.NoError(t, err)
	h.fleet(ranks(1, 99, 0))
	for range maxQueuedRounds + 2 {
		h.put(pool.Entry{}).slotNow(t)
	}
	require.EqualValues(t, 2, count(t, h.metrics.roundsDropped), "the queue is full")
	h.declog.write(<-h.declog.queue)
	require.NoError(t, os.RemoveAll(dir)) // the next rotation fails
	for len(h.declog.queue) > 0 {
		h.declog.write(<-h.declog.queue)
	}
	require.EqualValues(t, maxQueuedRounds-1, count(t, h.metrics.logFailures))
	require.NoError(t, os.Mkdir(dir, 0o700))
	h.put(pool.Entry{}).slotNow(t)
	h.declog.write(<-h.declog.queue)
	require.Len(t, readLog(t, filepath.Join(dir, "log")), 1, "it goes on where it can again")
	require.NoError(t, h.declog.file.Close())
}

// A process may die while it writes, and a disk may be full in the middle of a line. The lines
// after it can be read all the same.
func TestALineThatWasWrittenInPartSpoilsNoOther(t *testing.T) {
	const whole = `{"tick":1}` + "\n"
	long := `{"tick":2,"` + strings.Repeat("x", 200<<10)
	for part, stays := range map[string]bool{"": false, `{"ti`: false, `{"tick":2`: false, long: false, "no line of ours": true} {
		for _, before := range []string{"", whole} {
			file := filepath.Join(t.TempDir(), "log")
			require.NoError(t, os.WriteFile(file, []byte(before+part), 0o600))
			l, err := openDecisionLog(DecisionLogConfig{File: file}, testConfig().withDefaults().Log, newMetrics())
			require.NoError(t, err)
			require.NoError(t, l.append([]byte(whole)))
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			if stays {
				require.Equal(t, before+part+"\n"+whole, string(text))
			} else {
				require.Equal(t, before+whole, string(text))
			}
			require.EqualValues(t, len(text), l.size)

			full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
			require.NoError(t, err)
			require.NoError(t, l.file.Close())
			l.file = full
			require.Error(t, l.append([]byte(whole)))
			require.NoError(t, os.WriteFile(file, []byte(whole+`{"ti`), 0o600), "as if a part of the line had been written")
			require.NoError(t, l.append([]byte(whole)))
			text, err = os.ReadFile(file)
			require.NoError(t, err)
			require.Equal(t, whole+whole, string(text))
			require.NoError(t, l.file.Close())
		}
	}
}

// A pipe may have no reader, or one that stands still. Neither the start nor the end of the proxy
// waits for it.
func TestADecisionLogMayBeAPipeThatNobodyReads(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, syscall.Mkfifo(file, 0o600))
	l, err := openDecisionLog(DecisionLogConfig{File: file}, testConfig().withDefaults().Log, newMetrics())
	require.NoError(t, err)
	defer func() { require.NoError(t, l.file.Close()) }()
	line := []byte(`{"tick":1,"` + strings.Repeat("x", 40<<10) + "\n")
	require.NoError(t, l.append(line))
	require.ErrorIs(t, l.append(line), os.ErrDeadlineExceeded, "the pipe is full")
	info, err := os.Lstat(file)
	require.NoError(t, err)
	require.NotZero(t, info.Mode()&os.ModeNamedPipe, "it is not moved away")
}

func TestADecisionLogThatCannotBeOpenedStopsTheStart(t *testing.T) {
	cfg := testConfig()
	cfg.DecisionLog.File = filepath.Join(t.TempDir(), "missing", "log")
	_, err := Start(t.Context(), cfg)
	require.ErrorContains(t, err, "decision log")
	cfg.DecisionLog = DecisionLogConfig{File: filepath.Join(t.TempDir(), "log"), MaxBytes: -1}
	_, err = Start(t.Context(), cfg)
	require.ErrorContains(t, err, "-1 bytes")
}

func TestALineSaysWhatTheSnapshotSaid(t *testing.T) {
	line := LogLine{
		Tick: 3, TimeMs: 1700, Group: `a"b`, Policy: "br0:window=4",
		Snapshot: &policy.Snapshot{
			MaxAgeMs: 30000, StepMs: 61.5, C0Ms: 55, C1Ms: 2e-4, Budget: 4000,
			Workers: []policy.Worker{
				{ID: 0, Free: -1, Capacity: 9000, Cost: 1.5, Running: []policy.Request{
					{Prompt: 10, Generated: 2, Age: 2, ID: 5}, {Prompt: 70, Generated: 1, Age: 61, Rhat: 12.25, Key: 1 << 63, ID: 6, Slot: 4}, {Prompt: 8, ID: 7, Slot: 5},
				}, Up: true},
				{ID: 3},
			},
			Pool: []policy.Entry{{ID: 8, Prompt: 4}, {ID: 9, Prompt: 5, Age: 7, WaitMs: 1.5, Urgent: true, Key: 2}},
		},
		Outputs: []int32{4, 4, 90}, Assign: []policy.Assignment{{Entry: 8, Worker: 3}, {Entry: 9, Worker: 0}},
	}
	require.Equal(t, `{"tick":3,"t_ms":1700,"group":"a\"b","in":{"policy":"br0:window=4","max_age_ms":30000,"step_ms":61.5,"c0_ms":55,"c1_ms":0.0002,"budget":4000,`+
		`"workers":[{"id":0,"free":-1,"capacity_tokens":9000,"cost":1.5,"running":[{"id":5,"prompt":10,"generated":2,"slot":0},`+
		`{"id":6,"prompt":70,"generated":1,"age":61,"rhat":12.25,"key":9223372036854775808,"slot":4},{"id":7,"prompt":8,"generated":0,"slot":5}]},{"id":3,"free":0,"up":false,"capacity_tokens":0,"running":[]}],`+
		`"pool":[{"id":8,"prompt":4,"age_ms":0},{"id":9,"prompt":5,"age":7,"age_ms":1.5,"urgent":true,"key":2}],"outputs":[4,4,90]},"assign":[[8,3],[9,0]]}`+"\n",
		string(line.AppendJSON(nil)))
}
