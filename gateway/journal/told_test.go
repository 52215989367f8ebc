package journal

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
	"evenkeel/internal/logfile"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/policy"
)

// sinks are everything that a journal writes to, but traces.
type sinks struct {
	*Journal
	t        *testing.T
	registry *prometheus.Registry
	file     string
}

func open(t *testing.T) *sinks {
	t.Helper()
	s := &sinks{t: t, registry: prometheus.NewRegistry(), file: filepath.Join(t.TempDir(), "requests.jsonl")}
	var err error
	s.Journal, err = New(Config{File: s.file, Receipts: receipt.NewRing(100, 1<<20), Registerer: s.registry, Buckets: []float64{1},
		Log: zap.NewNop()})
	require.NoError(t, err)
	return s
}

// log is what the request log has by now.
func (s *sinks) log() (all []LogEntry) {
	f, err := os.Open(s.file)
	require.NoError(s.t, err)
	defer func() { _ = f.Close() }()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var one LogEntry
		require.NoError(s.t, json.Unmarshal(lines.Bytes(), &one))
		all = append(all, one)
	}
	return all
}

// series is one of a metric with a label at most; nil: there is none.
func (s *sinks) series(name, label string) *dto.Metric {
	all, err := s.registry.Gather()
	require.NoError(s.t, err)
	for _, family := range all {
		for _, m := range family.GetMetric() {
			if family.GetName() == name && (label == "" || m.GetLabel()[0].GetValue() == label) {
				return m
			}
		}
	}
	return nil
}

func (s *sinks) count(name, label string) float64 {
	return s.series(name, label).GetCounter().GetValue()
}

// observed is how often a time was observed, and their sum in ms.
func (s *sinks) observed(name, label string) (n uint64, sum float64) {
	h := s.series(name, label).GetHistogram()
	return h.GetSampleCount(), math.Round(h.GetSampleSum()*1e6) / 1e3
}

func noHeader(string) string { return "" }

// begin is a request that has just come, as far as its sender is known.
func (s *sinks) begin(id string) *Record {
	r := s.Begin(LogEntry{ID: id, ClientID: "theirs", Key: "k", Arrival: time.Now()})
	r.OpenViews(noHeader, false, mooncake.Chat.Path())
	return r
}

func number(v float64) *float64 { return &v }

