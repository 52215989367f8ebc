// Package refclient has what tests in front of reference engines share, whether a whole proxy
// serves there or its parts: clients that judge every answer, the engines' own accounts, and an
// oracle that finds engines.
package refclient

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/bench/lab/reftext"
	"evenkeel/internal/race"
)

// Model is that of the reference engines.
const Model = "ref"

// Endpoints that tests ask.
const (
	ChatPath       = "/v1/chat/completions"
	CompletionPath = "/v1/completions"
	MessagesPath   = "/v1/messages"
	ResponsesPath  = "/v1/responses"
)

// Patience is how long a test waits for what should be there in milliseconds: nobody waits so long
// but on a machine that has much else to do.
const Patience = time.Minute

// Main runs tests that wait more than they compute, and holds that no goroutine is left. So many
// run at once; under the race detector fewer, which would run into each other's deadlines
// otherwise.
func Main(m *testing.M, parallel, raced int) {
	if race.Enabled {
		parallel = raced
	}
	if err := flag.Set("test.parallel", strconv.Itoa(parallel)); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"),    // one for the process
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2")) // ends up to 10 s after its server
}

// Client asks what serves at a URL, and reads what it says of itself.
type Client struct {
	*testing.T
	URL        string
	HTTP       *http.Client
	RequestLog string        // a file
	Page       func() string // of metrics
	Open       func() int64  // requests that are not accounted for yet
}

// NewHTTP is for a client of many requests at once.
func NewHTTP() *http.Client {
	return &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 2000, DisableCompression: true}}
}

// Reply is what came for a request.
type Reply struct {
	Status int
	Header http.Header
	Body   string
	Err    error // of the transport, also in the middle of the body
}

// Post sends a completion or chat request.
func (c *Client) Post(path, body string, header ...string) Reply {
	return c.Ask(http.MethodPost, c.URL+path, body, header...)
}

// Ask sends a request; header is names and values in turn.
func (c *Client) Ask(method, url, body string, header ...string) Reply {
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		return Reply{Err: err}
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	set(req, header)
	return c.Do(req)
}

func set(req *http.Request, header []string) {
	for i := 0; i+1 < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		}
		req.Header.Set(header[i], header[i+1])
	}
}

// Do sends a request and reads its answer.
func (c *Client) Do(req *http.Request) Reply {
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return Reply{Err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(resp.Body)
	return Reply{Status: resp.StatusCode, Header: resp.Header, Body: string(data), Err: err}
}

const thinkTime = 20 * time.Millisecond

// KeepAsking has so many clients ask one request after the other, each of which must be answered
// right, until stop, which waits for the last and says how many there were. The end of the test
// stops them, too. Each client waits for thinkTime after an answer: without it, the clients take
// all of the machine's cores, and what they run beside becomes slow.
func (c *Client) KeepAsking(clients int) (stop func() int64) {
	over := make(chan struct{})
	var load sync.WaitGroup
	var right atomic.Int64
	for i := range clients {
		load.Go(func() {
			for k := 0; ; k++ {
				if got := c.Judge(fmt.Sprintf("client %d request %d", i, k), `"stream":true,`); got != "right" {
					c.Errorf("got %s", got)
					return
				}
				right.Add(1)
				select {
				case <-over:
					return
				case <-time.After(thinkTime):
				}
			}
		})
	}
	stop = sync.OnceValue(func() int64 {
		close(over)
		load.Wait()
		return right.Load()
	})
	c.Cleanup(func() { stop() }) // before the engines end; a client that outlives the test would fail there
	return stop
}

// Endless starts a stream that does not end by itself and returns, once its first event is there,
// what makes its client leave.
func (c *Client) Endless(header ...string) (leave func()) {
	c.Helper()
	ctx, cancel := context.WithCancel(c.Context())
	body := Chat("an endless story", `"stream":true,"ignore_eos":true,`)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+ChatPath, strings.NewReader(body))
	require.NoError(c, err)
	set(req, header)
	resp, err := c.HTTP.Do(req) //nolint:bodyclose // leave closes it
	require.NoError(c, err)
	require.Equal(c, http.StatusOK, resp.StatusCode)
	_, err = resp.Body.Read(make([]byte, 1))
	require.NoError(c, err)
	read := make(chan struct{})
	go func() { // a client that does not read is cut
		defer close(read)
		_, _ = io.Copy(io.Discard, resp.Body)
	}()
	leave = func() {
		cancel()
		<-read
		_ = resp.Body.Close()
	}
	c.Cleanup(leave)
	return leave
}

