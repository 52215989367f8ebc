package fleet_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/gateway/receipt"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// reply is what came for a request.
type reply struct {
	status int
	header http.Header
	body   string
	err    error // of the transport, also in the middle of the body
}

// post sends a completion or chat request.
func (b *bed) post(path, body string, header ...string) reply {
	return b.ask(http.MethodPost, b.url+path, body, header...)
}

func (b *bed) ask(method, url, body string, header ...string) reply {
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
	return b.do(req)
}

func (b *bed) do(req *http.Request) reply {
	resp, err := b.http.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, string(data), err}
}

// keepAsking has so many clients ask one request after the other, each of which must
// be answered right, until stop, which waits for the last.
func (b *bed) keepAsking(clients int) (stop func()) {
	over := make(chan struct{})
	var load sync.WaitGroup
	for i := range clients {
		load.Go(func() {
			for k := 0; ; k++ {
				select {
				case <-over:
					return
				default:
					if got := b.judge(fmt.Sprintf("client %d request %d", i, k), `"stream":true,`); got != "right" {
						b.Errorf("got %s", got)
						return
					}
				}
			}
		})
	}
	return func() {
		close(over)
		load.Wait()
	}
}

// endless starts a stream that does not end by itself and returns, once its
// first event is there, what makes its client leave.
func (b *bed) endless(header ...string) (leave func()) {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	body := chat("an endless story", `"stream":true,"ignore_eos":true,`)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url+"/v1/chat/completions", strings.NewReader(body))
	require.NoError(b, err)
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := b.http.Do(req)
	require.NoError(b, err)
	require.Equal(b, http.StatusOK, resp.StatusCode)
	_, err = resp.Body.Read(make([]byte, 1))
	require.NoError(b, err)
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
	b.Cleanup(leave)
	return leave
}