// One request whose first engines failed is told by its receipt, its line and the metrics, all from
// the same facts.
func TestAnAttemptThatFailedAndTheNextOneAreToldEverywhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := open(t)
		pass := func(n int) time.Duration {
			took := time.Duration(n) * time.Millisecond
			time.Sleep(took)
			return took
		}
		r := s.begin("r")
		arrived := r.Arrival
		r.Report(Event{Kind: Parsing})
		pass(1)
		r.Report(Event{Kind: Parsed, Req: &openai.Request{Model: "m", Stream: true}})

		r.Report(Event{Kind: Attempted})
		r.Report(Event{Kind: Entered, Phase: Queued})
		r.Report(Event{Kind: Waited, Took: pass(2)})
		r.Report(Event{Kind: Chose,
			Lease: &prefill.Lease{Candidate: prefill.Candidate{ID: "p0"}, Policy: "prefix", HitTokens: 16, Others: 3, Trace: &prefill.Trace{
				Reason: "policy", Eligible: 4, Best: []policy.Row{{Candidate: "p0", Score: number(1.5), Chosen: true}, {Candidate: "p1"}},
			}}})
		r.Report(Event{Kind: Entered, Phase: Prefill})
		r.Report(Event{Kind: Probed, Took: pass(4)})
		r.Report(Event{Kind: Prefilled, Tokens: 100, Cached: 32})
		r.Report(Event{Kind: Entered, Phase: Pooled})
		waited := pass(8)
		weighed := &board.Explanation{Tick: 7, Waiting: 2, KVTokens: 500, Fullest: 900, Able: 3, LowerIsBetter: true}
		weighed.Keep(board.Alternative{Worker: 1, Name: "d1", Score: 0.25, KVTokens: 500, Free: 6}, 1)
		weighed.Keep(board.Alternative{Worker: 2, Name: "d2", Score: 0.75}, 1)
		slot := &dispatcher.Slot{Decide: time.Millisecond, Trace: weighed, Binding: board.Binding{
			Worker: 1, WorkerName: "d1", Group: "g", Policy: "evenkeel", Stage: 2, Score: 0.25, Wait: waited,
		}}
		r.Report(Event{Kind: Placed, Slot: slot, Took: waited})
		require.Nil(t, slot.Trace, "nobody needs them while the answer runs")
		r.Report(Event{Kind: Entered, Phase: Transfer, Call: "decode"})
		pass(16)
		r.Report(Event{Kind: AttemptEnded, Cause: "engine d1: connection reset", Status: 502,
			Answer: openai.NewError(502, "decode_failed", "m")})
		r.Report(Event{Kind: Retried})
		pass(32)

		r.Report(Event{Kind: Attempted})
		local := board.Binding{WorkerName: "d2", Policy: "rr", Stage: 9, NewTokens: 84}
		r.Report(Event{Kind: PlacedLocally, Slot: &dispatcher.Slot{Binding: local}, Tokens: 16})
		r.Report(Event{Kind: Entered, Phase: Prefill})
		pass(64)
		r.Report(Event{Kind: Prefilled, Tokens: 123, Cached: -1, Resumed: true})
		r.Report(Event{Kind: First, At: time.Now(), Sent: time.Now().Add(-64 * time.Millisecond)})
		r.Report(Event{Kind: Entered, Phase: Streaming})
		took := pass(128)
		r.Report(Event{Kind: Relayed, Took: took, Tokens: 11})
		r.Report(Event{Kind: Paced, Took: took, Tokens: 11})
		r.EndAttempt(nil)
		r.End(nil)
		require.NoError(t, s.Close())

		want := LogEntry{
			ID: "r", ClientID: "theirs", Key: "k", Model: "m", Arrival: arrived, Prefill: "p0", Rank: "d2", Policy: "rr",
			PromptTokens: 100, CachedTokens: 32,
			Route: Local, LocalTokens: 84, OutputTokens: 11, ProbeBS: 3, QueueMs: 2, ProbeMs: 4, WaitMs: 8, TransferMs: 64, TTFTMs: 127, Bind: Late,
			TotalMs:  255,
			Attempts: 2, Outcome: "ok",
		}
		lines := s.log()
		require.Len(t, lines, 1)
		require.True(t, arrived.Equal(lines[0].Arrival))
		lines[0].Arrival = arrived
		require.Equal(t, want, lines[0])

		receipts := s.Receipts.Find("r", 1)
		require.Len(t, receipts, 1)
		require.Equal(t, &receipt.Receipt{
			ID: "r", ClientID: "theirs", Model: "m", Key: "k", Endpoint: "/v1/chat/completions", Stream: true, Arrival: arrived,
			State: receipt.Ended, Outcome: "ok",
			Route: Local, PromptTokens: 100, CachedTokens: 32, OutputTokens: 11, TTFT: 127, Total: 255,
			Waits: receipt.Waits{Parse: 1, Queue: 2, Prefill: 68, Pool: 8, Transfer: 16, Relay: 128, Backoff: 32},
			Attempts: []receipt.Attempt{{
				N: 1, At: 1, State: receipt.Ended, Since: 15, Waits: receipt.Waits{Queue: 2, Prefill: 4, Pool: 8, Transfer: 16},
				Cause: "engine d1: connection reset", Status: 502, Again: true,
				Prefill: &receipt.Prefill{Candidate: "p0", Policy: "prefix", Reason: "policy", Eligible: 4, Hit: 16, Prompt: 100, Cached: 32, Ahead: 3,
					Best: []receipt.Choice{{Name: "p0", Score: number(1.5), Chosen: true}, {Name: "p1"}}},
				Decode: &receipt.Decode{Rank: "d1", Group: "g", Policy: "evenkeel", Stage: "subset", Score: 0.25, Decide: 1,
					Tick: 7, Waiting: 2, KVTokens: 500, Fullest: 900, Able: 3, Better: "less",
					Best: []receipt.Choice{{Name: "d1", Score: number(0.25), KVTokens: 500, Free: 6, Chosen: true}, {Name: "d2", Score: number(0.75)}}},
			}, {
				N: 2, At: 63, State: receipt.Ended, Since: 127, Waits: receipt.Waits{Prefill: 64, Relay: 128, Backoff: 32},
				Decode: &receipt.Decode{Rank: "d2", Policy: "rr", Local: 84},
			}},
		}, receipts[0])

		for stage, want := range map[string]float64{"parse": 1, "choose": 2, "probe": 4, "pool_wait": 8, "decide": 1, "transfer": 64,
			"relay": 128} {
			n, sum := s.observed("evenkeel_stage_seconds", stage)
			require.Equal(t, uint64(1), n, stage)
			require.InDelta(t, want, sum, 0.001, stage)
		}
		for name, want := range map[string]float64{"evenkeel_ttft_seconds": 127, "evenkeel_tpot_seconds": 12.8} {
			n, sum := s.observed(name, "")
			require.Equal(t, uint64(1), n, name)
			require.InDelta(t, want, sum, 0.001, name)
		}
		require.InDelta(t, 1, s.count("evenkeel_requests_total", "ok"), 0)
		recent := s.Recent()
		require.Equal(t, []int{1, 1}, []int{recent.TTFT.Samples, recent.TPOT.Samples})
		require.Equal(t, []uint64{1, 0}, []uint64{recent.Ended, recent.Failed})
	})
}