// Send starts a request that its client will leave; wait returns when the client's side is over.
func (c *Client) Send(body string) (leave, wait func()) {
	c.Helper()
	path := ChatPath
	if strings.Contains(body, `"prompt":`) {
		path = CompletionPath
	}
	return c.SendTo(path, body)
}

// SendTo is Send for any endpoint.
func (c *Client) SendTo(path, body string, header ...string) (leave, wait func()) {
	c.Helper()
	ctx, leave := context.WithCancel(c.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+path, strings.NewReader(body))
	require.NoError(c, err)
	set(req, header)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if resp, err := c.HTTP.Do(req); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}
	}()
	wait = func() { <-done }
	c.Cleanup(func() { leave(); wait() })
	return leave, wait
}

// Judge asks and fails if what came is wrong, or looks whole and is not. It says "right", or what
// the client was told.
func (c *Client) Judge(prompt, more string, header ...string) string {
	c.Helper()
	var all []uint64 // answers: without a seed, and those of two seeds
	for _, seed := range []string{"", `"seed":5,`, `"seed":6,`} {
		p, err := reftext.Render(true, []byte(Chat(prompt, seed)))
		require.NoError(c, err)
		all = append(all, p.Answer)
	}
	keys := all[:1]
	if strings.Contains(more, `"n":2`) {
		keys = all[1:]
	}
	r := c.Post(ChatPath, Chat(prompt, more), header...)
	require.NoError(c, r.Err, "an answer ends as HTTP says, whatever it says")
	if r.Status != http.StatusOK {
		require.Contains(c, []int{400, 422, 429, 500, 501, 502, 503, 504}, r.Status, r.Body)
		c.Logf("%d: %s", r.Status, r.Body)
		return fmt.Sprint(r.Status)
	}
	if r.Header.Get("Content-Type") == "application/json" {
		for i, text := range Whole(c.T, r.Body) {
			WholeText(c.T, keys[i], text)
		}
		return "right"
	}
	got := Read(c.T, r.Body)
	require.True(c, got.Done)
	for i, key := range keys {
		RightText(c.T, key, got.Text[i])
		if got.Fail == "" {
			require.NotEmpty(c, got.Finish[i], "an end without a reason: %s", r.Body)
			WholeText(c.T, key, got.Text[i])
		}
	}
	if got.Fail != "" {
		return got.Fail
	}
	return "right"
}

// Judging has Judge ask, and gives what it says. The channel is closed without a verdict if it
// fails.
func (c *Client) Judging(prompt, more string) <-chan string {
	got := make(chan string, 1)
	go func() {
		defer close(got)
		got <- c.Judge(prompt, more)
	}()
	return got
}

// JudgeAll has so many requests at once judged, with texts of their own, and counts the verdicts.
func (c *Client) JudgeAll(n int, more string) (verdicts map[string]int) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	verdicts = map[string]int{}
	for i := range n {
		wg.Go(func() {
			v := c.Judge(fmt.Sprintf("prompt %d of many", i), more)
			mu.Lock()
			defer mu.Unlock()
			verdicts[v]++
		})
	}
	wg.Wait()
	return verdicts
}

// Say posts a chat, checks its answer and returns it with the way it took.
func (c *Client) Say(body string, header ...string) (text, route string) {
	c.Helper()
	p, err := reftext.Render(true, []byte(body))
	require.NoError(c, err)
	r := c.Post(ChatPath, body, header...)
	require.NoError(c, r.Err)
	require.Equal(c, http.StatusOK, r.Status, r.Body)
	if strings.Contains(body, `"stream":true`) {
		text = Read(c.T, r.Body).Text[0]
	} else {
		text = Whole(c.T, r.Body)[0]
	}
	WholeText(c.T, p.Answer, text)
	return text, r.Header.Get("X-Evenkeel-Route")
}

