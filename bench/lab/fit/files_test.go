package fit

import (
	"compress/gzip"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

// logLine is a line of the request log with what tests vary.
type logLine struct {
	at               time.Duration
	model, prefill   string
	prompt, cached   int
	output, probeBS  int
	probeMs, totalMs float64
	attempts         int
	outcome, key     string
}

var start = time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)

func (l logLine) String() string {
	key := ""
	if l.key != "" {
		key = fmt.Sprintf(`"prompt_key":%q,`, l.key)
	}
	return fmt.Sprintf(`{"id":"x","model":%q,"key":"team",%s"arrival":%q,"prefill":%q,"rank":"d0","policy":"br0","prompt_tokens":%d,"cached_tokens":%d,`+
		`"output_tokens":%d,"probe_bs":%d,"probe_ms":%v,"wait_ms":1,"transfer_ms":1,"ttft_ms":1,"total_ms":%v,"attempts":%d,"outcome":%q}`,
		l.model, key, start.Add(l.at).Format(time.RFC3339Nano), l.prefill, l.prompt, l.cached, l.output, l.probeBS, l.probeMs, l.totalMs,
		l.attempts, l.outcome)
}

func joined(lines []logLine) string {
	var b strings.Builder
	for _, l := range lines {
		b.WriteString(l.String() + "\n")
	}
	return b.String()
}

func TestRequestLog(t *testing.T) {
	late := logLine{at: time.Second, model: "m", prefill: "p0", prompt: 100, cached: 40, output: 7, probeBS: 2, probeMs: 12.5, totalMs: 1500,
		attempts: 1, outcome: "ok", key: "00000000000000ff"}
	early := logLine{model: "m", prompt: 10, outcome: "queue_full"}
	log, err := ReadRequestLog(write(t, "log", joined([]logLine{late, early})))
	require.NoError(t, err)
	require.Equal(t, []Request{
		{Model: "m", Arrival: start, Finished: start, Outcome: "queue_full", Prompt: 10},
		{Model: "m", Prefill: "p0", Arrival: start.Add(time.Second), Finished: start.Add(2500 * time.Millisecond), Key: 255, Outcome: "ok",
			Prompt: 100, Cached: 40, Output: 7, Attempts: 1, ProbeBS: 2, ProbeMs: 12.5},
	}, log.Requests, "in order of arrival, whatever the order of the lines")
	require.False(t, log.Cut)
}

func TestALineThatIsBeingWrittenIsLeftOut(t *testing.T) {
	whole := logLine{outcome: "ok", output: 1, attempts: 1}.String()
	for _, tc := range []struct {
		name, text string
		lines      int
		cut        bool
	}{
		{"a line cut in the middle", whole + "\n" + whole[:40], 1, true},
		{"a whole line without its newline", whole + "\n" + whole, 2, false},
		{"an empty line at the end", whole + "\n\n", 1, false},
		{"lines as Windows ends them", whole + "\r\n" + whole + "\r\n", 2, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			log, err := ReadRequestLog(write(t, "log", tc.text))
			require.NoError(t, err)
			require.Len(t, log.Requests, tc.lines)
			require.Equal(t, tc.cut, log.Cut)
		})
	}
}

func TestALogThatCannotBeRead(t *testing.T) {
	good := logLine{outcome: "ok", output: 1, attempts: 1}.String() + "\n"
	for _, tc := range []struct{ name, text, says string }{
		{"an empty file", "", "no requests; serve --request-log FILE"},
		{"a line cut before the last", good[:30] + "\n" + good, "log:1: not a line of evenkeel's request log"},
		{"another kind of line", good + `{"timestamp":0,"input_length":5,"output_length":6}` + "\n", "log:2: not a line of evenkeel's request log: it has arrival"},
		{"a number that is none", good + strings.Replace(good, `"output_tokens":1`, `"output_tokens":"1"`, 1), "log:2: not a line of evenkeel's request log: json"},
		{"a negative number", strings.Replace(good, `"output_tokens":1`, `"output_tokens":-1`, 1), "log:1: a negative number"},
		{"an answer longer than any", strings.Replace(good, `"output_tokens":1`, `"output_tokens":2000000000`, 1), "more than 1073741824 tokens"},
		{"a key that is none", logLine{outcome: "ok", key: "team-a"}.String() + "\n", `prompt_key is "team-a"; it is 16 hex digits`},
		{"gzip that is damaged", "\x1f\x8b garbage", "the file is damaged, or not gzip"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := ReadRequestLog(write(t, "log", tc.text))
			require.ErrorContains(t, err, tc.says)
		})
	}
	_, err := ReadRequestLog(filepath.Join(t.TempDir(), "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestALogMayBeGzipped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.gz")
	f, err := os.Create(path)
	require.NoError(t, err)
	z := gzip.NewWriter(f)
	_, err = fmt.Fprintln(z, logLine{outcome: "ok", output: 1, attempts: 1})
	require.NoError(t, err)
	require.NoError(t, z.Close())
	require.NoError(t, f.Close())
	log, err := ReadRequestLog(path)
	require.NoError(t, err)
	require.Len(t, log.Requests, 1)
}

func FuzzLines(f *testing.F) {
	f.Add(logLine{outcome: "ok", key: "00000000000000ff"}.String())
	f.Add(`{"t_ms":1.5,"group":"main","rank":0,"step":1,"running":1,"kv_tokens":49}`)
	f.Add(`{"tick":7,"t_ms":12,"group":"main","in":{"workers":[{"id":3,"running":[{"prompt":5,"generated":2}]}]},"assign":[[3,10]]}`)
	f.Add(`{"arrival":"2026-11-20T10:00:00Z","prompt_tokens":null,"output_tokens":1,"outcome":"ok"}`)
	f.Fuzz(func(t *testing.T, line string) {
		if r, err := requestLine([]byte(line)); err == nil {
			require.False(t, r.Prompt < 0 || r.Output < 0 || r.Arrival.IsZero(), "a request nobody could learn from: %+v", r)
		}
		if _, l, err := stepLine([]byte(line)); err == nil {
			require.False(t, l.Rank < 0 || l.KVTokens < 0 || l.At < 0, "a load that cannot be: %+v", l)
		}
		if _, k, err := tickLine([]byte(line)); err == nil {
			require.NotNil(t, k.loads)
		}
	})
}
