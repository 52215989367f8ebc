//go:build linux

package main

import (
	"encoding/gob"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/testbed"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const streamHead = "HTTP/1.1 200 OK\r\nserver: x\r\nTransfer-Encoding: chunked\r\n\r\n"

// chunked is a body as HTTP sends it, each part a chunk.
func chunked(parts ...string) (s string) {
	for _, p := range append(parts, "") {
		s += fmt.Sprintf("%x\r\n%s\r\n", len(p), p)
	}
	return s
}

func TestAnAnswerIsTheSameHoweverItIsCut(t *testing.T) {
	text := streamHead + chunked("data: {\"a\":1}\n\n: nothing\n\ndata: {\"a\"", ":2}\n", "\n", "data: [DONE]\n\n")
	for size := 1; size <= len(text); size++ {
		var a answer
		events := 0
		for rest := text; rest != ""; {
			n := min(size, len(rest))
			got, err := a.feed([]byte(rest[:n]))
			require.NoError(t, err)
			events += got
			rest = rest[n:]
		}
		require.Equal(t, 3, events, "pieces of %d bytes", size)
		require.NoError(t, a.whole(2))
	}
}

func TestAnAnswerThatIsNotWholeIsSeen(t *testing.T) {
	one, done := "data: {}\n\n", "data: [DONE]\n\n"
	for _, x := range []struct{ what, text, err string }{
		{"a refusal", "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nfull", "status 503: full"},
		{"no stream", "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "an answer in one piece: {}"},
		{"an end before the last chunk", streamHead + strings.TrimSuffix(chunked(one, one, done), "0\r\n\r\n"), "cut off after 3 of 2 events"},
		{"no [DONE]", streamHead + chunked(one, one), "no [DONE] after 2 of 2 events"},
		{"an event too few", streamHead + chunked(one, done), "1 of 2 events"},
		{"an event too many", streamHead + chunked(one, one, one, done), "3 of 2 events"},
		{"an event behind [DONE]", streamHead + chunked(one, done, one), "an error as an event, after 3 of 2"},
		{"an error as an event", streamHead + chunked(one, "data: {\"error\":{}}\n\n", done), "an error as an event, after 3 of 2"},
		{"no size", streamHead + "x\r\n", `no size of a chunk: "x\r\n"`},
		{"bytes behind the end", streamHead + chunked(one, one, done) + "HTTP", `bytes behind the end: "HTTP"`},
	} {
		var a answer
		_, err := a.feed([]byte(x.text))
		if err == nil {
			err = a.whole(2)
		}
		require.EqualError(t, err, x.err, x.what)
	}
}

func FuzzAnswer(f *testing.F) {
	f.Add(streamHead+chunked("data: {}\n\n", "data: [DONE]\n\n"), 7)
	f.Fuzz(func(t *testing.T, text string, cut int) {
		var whole, parts answer
		events, err := whole.feed([]byte(text))
		if err != nil { // how much was read by then depends on the cut
			return
		}
		at := max(0, min(cut, len(text)))
		first, err1 := parts.feed([]byte(text[:at]))
		second, err2 := parts.feed([]byte(text[at:]))
		require.NoError(t, err1)
		require.NoError(t, err2)
		require.Equal(t, events, first+second)
		require.Equal(t, whole.whole(events-1), parts.whole(events-1))
	})
}

// engineOf starts a reference engine of a role.
func engineOf(t *testing.T, role refengine.Role) (e *refengine.Engine, at []string) {
	e, err := refengine.Start(refengine.Config{Role: role, Steps: refengine.Steps{C0: 5 * time.Millisecond, FirstAtOnce: true}, Slots: 64,
		Prompts: refengine.Prompts{Base: time.Nanosecond}})
	require.NoError(t, err)
	t.Cleanup(e.Close)
	return e, addresses(e.URLs()[:1])
}

// clientsOf runs a job against a reference engine, gives it orders once all streams
// are there, and returns what it tells.
func clientsOf(t *testing.T, j Job, orders ...Order) (all []Told) {
	if len(j.Targets) == 0 {
		_, j.Targets = engineOf(t, refengine.Both)
	}
	wake, err := unix.Eventfd(0, unix.EFD_NONBLOCK)
	require.NoError(t, err)
	t.Cleanup(func() { _ = unix.Close(wake) })
	in, out := io.Pipe()
	told := gob.NewDecoder(in)
	c, ended, given := &client{job: j, say: gob.NewEncoder(out)}, make(chan error), make(chan Order, len(orders))
	go func() { ended <- c.run(wake, given) }()
	for {
		var x Told
		require.NoError(t, told.Decode(&x))
		if all = append(all, x); x.Result != nil {
			require.NoError(t, <-ended)
			return all
		}
		if len(orders) > 0 {
			given <- orders[0]
			if orders = orders[1:]; len(orders) > 0 && orders[0] == stop { // is not answered
				given <- stop
				orders = orders[1:]
			}
			_, err := unix.Write(wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
			require.NoError(t, err)
		}
	}
}

func TestClientsHaveAllStreamsAtOnce(t *testing.T) {
	all := clientsOf(t, Job{Streams: 20, Rate: 1000, Prompt: 8, Lasts: 300 * time.Millisecond, Step: 5 * time.Millisecond}, mark, mark)
	require.Len(t, all, 4, "all are there, two marks, the end")
	require.GreaterOrEqual(t, all[0].Events, int64(20))
	require.Empty(t, all[3].Result.Failed)
	require.Equal(t, 20, all[3].Result.Whole)
	require.Len(t, all[3].Result.TTFT, 20)
}

func TestClientsAskAgainOnTheSameConnection(t *testing.T) {
	all := clientsOf(t, Job{Streams: 3, Rate: 1000, Prompt: 8, Tokens: 4}, mark, mark, stop)
	r := all[len(all)-1].Result
	require.Empty(t, r.Failed)
	require.GreaterOrEqual(t, r.Whole, 3)
}

func TestClientsAskAtTheirTurns(t *testing.T) {
	c, now := &client{}, time.Now()
	for i, ms := range []int{30, 10, 20} {
		c.asksAt(i, now.Add(time.Duration(ms)*time.Millisecond))
	}
	var order []int
	for _, x := range c.later {
		order = append(order, x.stream)
	}
	require.Equal(t, []int{1, 2, 0}, order, "the earliest stands first")

	all := clientsOf(t, Job{Streams: 3, Rate: 1000, Prompt: 8, Tokens: 1, Every: time.Hour}, mark, mark, stop)
	r := all[len(all)-1].Result
	require.Empty(t, r.Failed)
	require.Equal(t, 3, r.Whole, "no stream asks again before its turn")
}

func TestAConnectionThatEndsBetweenTwoRequestsIsNoFailure(t *testing.T) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	require.NoError(t, err)
	require.NoError(t, unix.Close(ends[1]))
	c := &client{streams: []stream{{conn: conn{fd: ends[0]}, prompt: conn{fd: -1}, answer: answer{at: atEnd}, waits: true}}, live: 1}
	c.asksAt(0, time.Now().Add(time.Hour))
	c.read(0)
	require.Empty(t, c.result.Failed)
	require.Zero(t, c.live)
	require.Equal(t, -1, c.streams[0].fd)
	require.Len(t, c.later, 1, "it connects at its turn")
	require.NoError(t, c.obey(stop))
	require.Zero(t, c.live, "what is closed is not closed again")
}

func TestClientsMakeBothRequestsThemselves(t *testing.T) {
	for _, x := range []struct {
		what string
		job  Job
		give []Order
	}{
		{"one answer a stream", Job{Streams: 20, Rate: 1000, Prompt: 8, Lasts: 300 * time.Millisecond, Step: 5 * time.Millisecond}, []Order{mark, mark}},
		{"one after the other on the same connections", Job{Streams: 3, Rate: 1000, Prompt: 8, Tokens: 4}, []Order{mark, mark, stop}},
	} {
		decodes, at := engineOf(t, refengine.Decode)
		prefills, first := engineOf(t, refengine.Prefill)
		x.job.Targets, x.job.Prefill = at, first
		all := clientsOf(t, x.job, x.give...)
		r := all[len(all)-1].Result
		require.Empty(t, r.Failed, x.what)
		require.GreaterOrEqual(t, r.Whole, x.job.Streams, x.what)
		d, p := decodes.Stats(), prefills.Stats()
		require.Equal(t, make([]int64, 4), []int64{d.LocalPrefills, d.Unknown, d.KeyMismatches, p.Leaks},
			"%s: what is decoded was prefilled there", x.what)
		require.GreaterOrEqual(t, p.Probes, int64(r.Whole), x.what)
	}
}

func TestAHandOffIsReadHoweverItIsCut(t *testing.T) {
	answer := "HTTP/1.1 200 OK\r\ncontent-length: 39\r\n\r\n{\"id\":\"x\",\"kv_transfer_params\":{\"a\":1}}"
	for n := range len(answer) {
		params, err := handOff([]byte(answer[:n]))
		require.NoError(t, err)
		require.Nil(t, params)
	}
	params, err := handOff([]byte(answer))
	require.NoError(t, err)
	require.JSONEq(t, `{"a":1}`, string(params))
	for _, x := range []struct{ text, err string }{
		{"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull", "HTTP/1.1 503 Busy: full"},
		{"HTTP/1.1 200 OK\r\n\r\n{}", "an answer without a length"},
		{"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "an answer without kv_transfer_params"},
		{"HTTP/1.1 200 OK\r\nContent-Length: 27\r\n\r\n{\"kv_transfer_params\":null}", "an answer without kv_transfer_params"},
	} {
		_, err := handOff([]byte(x.text))
		require.EqualError(t, err, x.err)
	}
}

func TestUsageIsThatOfAProcessAndWhatItStarted(t *testing.T) {
	cmd := exec.Command("sh", "-c", "sleep 60 & echo; wait")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL); _ = cmd.Wait() })
	_, err = out.Read(make([]byte, 1))
	require.NoError(t, err)
	list := family(cmd.Process.Pid)
	require.Len(t, list, 2)
	cpu, err := usedBy(list)
	require.NoError(t, err)
	require.Positive(t, cpu)
	require.Positive(t, testbed.RSS(list...))
	_, err = used(1<<22 - 1)
	require.ErrorContains(t, err, "the CPU clock of process 4194303")
}