// Hits sends a completion and returns how many tokens of its prompt were predicted to be cached,
// and how many were.
func (c *Client) Hits(prompt any) (predicted, actual int) {
	c.Helper()
	text, err := json.Marshal(prompt)
	require.NoError(c, err)
	r := c.Post(CompletionPath, fmt.Sprintf(`{"model":%q,"max_tokens":1,"prompt":%s}`, Model, text))
	require.Equal(c, http.StatusOK, r.Status, r.Body)
	_, err = fmt.Sscan(r.Header.Get("X-Evenkeel-Hit-Tokens"), &predicted)
	require.NoError(c, err)
	var answer struct {
		Usage struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	require.NoError(c, json.Unmarshal([]byte(r.Body), &answer))
	return predicted, answer.Usage.Details.Cached
}

// Accounted waits until every request is in the request log and in all counts: a client has the
// last byte of its answer a moment before.
func (c *Client) Accounted() {
	c.Helper()
	c.Eventually("all requests are accounted for", func() bool { return c.Open() == 0 })
}

// Eventually waits until something holds.
func (c *Client) Eventually(what string, ok func() bool) {
	c.Helper()
	pause := time.Millisecond // most reads are whole pages of metrics, and other tests want the processor, too
	for end := time.Now().Add(Patience); !ok(); pause = min(pause*5/4, 20*time.Millisecond) {
		require.True(c, time.Now().Before(end), "in vain: %s", what)
		time.Sleep(pause)
	}
}

// Sum is the value of all series of a metric.
func (c *Client) Sum(name string) float64 {
	c.Helper()
	return SumOf(c.T, c.Page(), name)
}

// Metric is the value of a series; 0 if there is none.
func (c *Client) Metric(series string) float64 {
	c.Helper()
	return ValueOf(c.T, c.Page(), series)
}

// SumOf adds up the series of a name on one page of metrics.
func SumOf(t *testing.T, page, name string) (sum float64) {
	t.Helper()
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, name+"{") {
			var v float64
			_, err := fmt.Sscan(line[strings.LastIndexByte(line, ' ')+1:], &v)
			require.NoError(t, err)
			sum += v
		}
	}
	return sum
}

// ValueOf is the value of a series on one page of metrics; 0 if there is none.
func ValueOf(t *testing.T, page, series string) (v float64) {
	t.Helper()
	for line := range strings.Lines(page) {
		if rest, ok := strings.CutPrefix(line, series+" "); ok {
			_, err := fmt.Sscan(rest, &v)
			require.NoError(t, err)
		}
	}
	return v
}

// Record is a line of the request log.
type Record struct {
	ID           string  `json:"id"`
	Key          string  `json:"key"`
	Prefill      string  `json:"prefill"`
	Route        string  `json:"route"`
	LocalTokens  int     `json:"local_prefill_tokens"`
	Rank         string  `json:"rank"`
	PromptTokens int     `json:"prompt_tokens"`
	CachedTokens int     `json:"cached_tokens"`
	OutputTokens int     `json:"output_tokens"`
	TTFTMs       float64 `json:"ttft_ms"`
	TotalMs      float64 `json:"total_ms"`
	Attempts     int     `json:"attempts"`
	Outcome      string  `json:"outcome"`
	PromptKey    string  `json:"prompt_key"`
	Inexact      bool    `json:"inexact"`
}

// Records are the request log's, oldest first.
func (c *Client) Records() (all []Record) {
	c.Helper()
	f, err := os.Open(c.RequestLog)
	require.NoError(c, err)
	defer func() { _ = f.Close() }()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var r Record
		require.NoError(c, json.Unmarshal(lines.Bytes(), &r))
		all = append(all, r)
	}
	return all
}

// Outcomes are those of the request log.
func (c *Client) Outcomes() (all []string) {
	c.Helper()
	for _, r := range c.Records() {
		all = append(all, r.Outcome)
	}
	return all
}
