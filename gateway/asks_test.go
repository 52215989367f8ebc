package gateway_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/reftext"
)

// reply is what came for a request.
type reply struct {
	status int
	header http.Header
	body   string
	err    error // of the transport, also in the middle of the body
}

// get asks the admin listener.
func (c *cluster) get(path string) reply {
	return c.ask(http.MethodGet, c.admin+path, "", "Authorization", "Bearer "+c.token)
}

// post sends a completion or chat request.
func (c *cluster) post(path, body string, header ...string) reply {
	return c.ask(http.MethodPost, c.url+path, body, header...)
}

func (c *cluster) ask(method, url, body string, header ...string) reply {
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		return reply{err: err}
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		}
		req.Header.Set(header[i], header[i+1])
	}
	return c.do(req)
}

func (c *cluster) do(req *http.Request) reply {
	resp, err := c.http.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, string(data), err}
}

// keepAsking has so many clients ask one request after the other, each of which must
// be answered right, until stop, which waits for the last.
func (c *cluster) keepAsking(clients int) (stop func()) {
	over := make(chan struct{})
	var load sync.WaitGroup
	for i := range clients {
		load.Go(func() {
			for k := 0; ; k++ {
				select {
				case <-over:
					return
				default:
					if got := c.judge(fmt.Sprintf("client %d request %d", i, k), `"stream":true,`); got != "right" {
						c.Errorf("got %s", got)
						return
					}
				}
			}
		})
	}
	return sync.OnceFunc(func() {
		close(over)
		load.Wait()
	})
}

// endless starts a stream that does not end by itself and returns, once its
// first event is there, what makes its client leave.
func (c *cluster) endless(header ...string) (leave func()) {
	c.Helper()
	ctx, cancel := context.WithCancel(c.Context())
	body := chat("an endless story", `"stream":true,"ignore_eos":true,`)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/v1/chat/completions", strings.NewReader(body))
	require.NoError(c, err)
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.http.Do(req)
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

// sum is the value of all series of a metric.
func (c *cluster) sum(name string) float64 {
	c.Helper()
	return sumOf(c.T, c.get("/metrics").body, name)
}

// sumOf adds up the series of a name on one page of metrics.
func sumOf(t *testing.T, page, name string) (sum float64) {
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

// metric is the value of a series as /metrics has it; 0 if there is none.
func (c *cluster) metric(series string) float64 {
	c.Helper()
	return valueOf(c.T, c.get("/metrics").body, series)
}

// valueOf is the value of a series on one page of metrics; 0 if there is none.
func valueOf(t *testing.T, page, series string) (v float64) {
	t.Helper()
	for line := range strings.Lines(page) {
		if rest, ok := strings.CutPrefix(line, series+" "); ok {
			_, err := fmt.Sscan(rest, &v)
			require.NoError(t, err)
		}
	}
	return v
}

// outcomes are the request log's, oldest first.
func (c *cluster) outcomes() (all []string) {
	c.Helper()
	for _, r := range c.records() {
		all = append(all, r.Outcome)
	}
	return all
}

type record struct {
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

func (c *cluster) records() (all []record) {
	c.Helper()
	f, err := os.Open(c.requestLog)
	require.NoError(c, err)
	defer func() { _ = f.Close() }()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var r record
		require.NoError(c, json.Unmarshal(lines.Bytes(), &r))
		all = append(all, r)
	}
	return all
}

// chat is the body of a chat request of one user message, with more members in
// front.
func chat(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"messages":[{"role":"user","content":%q}]}`, more, model, prompt)
}

func completion(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"prompt":%q}`, more, model, prompt)
}

// events are the data of a stream's events.
func events(t *testing.T, body string) (all []string) {
	t.Helper()
	body = strings.ReplaceAll(body, "\r\n", "\n")
	for event := range strings.SplitSeq(strings.TrimSuffix(body, "\n\n"), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		require.True(t, ok || strings.HasPrefix(event, ":"), "not an event: %q", event)
		if ok {
			all = append(all, data)
		}
	}
	return all
}

// answer is a stream put together.
type answer struct {
	text   map[int]string // by choice
	finish map[int]string
	usage  int // events with usage
	fail   string
	done   bool
}

// whole are the texts of an answer that is not streamed.
func (a *answer) whole(choice int) bool { return a.done && a.fail == "" && a.finish[choice] != "" }

func read(t *testing.T, body string) answer {
	t.Helper()
	a := answer{text: map[int]string{}, finish: map[int]string{}}
	for _, data := range events(t, body) {
		require.False(t, a.done, "an event after [DONE]: %s", data)
		if data == "[DONE]" {
			a.done = true
			continue
		}
		var e struct {
			Choices []struct {
				Index  int
				Text   string
				Delta  struct{ Content string }
				Finish string `json:"finish_reason"`
			}
			Usage *struct{}
			Error *struct{ Message, Type, Code string }
		}
		require.NoError(t, json.Unmarshal([]byte(data), &e), data)
		if e.Error != nil {
			require.NotEmpty(t, e.Error.Message)
			a.fail = e.Error.Code
		}
		if e.Usage != nil {
			a.usage++
		}
		for _, c := range e.Choices {
			a.text[c.Index] += c.Text + c.Delta.Content
			if c.Finish != "" {
				a.finish[c.Index] = c.Finish
			}
		}
	}
	return a
}

// rightText fails unless text is the beginning of the answer to key.
func rightText(t *testing.T, key uint64, text string) (tokens int) {
	t.Helper()
	tokens, err := reftext.Check(key, 0, text)
	require.NoError(t, err)
	return tokens
}

// wholeText fails unless text is the whole answer to key.
func wholeText(t *testing.T, key uint64, text string) {
	t.Helper()
	require.Equal(t, reftext.NaturalLength(key), rightText(t, key, text))
}

func whole(t *testing.T, body string) (texts []string) {
	t.Helper()
	var a struct {
		Choices []struct {
			Index   int
			Text    string
			Message struct{ Content string }
			Finish  string `json:"finish_reason"`
		}
	}
	require.NoError(t, json.Unmarshal([]byte(body), &a), body)
	for i, c := range a.Choices {
		require.Equal(t, i, c.Index)
		require.NotEmpty(t, c.Finish)
		texts = append(texts, c.Text+c.Message.Content)
	}
	return texts
}