func TestAProxyHasCoresOfItsOwnWhereThereAreEnough(t *testing.T) {
	for _, x := range []struct {
		all         cores
		n           int
		proxy, rest cores
	}{
		{cores{0, 1}, 1, cores{1}, cores{0}},
		{cores{0, 1}, 2, cores{0, 1}, cores{0, 1}},
		{cores{0, 1, 4, 5}, 2, cores{4, 5}, cores{0, 1}},
		{cores{3}, 2, cores{3}, cores{3}},
	} {
		proxy, rest := share(x.all, x.n)
		require.Equal(t, x.proxy, proxy)
		require.Equal(t, x.rest, rest)
	}
}

func TestARowIsRunWithTheStreamsThatItNamesOrNotAtAll(t *testing.T) {
	many := rows[slices.IndexFunc(rows, func(r row) bool { return r.name == "9500" })]
	require.Equal(t, 19_600, many.files())
	var said strings.Builder
	b := &bench{options: options{out: &said}, files: 4_096, cores: cores{0}}
	s := &store{}
	require.NoError(t, b.row(t.Context(), many, 1, nil, s))
	require.Contains(t, said.String(), "not run: a proxy needs 19,600 files for it, and a process may open 4,096; raise the limit (ulimit -n)")
	require.Empty(t, s.samples)
	said.Reset()
	s.write(&said, b)
	require.Contains(t, said.String(), "The row of 9,500 streams was not run: a proxy needs 19,600 files for it.")
	require.NotContains(t, said.String(), "The row of 1,000 streams was not run")
}