// The ring and the live page know phases by the states of a receipt.
func TestPhasesAreTheStatesOfAReceipt(t *testing.T) {
	require.Equal(t, []Phase{receipt.Queued, receipt.Prefilling, receipt.Pooled, receipt.Transferring}, phases[:4])
}

// A receipt tells which scores are better only where a policy compared the ranks.
func TestAReceiptSaysWhichScoresAreBetter(t *testing.T) {
	of := func(stage uint8, less bool, score float64) *receipt.Decode {
		e := &board.Explanation{LowerIsBetter: less}
		e.Keep(board.Alternative{Worker: 1, Name: "d1", Score: score}, 1)
		return decodeOf(&dispatcher.Slot{Trace: e, Binding: board.Binding{Worker: 1, Stage: stage}})
	}
	best := []receipt.Choice{{Name: "d1", Score: number(2), Chosen: true}}
	require.Equal(t, &receipt.Decode{Stage: "guard", Better: "more", Best: best}, of(0, false, 2))
	require.Equal(t, &receipt.Decode{Stage: "single", Better: "less", Best: best}, of(1, true, 2))
	require.Equal(t, &receipt.Decode{Best: []receipt.Choice{{Name: "d1", Chosen: true}}}, of(3, true, math.NaN()))
}

// A client that leaves is counted where it left, not where its request was ended afterwards, and
// once for all its answers that fail.
func TestAClientThatLeftIsCountedOnceWhereItLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := open(t)
		gone := openai.NewError(StatusClientClosed, "client_closed", "the client left")
		r := s.begin("r")
		r.Report(Event{Kind: Parsed, Req: &openai.Request{Model: "m"}})
		r.Report(Event{Kind: Attempted})
		r.Report(Event{Kind: Entered, Phase: Queued})
		r.Report(Event{Kind: Entered, Phase: Pooled})
		left := time.Now()
		time.Sleep(5 * time.Millisecond)
		r.Report(Event{Kind: Entered, Phase: Transfer, Left: true})
		r.EndAttempt(gone)
		r.EndAttempt(gone)
		r.Report(Event{Kind: Freed, At: left})
		r.End(gone)
		for _, p := range phases {
			want := 0.0
			if p == Pooled {
				want = 1
			}
			require.InDelta(t, want, s.count("evenkeel_cancels_total", string(p)), 0, p)
			n, sum := s.observed("evenkeel_cancel_release_seconds", string(p))
			require.Equal(t, uint64(want), n, p)
			require.InDelta(t, 5*want, sum, 0.001, p)
		}
		got := s.Receipts.Find("r", 1)[0]
		require.Equal(t, []any{"client_closed", 499, "client_closed in phase pooled"}, []any{got.Outcome, got.Status, got.Attempts[0].Cause})
		require.InDelta(t, 1, s.count("evenkeel_requests_total", "client_closed"), 0)
		require.NoError(t, s.Close())
	})
}

// What an engine writes as its code becomes no label and no outcome.
func TestAnEnginesOwnCodeIsNoOutcome(t *testing.T) {
	s := open(t)
	r := s.begin("r")
	r.Report(Event{Kind: Attempted})
	fail := openai.NewError(502, "code of an engine", "m")
	r.EndAttempt(fail)
	r.End(fail)
	require.InDelta(t, 1, s.count("evenkeel_requests_total", "engine_error"), 0)
	got := s.Receipts.Find("r", 1)[0]
	require.Equal(t, []any{"engine_error", 502, "engine_error"}, []any{got.Outcome, got.Status, got.Attempts[0].Cause})
	require.Equal(t, "engine_error", s.log()[0].Outcome)
	require.NoError(t, s.Close())
}

