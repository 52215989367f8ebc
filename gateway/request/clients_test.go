package request

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// chat is the body of a request for a chat.
func chat(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"messages":[{"role":"user","content":%q}]}`, more, refModel, prompt)
}

// A reply is what a client got.
type reply struct {
	status int
	header http.Header
	body   string
}

func (b *bed) post(path, body string) reply {
	b.t.Helper()
	if strings.Contains(body, `"stream":true`) {
		b.stream(1)
		defer b.stream(-1)
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // an idle connection would hold the listener's end up
	resp, err := client.Post(b.url+path, "application/json", strings.NewReader(body))
	require.NoError(b.t, err)
	defer func() { _ = resp.Body.Close() }()
	got, err := io.ReadAll(io.TeeReader(resp.Body, screen{b}))
	require.NoError(b.t, err, "an answer ends as HTTP says, whatever it says")
	return reply{resp.StatusCode, resp.Header, string(got)}
}

// screen shows what clients have read so far.
type screen struct{ *bed }

func (s screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams > 0 {
		s.shown = append(s.shown, p...)
	}
	return len(p), nil
}

// stream counts the clients that are to read a stream. Behind the last one the screen is empty.
func (b *bed) stream(more int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.streams += more; b.streams == 0 {
		b.shown = nil
	}
}

// untilRead is OnBreak of the engines: it returns once a client has read so many tokens of an
// answer, because an answer that is lost before its client has any of it begins anew. It returns at
// once if no client is to read a stream, and after 1000 looks, about a second, if the answer is
// none of a stream, or its text is held back. A machine that stands still for a while uses up no
// looks.
func (b *bed) untilRead(answer uint64, tokens int) {
	id := reftext.TokenID(answer, tokens-1)
	forms := [][]byte{reftext.AppendTokenJSON(nil, id), strconv.AppendInt(nil, int64(id), 10)} // in text, and in ids
	for range 1000 {
		b.mu.Lock()
		read := b.streams == 0 || slices.ContainsFunc(forms, func(f []byte) bool { return bytes.Contains(b.shown, f) })
		b.mu.Unlock()
		if read {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// send asks in the background. Its client leaves with leave, and wait waits until nothing reads its
// answer any more.
func (b *bed) send(body string) (leave, wait func()) {
	b.t.Helper()
	path := mooncake.Chat.Path()
	if strings.Contains(body, `"prompt":`) {
		path = mooncake.Completions.Path()
	}
	return b.sendTo(path, body)
}

func (b *bed) sendTo(path, body string) (leave, wait func()) {
	b.t.Helper()
	ctx, leave := context.WithCancel(b.t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url+path, strings.NewReader(body))
	require.NoError(b.t, err)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		if resp, err := client.Do(req); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}
	}()
	b.t.Cleanup(leave)
	return leave, func() { <-gone }
}

// endless has a stream decoded that does not end before its client leaves. A request that a slow
// machine has refused, for example because its first event took longer than first_event_timeout, is
// sent again.
func (b *bed) endless() (end func()) {
	b.t.Helper()
	before := b.begun()
	var leave, wait func()
	var refused chan struct{} // closed when the request has ended
	ask := func() {
		leave, wait = b.send(chat("an endless story", `"stream":true,"ignore_eos":true,`))
		over, ended := wait, make(chan struct{})
		go func() { over(); close(ended) }()
		refused = ended
	}
	ask()
	b.eventually("its first event is here", func() bool {
		select {
		case <-refused:
			if b.begun() == before {
				ask()
			}
		default:
		}
		return b.begun() > before
	})
	return func() { leave(); wait() }
}

// begun are the answers of which the first event is here.
func (b *bed) begun() int { return int(b.metric(b.t, "evenkeel_ttft_seconds", "")) }

// only has these decode ranks take requests, and none of the others.
func (b *bed) only(ranks ...int) {
	b.workers = slices.Clone(b.workers)
	for i := range b.workers {
		b.workers[i].Up = slices.Contains(ranks, i)
	}
	b.Dispatcher.SetWorkers(b.workers)
}

// move ends the calls at an engine as the deadline of its drain does, "": at all engines, and says
// how many.
func (b *bed) move(instance string) int {
	return b.engines.calls.MoveCalls(func(at roster.Location) bool { return instance == "" || at.Instance == instance })
}

// used are the slots of the decode ranks that are taken.
func (b *bed) used() (n int) {
	for _, m := range b.Dispatcher.Status(b.t.Context()).Models {
		for _, w := range m.Workers {
			n += w.Used
		}
	}
	return n
}

// pooled are the finished prefills that wait for a slot.
func (b *bed) pooled() (n int) {
	for _, m := range b.Dispatcher.Status(b.t.Context()).Models {
		n += m.Pool
	}
	return n
}

// eventually waits until something holds.
func (b *bed) eventually(what string, ok func() bool) {
	b.t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		require.True(b.t, time.Now().Before(end), "in vain: %s", what)
	}
}

// judge asks for a chat and says whether its answer is "right", and else with which code it failed.
// What comes before a failure has to be right, too. Two answers have the seeds 5 and 6.
func (b *bed) judge(prompt, more string) string {
	b.t.Helper()
	seeds := []string{""}
	if strings.Contains(more, `"n":2`) {
		seeds = []string{`"seed":5,`, `"seed":6,`}
	}
	got := b.post(mooncake.Chat.Path(), chat(prompt, more))
	if got.status != http.StatusOK {
		return strconv.Itoa(got.status)
	}
	texts, finished, fail := readAll(b.t, got)
	for i, seed := range seeds {
		key, err := reftext.Render(true, []byte(chat(prompt, seed)))
		require.NoError(b.t, err)
		tokens, err := reftext.Check(key.Answer, 0, texts[i])
		require.NoError(b.t, err)
		if fail == "" {
			require.True(b.t, finished[i], "an end without a reason: %s", got.body)
			require.Equal(b.t, reftext.NaturalLength(key.Answer), tokens)
		}
	}
	return cmp.Or(fail, "right")
}

// read is the text of the first answer that came, whether it said that it is finished, and the code
// of the error at its end.
func read(t *testing.T, r reply) (text string, finished bool, fail string) {
	texts, ends, fail := readAll(t, r)
	return texts[0], ends[0], fail
}

// eventsOf are the events of a stream without its comments, each of which is a line of the event
// that follows.
func eventsOf(stream string) []string {
	var text strings.Builder
	for line := range strings.Lines(strings.ReplaceAll(stream, "\r\n", "\n")) {
		if !strings.HasPrefix(line, ":") {
			text.WriteString(line)
		}
	}
	return strings.Split(strings.TrimSuffix(text.String(), "\n\n"), "\n\n")
}

// readAll is read of all answers.
func readAll(t *testing.T, r reply) (texts map[int]string, finished map[int]bool, fail string) {
	t.Helper()
	type event struct {
		Choices []struct {
			Index          int
			Delta, Message struct{ Content string }
			Finish         string `json:"finish_reason"`
		}
		Error *struct{ Code any }
	}
	all := []string{r.body}
	if strings.HasPrefix(r.header.Get("Content-Type"), "text/event-stream") {
		require.Equal(t, http.StatusOK, r.status)
		all = eventsOf(r.body)
		require.Equal(t, "data: [DONE]", all[len(all)-1], r.body)
		all = all[:len(all)-1]
	}
	texts, finished = map[int]string{}, map[int]bool{}
	for _, data := range all {
		var e event
		require.NoError(t, json.Unmarshal([]byte(strings.TrimPrefix(data, "data: ")), &e), data)
		if e.Error != nil {
			fail = fmt.Sprint(e.Error.Code)
		}
		for _, c := range e.Choices {
			texts[c.Index] += c.Delta.Content + c.Message.Content
			finished[c.Index] = finished[c.Index] || c.Finish != ""
		}
	}
	return texts, finished, fail
}

// judging has judge ask, and gives what it says. The channel is closed without a verdict if it
// fails.
func (b *bed) judging(prompt, more string) <-chan string {
	got := make(chan string, 1)
	go func() {
		defer close(got)
		got <- b.judge(prompt, more)
	}()
	return got
}