func TestARowNamesItsRegime(t *testing.T) {
	var titles []string
	for _, r := range rows {
		titles = append(titles, r.title())
	}
	require.Equal(t, []string{
		"100, 2,500 chunks/s, in steps",
		"1,000, 20,000 chunks/s, in steps",
		"4,000, 20,000 chunks/s, in steps",
		"9,500, 20,000 chunks/s, in steps",
		"2,000, 20,000 chunks/s, in steps, 100 tokens per answer",
		"100, 2,500 chunks/s, spread, 64 tokens per answer",
		"1,000, 20,000 chunks/s, spread, 96 tokens per answer",
		"2,000, 20,000 chunks/s, spread, 96 tokens per answer",
		"64, unpaced",
		"32, one token each, one after the other",
		"100, one token each, 400 requests/s, spread",
	}, titles)
	for _, a := range aims {
		require.Regexp(t, "in steps|spread|unpaced|one after the other", a.what)
	}
}

func TestNginxTakesItsConfig(t *testing.T) {
	config := nginxConfig("127.0.0.1:8000", place{decode: []string{"http://127.0.0.21:1", "http://127.0.0.21:2"}, on: cores{0, 1, 2, 3}},
		20_000)
	require.Contains(t, config, "worker_processes 4;")
	require.Contains(t, config, "    server 127.0.0.21:2;\n")
	require.Contains(t, config, "listen 127.0.0.1:8000 backlog=4096 reuseport;")
	path, err := exec.LookPath("nginx")
	if err != nil {
		t.Skip("nginx is not installed")
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "nginx.conf")
	require.NoError(t, os.WriteFile(file, []byte(config), 0o600))
	said, err := exec.Command(path, "-t", "-c", file, "-p", dir).CombinedOutput()
	require.NoError(t, err, string(said))
}