// A request that is passed through, or sent to another region, names where it went.
func TestARequestThatOthersServeNamesThem(t *testing.T) {
	s := open(t)
	r := s.begin("through")
	r.Report(Event{Kind: Attempted})
	r.Report(Event{Kind: Entered, Phase: Transfer, Engine: "e0"})
	r.PromptTokens, r.OutputTokens = 5, 6
	r.End(nil)
	r = s.begin("abroad")
	r.Report(Event{Kind: Attempted})
	r.Report(Event{Kind: Entered, Phase: Transfer, Peer: "eu"})
	r.End(nil)
	through, abroad := s.Receipts.Find("through", 1)[0], s.Receipts.Find("abroad", 1)[0]
	require.Equal(t, []any{Passed, "e0", 5, 6}, []any{through.Route, through.Attempts[0].Engine, through.PromptTokens, through.OutputTokens})
	require.Equal(t, []string{"eu", "eu"}, []string{abroad.Peer, abroad.Attempts[0].Peer})
	lines := s.log()
	require.Equal(t, []string{"e0", "", "", "eu"}, []string{lines[0].Engine, lines[0].Peer, lines[1].Engine, lines[1].Peer})
	require.NoError(t, s.Close())
}

// The legs of a fan-out share a receipt, and the request's facts are their sum.
func TestTheLegsOfARequestAddUp(t *testing.T) {
	s := open(t)
	r := s.begin("r")
	for n, facts := range []LogEntry{
		{PromptTokens: 10, CachedTokens: 4, OutputTokens: 3, ProbeBS: 1, QueueMs: 8, ProbeMs: 9, WaitMs: 1, TransferMs: 5, TTFTMs: 40,
			Attempts: 1, Route: Disaggregated, Prefill: "p0", Rank: "d0"},
		{PromptTokens: 20, OutputTokens: 5, ProbeBS: 2, QueueMs: 3, ProbeMs: 7, WaitMs: 2, TransferMs: 6, TTFTMs: 30, Attempts: 2,
			Inexact: true, Prefill: "p1", Rank: "d1", Bind: AtArrival, BindMs: 2},
		{PromptTokens: 5, TTFTMs: 50, Attempts: 1, LocalTokens: 5, Prefill: "p2", Rank: "d2"},
	} {
		leg := r.Leg(string(rune('a' + n)))
		leg.Report(Event{Kind: Attempted})
		leg.EndAttempt(nil)
		leg.LogEntry = facts
		r.AddLeg(&leg.LogEntry)
	}
	r.End(nil)
	got := r.LogEntry
	got.ID, got.ClientID, got.Key, got.Arrival, got.TotalMs = "", "", "", time.Time{}, 0
	require.Equal(t, LogEntry{
		PromptTokens: 35, CachedTokens: 4, OutputTokens: 8, ProbeBS: 2, QueueMs: 8, ProbeMs: 9, WaitMs: 2, TransferMs: 6, TTFTMs: 30,
		Attempts: 4, Inexact: true, LocalTokens: 5, Route: Disaggregated, BindMs: 2, Prefill: "p2", Rank: "d2", Outcome: "ok",
	}, got)
	legs := ""
	for _, a := range s.Receipts.Find("r", 1)[0].Attempts {
		legs += a.Leg
	}
	require.Equal(t, "abc", legs)
	require.NoError(t, s.Close())
}

// flaky is a disk that is full now and then.
type flaky struct {
	bytes.Buffer
	full bool
}

func (f *flaky) Write(p []byte) (int, error) {
	if f.full {
		return 0, errors.New("no space left on device")
	}
	return f.Buffer.Write(p)
}

// A full disk must not fill the log with a line for each request.
func TestALogThatCannotBeWrittenIsToldOnce(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	disk := &flaky{full: true}
	l := &requestLog{log: zap.New(core), out: logfile.Writer{Log: disk}}
	for range 3 {
		l.writeLine([]byte("{}"), nil)
	}
	require.Equal(t, 1, logs.Len())
	require.Equal(t, zap.ErrorLevel, logs.All()[0].Level)
	disk.full = false
	l.writeLine([]byte(`{"id":"a"}`), nil)
	l.writeLine([]byte(`{"id":"b"}`), nil)
	require.Equal(t, 2, logs.Len())
	require.Equal(t, map[string]any{"lines_lost": int64(3)}, logs.All()[1].ContextMap())
	require.Equal(t, 2, strings.Count(disk.String(), "\n"))
	disk.full = true
	l.writeLine([]byte("{}"), nil)
	require.Equal(t, 3, logs.Len(), "another time is told again")
}