// sum is the value of all series of a metric.
func (b *bed) sum(name string) float64 {
	b.Helper()
	return sumOf(b.T, b.page(), name)
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
func (b *bed) metric(series string) float64 {
	b.Helper()
	return valueOf(b.T, b.page(), series)
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

func (b *bed) records() (all []record) {
	b.Helper()
	f, err := os.Open(b.requestLog)
	require.NoError(b, err)
	defer func() { _ = f.Close() }()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var r record
		require.NoError(b, json.Unmarshal(lines.Bytes(), &r))
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
		for _, b := range e.Choices {
			a.text[b.Index] += b.Text + b.Delta.Content
			if b.Finish != "" {
				a.finish[b.Index] = b.Finish
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
	for i, b := range a.Choices {
		require.Equal(t, i, b.Index)
		require.NotEmpty(t, b.Finish)
		texts = append(texts, b.Text+b.Message.Content)
	}
	return texts
}

// judging has judge ask, and gives what it says. The channel is closed without a verdict if it fails.
func (b *bed) judging(prompt, more string) <-chan string {
	got := make(chan string, 1)
	go func() {
		defer close(got)
		got <- b.judge(prompt, more)
	}()
	return got
}

// judge asks and fails if what came is wrong, or looks whole and is not. It
// says "right", or what the client was told.
func (b *bed) judge(prompt, more string, headers ...string) string {
	b.Helper()
	body := chat(prompt, more)
	var all []uint64 // answers: without a seed, and those of two seeds
	for _, seed := range []string{"", `"seed":5,`, `"seed":6,`} {
		p, err := reftext.Render(true, []byte(chat(prompt, seed)))
		require.NoError(b, err)
		all = append(all, p.Answer)
	}
	keys := all[:1]
	if strings.Contains(more, `"n":2`) {
		keys = all[1:]
	}
	r := b.post(chatPath, body, headers...)
	require.NoError(b, r.err, "an answer ends as HTTP says, whatever it says")
	if r.status != http.StatusOK {
		require.Contains(b, []int{400, 422, 429, 500, 501, 502, 503, 504}, r.status, r.body)
		b.Logf("%d: %s", r.status, r.body)
		return fmt.Sprint(r.status)
	}
	if r.header.Get("Content-Type") == "application/json" {
		for i, text := range whole(b.T, r.body) {
			wholeText(b.T, keys[i], text)
		}
		return "right"
	}
	got := read(b.T, r.body)
	require.True(b, got.done)
	for i, key := range keys {
		rightText(b.T, key, got.text[i])
		if got.fail == "" {
			require.NotEmpty(b, got.finish[i], "an end without a reason: %s", r.body)
			wholeText(b.T, key, got.text[i])
		}
	}
	if got.fail != "" {
		return got.fail
	}
	return "right"
}

// accounted waits until every request is in the request log and in all counts: a client has the last byte of
// its answer a moment before.
func (b *bed) accounted() {
	b.Helper()
	b.eventually("all requests are accounted for", func() bool { return b.now().Open == 0 })
}

// settledRequests waits for the request log.
func (b *bed) settledRequests(n int) {
	b.Helper()
	b.eventually("the request is logged", func() bool { return len(b.records()) == n })
}

// send starts a request that its client will leave; wait returns when the
// client's side is over.
func (b *bed) send(body string) (leave, wait func()) {
	b.Helper()
	path := chatPath
	if strings.Contains(body, `"prompt":`) {
		path = "/v1/completions"
	}
	return b.sendTo(path, body)
}

// sendTo is send for any endpoint.
func (b *bed) sendTo(path, body string) (leave, wait func()) {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url+path, strings.NewReader(body))
	require.NoError(b, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if resp, err := b.http.Do(req); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}
	}()
	wait = func() { <-done }
	leave = func() {
		cancel()
	}
	b.Cleanup(func() { leave(); wait() })
	return leave, wait
}

// judgeAll has so many requests at once judged, with texts of their own.
func (b *bed) judgeAll(n int, more string) (verdicts map[string]int) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	verdicts = map[string]int{}
	for i := range n {
		wg.Go(func() {
			v := b.judge(fmt.Sprintf("prompt %d of many", i), more)
			mu.Lock()
			defer mu.Unlock()
			verdicts[v]++
		})
	}
	wg.Wait()
	return verdicts
}

// load asks without a pause until stop is called, which tells how often.
func (b *bed) load(clients int) (stop func() int64) {
	done := make(chan struct{})
	var all sync.WaitGroup
	var right atomic.Int64
	for i := range clients {
		all.Go(func() {
			for k := 0; ; k++ {
				select {
				case <-done:
					return
				default:
				}
				if got := b.judge(fmt.Sprintf("client %d request %d", i, k), `"stream":true,`); got != "right" {
					b.Errorf("got %s", got)
					return
				}
				right.Add(1)
			}
		})
	}
	return func() int64 {
		close(done)
		all.Wait()
		return right.Load()
	}
}

const (
	chatPath       = "/v1/chat/completions"
	completionPath = "/v1/completions"
)

// failure reads OpenAI's error object and holds its shape.
func failure(t *testing.T, r reply) (code, param, kind string) {
	t.Helper()
	require.NoError(t, r.err)
	require.Equal(t, "application/json", r.header.Get("Content-Type"), r.body)
	var e struct {
		Error struct {
			Message, Type, Code string
			Param               *string
		}
	}
	require.NoError(t, json.Unmarshal([]byte(r.body), &e), r.body)
	require.NotEmpty(t, e.Error.Message)
	if e.Error.Param != nil {
		param = *e.Error.Param
	}
	return e.Error.Code, param, e.Error.Type
}

// conditional is a cluster whose decode ranks may compute short prompts.
func conditional(more func(*config.Config)) options {
	return options{
		profile: mooncake.Profile{AllowLocalPrefill: true},
		decode:  []refengine.Config{{DPSize: 2, PrefixCache: 4096, PromptTokensDetails: true}},
		configure: func(cfg *config.Config) {
			cfg.ExposeRoute = true
			cfg.Prefill.Disaggregation.Mode = prefill.DisaggregateConditional
			cfg.Prefill.Index.TokenizeTimeout = patience // a busy machine counts the prompt, too
			if more != nil {
				more(cfg)
			}
		},
	}
}

// talk is a chat of turns, the user's first.
func talk(more string, turns ...string) string {
	var messages []string
	for i, text := range turns {
		messages = append(messages, fmt.Sprintf(`{"role":%q,"content":%q}`, [...]string{"user", "assistant"}[i%2], text))
	}
	return fmt.Sprintf(`{%s"model":%q,"messages":[%s]}`, more, model, strings.Join(messages, ","))
}

// say posts a chat, checks its answer and returns it with the way it took.
func (b *bed) say(body string, header ...string) (text, route string) {
	b.Helper()
	p, err := reftext.Render(true, []byte(body))
	require.NoError(b, err)
	r := b.post(chatPath, body, header...)
	require.NoError(b, r.err)
	require.Equal(b, http.StatusOK, r.status, r.body)
	if strings.Contains(body, `"stream":true`) {
		text = read(b.T, r.body).text[0]
	} else {
		text = whole(b.T, r.body)[0]
	}
	wholeText(b.T, p.Answer, text)
	return text, r.header.Get("X-Evenkeel-Route")
}

func together(more func(*config.Config)) options {
	return options{
		mixed: []refengine.Config{{DPSize: 2, PrefixCache: 4096, PromptTokensDetails: true}},
		configure: func(cfg *config.Config) {
			cfg.ExposeRoute = true
			if more != nil {
				more(cfg)
			}
		},
	}
}

func keyFile(t *testing.T, file string, entries ...string) {
	t.Helper()
	text := "keys:\n"
	for _, e := range entries {
		name, rest, _ := strings.Cut(e, " ")
		key, more, _ := strings.Cut(rest, " ")
		sum := sha256.Sum256([]byte(key))
		text += fmt.Sprintf("  - {name: %s, sha256: %s%s}\n", name, hex.EncodeToString(sum[:]), more)
	}
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
}

// allUp waits until every engine of the cluster takes requests.
func (b *bed) allUp() {
	b.Helper()
	b.eventually("all engines are up", func() bool {
		s, up := b.now(), 0
		for _, m := range s.Dispatch.Models {
			for _, w := range m.Workers {
				if w.Up {
					up++
				}
			}
		}
		want := len(b.prefill)
		for _, d := range b.decode {
			want += d.Config().DPSize
		}
		return float64(up)+b.metric(`evenkeel_prefill_candidates{state="open"}`) == float64(want)
	})
}

func (b *bed) models() (ids []string) {
	b.Helper()
	r := b.ask("GET", b.url+"/v1/models", "")
	require.Equal(b, 200, r.status)
	var list struct {
		Object string
		Data   []struct {
			ID, Object string
		}
	}
	require.NoError(b, json.Unmarshal([]byte(r.body), &list))
	require.Equal(b, "list", list.Object)
	for _, m := range list.Data {
		require.Equal(b, "model", m.Object)
		ids = append(ids, m.ID)
	}
	return ids
}

// outcomes are the request log's, oldest first.
func (b *bed) outcomes() (all []string) {
	b.Helper()
	for _, r := range b.records() {
		all = append(all, r.Outcome)
	}
	return all
}

// wordsOf is the body of a message to a prompt, with more members.
func wordsOf(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"max_tokens":4000,"messages":[{"role":"user","content":%q}]}`, more, model, prompt)
}

// respond is the body of a response to a prompt, with more members.
func respond(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"input":%q}`, more, model, prompt)
}

const messagesPath = "/v1/messages"

const responsesPath = "/v1/responses"

// receipt waits until a request has ended and returns what was kept of it.
func (b *bed) receipt(id string) (r *receipt.Receipt) {
	b.Helper()
	b.eventually("the receipt of "+id+" is closed", func() bool {
		all := b.receipts.Find(id, 1)
		if len(all) == 0 {
			return false
		}
		r = all[0]
		return r.State == receipt.Ended
	})
	return r
}