// sitting is a store of two rounds, in which evenkeel costs so many times nginx.
func sitting(times float64) *store {
	s := &store{peers: map[string]peer{nginxName: {version: "1.22.1"}, routerName: {missing: "not installed"}, evenkeelName: {version: "dev"}}}
	for round := range 2 {
		for _, name := range []string{direct, twoLegs, nginxName, evenkeelName} {
			for _, r := range []string{"100", "1000", "4000", "spread-1000"} {
				m := Sample{Row: r, Cores: 1, Proxy: name, Round: round, Streams: 1000, Chunk: 10 * time.Microsecond, RSS: 50 << 20, Whole: 1000,
					TTFT: Times{P99: 1000}}
				if name == evenkeelName {
					m.Chunk = time.Duration(times * float64(m.Chunk))
					m.TTFT.P99 += 500
					if r == "spread-1000" {
						m.RSS = 74 << 20
					}
				}
				if name == twoLegs {
					m.TTFT.P99 += 300
				}
				if r == "4000" && name == nginxName {
					m.Requests = 3
				}
				s.samples = append(s.samples, m)
			}
		}
	}
	return s
}

func TestThePageSaysWhatIsMetAndWhatWasNotMeasured(t *testing.T) {
	page := filepath.Join(t.TempDir(), "docs", "results", "relay.md")
	for _, x := range []struct {
		times   float64
		verdict string
	}{{1.3, "| × 1.35 | × 1.30 (× 1.30 to × 1.30) | met |"}, {1.4, "| × 1.35 | × 1.40 (× 1.40 to × 1.40) | **not met** |"}} {
		require.NoError(t, sitting(x.times).report(&bench{options: options{out: io.Discard, page: page}, files: 20_000}))
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		require.Contains(t, string(text), x.verdict)
		require.Contains(t, string(text), "| vllm-router | not measured: not installed |")
		require.Contains(t, string(text), "× 1.00 | – | not measured |")
		require.Contains(t, string(text), "| 10.0 (overloaded: streams ended before all were open) |")
		require.Contains(t, string(text),
			"| resident, 1,000 streams spread, requests included | 60.0 MiB | 74.0 MiB (74.0 MiB to 74.0 MiB) | **not met** |")
		require.Contains(t, string(text), "| 1,000, 20,000 chunks/s, spread, 96 tokens per answer | 1 | 10.0 |",
			"what a chunk costs with its requests")
		require.Contains(t, string(text), "| evenkeel | 0.0 / 0.2 / 0.0 |",
			"what is added to the first token, beside clients that make both requests")
		require.Contains(t, string(text), "| no proxy, two legs, the times themselves | 0.0 / 1.3 / 0.0 |")
	}
}

func TestGrowthIsThatOfBothFromFewStreamsToMany(t *testing.T) {
	s := &store{}
	for _, x := range []struct {
		row, proxy string
		chunk      time.Duration
	}{{"1000", nginxName, 10}, {"9500", nginxName, 20}, {"1000", evenkeelName, 10}, {"9500", evenkeelName, 30}} {
		s.samples = append(s.samples, Sample{Row: x.row, Cores: 1, Proxy: x.proxy, Chunk: x.chunk * time.Microsecond})
	}
	v, ok := growth(s)
	require.True(t, ok)
	require.InDelta(t, 1.5, v.median, 1e-9)
}

func TestRoundsAreComparedWithThemselves(t *testing.T) {
	s := &store{}
	for _, x := range []struct {
		proxy string
		round int
		chunk time.Duration
	}{{evenkeelName, 0, 50}, {evenkeelName, 1, 20}, {nginxName, 1, 10}, {nginxName, 2, 1}} {
		s.samples = append(s.samples, Sample{Row: "100", Cores: 1, Proxy: x.proxy, Round: x.round, Chunk: x.chunk})
	}
	v, ok := s.compare("100", 1, evenkeelName, nginxName, chunkCPU, ratio)
	require.True(t, ok)
	require.Equal(t, spread{2, 2, 2}, v, "the one round in which both were measured")
	_, ok = s.compare("100", 1, evenkeelName, bareName, chunkCPU, ratio)
	require.False(t, ok)
}

func TestAProgramStartsOnItsCores(t *testing.T) {
	all, err := allCores()
	require.NoError(t, err)
	require.NotEmpty(t, all)
	w := &testbed.World{Dir: t.TempDir()}
	b := &bench{world: w, cores: all}
	p, err := b.start("true", exec.Command("true"), all[:1])
	require.NoError(t, err)
	<-p.Gone()
	require.NoError(t, p.Err())
	after, err := allCores()
	require.NoError(t, err)
	require.Equal(t, all, after, "the thread that started it runs where it did")
}

func TestACollectorThatGotNothingIsAnError(t *testing.T) {
	c, err := openCollector()
	require.NoError(t, err)
	resp, err := http.Post(c.url+"/v1/traces", "application/x-protobuf", strings.NewReader("spans"))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusOK, resp.StatusCode)
	http.DefaultClient.CloseIdleConnections()
	require.NoError(t, c.close(true))

	c, err = openCollector()
	require.NoError(t, err)
	require.ErrorContains(t, c.close(true), "the collector got no trace")
}