// A proxy may start before the reader of its pipe does. The reader then gets what was written until
// it came.
func TestAPipeNeedsNoReaderYet(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "requests")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	opened := make(chan *requestLog, 1)
	go func() {
		l, err := openRequestLog(fifo, zap.NewNop())
		assert.NoError(t, err)
		opened <- l
	}()
	var l *requestLog
	select {
	case l = <-opened:
	case <-time.After(30 * time.Second):
		reader, err := os.OpenFile(fifo, os.O_RDONLY|syscall.O_NONBLOCK, 0) // ends the wait
		require.NoError(t, err)
		defer reader.Close()
		require.NoError(t, (<-opened).close())
		t.Fatal("the start waits for a reader of the log")
	}
	l.write(&LogEntry{ID: "early"})
	reader, err := os.Open(fifo)
	require.NoError(t, err)
	defer reader.Close()
	require.NoError(t, l.close())
	text, err := io.ReadAll(reader)
	require.NoError(t, err)
	require.Contains(t, string(text), `"early"`)
	require.True(t, bytes.HasSuffix(text, []byte("}\n")))
}

// The reader of a pipe may stand still, as a disk on a network may. Requests must not stand still
// with it.
func TestALogThatStandsStillHoldsNoRequestUp(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "requests")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	reader, err := os.OpenFile(fifo, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	require.NoError(t, err)
	defer reader.Close()
	core, logs := observer.New(zap.InfoLevel)
	l, err := openRequestLog(fifo, zap.New(core))
	require.NoError(t, err)
	const all = 5000 // more than the pipe and the queue hold
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for range all {
			l.write(&LogEntry{ID: strings.Repeat("x", 200)})
		}
	}()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		require.NoError(t, l.closer.Close())
		t.Fatal("requests wait for the reader of the log")
	}
	require.Equal(t, 1, logs.Len(), "what is lost is told once")
	require.Contains(t, logs.All()[0].Message, "the request log cannot be written")

	read := make(chan int64)
	go func() { // the reader goes on
		whole := int64(0)
		for text := bufio.NewScanner(reader); text.Scan(); {
			if json.Valid(text.Bytes()) {
				whole++
			}
		}
		read <- whole
	}()
	require.Eventually(t, func() bool { return logs.Len() == 2 }, 30*time.Second, time.Millisecond)
	lost, ok := logs.All()[1].ContextMap()["lines_lost"].(int64)
	require.True(t, ok)
	require.Greater(t, lost, int64(1000))
	require.NoError(t, l.close())
	require.EqualValues(t, all, <-read+lost, "each line is read or counted")
}

// A disk that is nearly full takes a part of a line, and a proxy that is killed leaves one. The
// lines after it must stay whole.
func TestALineThatWasCutOffSpoilsNoOther(t *testing.T) {
	file := filepath.Join(t.TempDir(), "requests.jsonl")
	require.NoError(t, os.WriteFile(file, []byte(`{"id":"killed","mod`), 0o600))
	l, err := openRequestLog(file, zap.NewNop())
	require.NoError(t, err)
	l.write(&LogEntry{ID: "a"})
	require.NoError(t, l.close())
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	disk := &nearlyFull{Writer: f, full: true}
	l = &requestLog{log: zap.NewNop(), out: logfile.Writer{Log: disk}}
	l.writeLine([]byte(`{"id":"cut"}`), nil)
	disk.full = false
	l.writeLine([]byte(`{"id":"b"}`), nil)
	l.writeLine([]byte(`{"id":"c"}`), nil)
	require.NoError(t, f.Close())
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var whole []string
	for line := range strings.Lines(string(text)) {
		var f LogEntry
		if json.Unmarshal([]byte(line), &f) == nil {
			whole = append(whole, f.ID)
		}
	}
	require.Equal(t, []string{"a", "b", "c"}, whole)
}

// nearlyFull is a disk that has room for ten bytes of each write while it is full.
type nearlyFull struct {
	io.Writer
	full bool
}

func (d *nearlyFull) Write(p []byte) (int, error) {
	if !d.full {
		return d.Writer.Write(p)
	}
	n, _ := d.Writer.Write(p[:10])
	return n, errors.New("no space left on device")
}

func TestTheRequestLogIsAppendedTo(t *testing.T) {
	file := filepath.Join(t.TempDir(), "requests.jsonl")
	for range 2 {
		l, err := openRequestLog(file, zap.NewNop())
		require.NoError(t, err)
		l.write(&LogEntry{})
		require.NoError(t, l.close())
	}
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, 2, strings.Count(string(text), "\n"))
	_, err = New(Config{File: t.TempDir(), Log: zap.NewNop()})
	require.Error(t, err, "a folder is no log")
	none, err := openRequestLog("", nil)
	require.NoError(t, err)
	none.write(&LogEntry{})
	require.NoError(t, none.close())
}
