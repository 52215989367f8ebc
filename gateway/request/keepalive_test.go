package request

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/gateway/loop"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// span is limits.keep_alive of these tests, and slowly is a prefill that takes several of them.
const (
	span   = 20 * time.Millisecond
	slowly = 10 * span
)

// kept is a setup whose clients get comments, with event loops or without.
func kept(t *testing.T, o setup, loops int) setup {
	t.Helper()
	more := o.configure
	o.configure = func(c *config.Config, deps *Deps) {
		c.Limits.KeepAlive = span
		if loops > 0 {
			deps.Loops = &loop.Set{}
			require.NoError(t, deps.Loops.Start(loops, deps.Log))
			t.Cleanup(deps.Loops.Close)
		}
		if more != nil {
			more(c, deps)
		}
	}
	return o
}

// comments takes the comments before the first event out of an answer, and says how many there
// were.
func comments(r *reply, path string) (n int) {
	comment := string(sse.Silence(sse.FormOf(path)))
	for strings.HasPrefix(r.body, comment) {
		r.body = strings.TrimPrefix(r.body, comment)
		n++
	}
	return n
}

// eventsHaveData says of a stream that each blank line has data before it, as clients want that
// take it for the end of an event.
func eventsHaveData(t *testing.T, stream string) {
	t.Helper()
	data := false
	for line := range strings.Lines(stream) {
		if blank := line == "\n"; blank {
			require.True(t, data, "%q", stream)
			data = false
		} else if strings.HasPrefix(line, "data:") {
			data = true
		}
	}
}

// However a request is served: while it waits for its first token its client gets comments, and the
// answer is the same. An answer that is not streamed has none.
func TestAClientThatWaitsGetsComments(t *testing.T) {
	t.Parallel()
	prompt := reftext.MakePrompt(3, 40)
	for _, row := range []struct {
		connector, path, more string
		local                 bool
	}{
		{mooncake.AscendMooncakeV1, mooncake.Chat.Path(), "", false},
		{mooncake.AscendMooncakeV1, mooncake.Chat.Path(), `"max_tokens":2,`, false},
		{mooncake.AscendMooncakeV1, mooncake.Chat.Path(), `"n":3,"seed":5,`, false},
		{mooncake.AscendMooncakeV1, mooncake.Completions.Path(), "", false},
		{mooncake.AscendMooncakeV1, mooncake.Chat.Path(), "", true},
		{mooncake.AscendLayerwise, mooncake.Chat.Path(), "", false},
		{mooncake.SGLang, mooncake.Chat.Path(), "", false},
		{mooncake.NIXLPush, mooncake.Completions.Path(), "", false},
		{mooncake.NIXLPull, mooncake.Responses.Path(), "", false},
		{mooncake.NIXLPull, mooncake.Messages.Path(), "", false},
	} {
		for _, loops := range []int{2, 0} {
			t.Run(fmt.Sprintf("%s %s %s local %t loops %d", row.connector, row.path, row.more, row.local, loops), func(t *testing.T) {
				t.Parallel()
				o := setup{profile: mooncake.Profile{Connector: row.connector}, prefill: []refengine.Config{{Prompts: refengine.Prompts{Base: slowly}}},
					decode: []refengine.Config{{Prompts: refengine.Prompts{Base: slowly}}}}
				if row.local {
					o = alone(o)
				}
				b := start(t, kept(t, o, loops))
				for _, stream := range []bool{true, false} {
					more := fmt.Sprintf(`%s"stream":%t,`, row.more, stream)
					body := chat(prompt, more)
					for _, d := range dialects {
						if d.path == row.path {
							body = d.body(prompt, more)
						}
					}
					if row.path == mooncake.Completions.Path() {
						body = completion(prompt, `"max_tokens":300,`+more)
					}
					r := b.post(row.path, body)
					require.Equal(t, http.StatusOK, r.status, r.body)
					if stream {
						eventsHaveData(t, r.body)
					}
					n := comments(&r, row.path)
					b.over()
					require.Equal(t, stream, n > 0, "%d comments: %s", n, r.body)
					require.Equal(t, stream, strings.HasPrefix(r.header.Get("Content-Type"), "text/event-stream"))
					require.GreaterOrEqual(t, b.asked[len(b.asked)-1].Record.TTFTMs, float64(span.Milliseconds()), "a comment is no token")
					for _, d := range dialects {
						if d.path == row.path {
							text, fail := d.read(t, r.body, stream)
							require.Empty(t, fail)
							require.Equal(t, reftext.NaturalLength(reftext.OfUser(prompt).Answer), right(t, reftext.OfUser(prompt).Answer, text))
							return
						}
					}
					texts, finished, fail := readAll(t, r)
					require.Empty(t, fail)
					for i, text := range texts {
						require.True(t, finished[i])
						seed := ""
						if len(texts) > 1 {
							seed = fmt.Sprintf(`"seed":%d,`, 5+i)
						}
						p, err := reftext.Render(row.path == mooncake.Chat.Path(), []byte(chat(prompt, seed)))
						if row.path == mooncake.Completions.Path() {
							p, err = reftext.Render(false, []byte(body))
						}
						require.NoError(t, err)
						right(t, p.Answer, text)
					}
				}
				b.settle()
			})
		}
	}
}

// Without the key nothing comes before the first token, nor with it for a client that does not wait
// so long. A failure has its status then.
func TestNothingComesBeforeTheFirstComment(t *testing.T) {
	t.Parallel()
	for _, after := range []time.Duration{0, time.Hour} {
		t.Run(after.String(), func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{prefill: []refengine.Config{{Prompts: refengine.Prompts{Base: slowly}}},
				configure: func(c *config.Config, _ *Deps) { c.Limits.KeepAlive = after }})
			r := b.post(mooncake.Chat.Path(), chat(short, `"stream":true,`))
			require.Equal(t, http.StatusOK, r.status)
			require.Zero(t, comments(&r, mooncake.Chat.Path()))
			for fault, status := range map[refengine.Fault]int{refengine.Internal: http.StatusBadGateway, refengine.Reject: http.StatusBadRequest} {
				require.NoError(t, b.p[0].SetFaults(refengine.Rule{Fault: fault}))
				require.Equal(t, status, b.post(mooncake.Chat.Path(), chat(short, `"stream":true,`)).status)
			}
			b.settle()
		})
	}
}

// A request that fails behind comments ends with one error in the words of its endpoint, and never
// in silence.
func TestAFailureBehindComments(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		path, connector, more string
		read                  func(t *testing.T, body string) (code string)
	}{
		{mooncake.Chat.Path(), mooncake.NIXLPull, "", failOfChunks},
		{mooncake.Chat.Path(), mooncake.NIXLPull, `"n":2,`, failOfChunks},
		{mooncake.Completions.Path(), mooncake.NIXLPull, "", failOfChunks},
		{mooncake.Responses.Path(), mooncake.NIXLPull, "", func(t *testing.T, body string) string {
			_, fail := readResponse(t, body, true)
			return fail
		}},
		{mooncake.Messages.Path(), mooncake.NIXLPull, "", func(t *testing.T, body string) string {
			_, fail := readMessage(t, body, true)
			return fail
		}},
	} {
		for _, loops := range []int{2, 0} {
			t.Run(fmt.Sprintf("%s %s loops %d", row.path, row.more, loops), func(t *testing.T) {
				t.Parallel()
				b := start(t, kept(t, setup{profile: mooncake.Profile{Connector: row.connector}}, loops))
				body := chat(short, row.more+`"stream":true,`)
				for _, d := range dialects {
					if d.path == row.path {
						body = d.body(short, `"stream":true,`)
					}
				}
				if row.path == mooncake.Completions.Path() {
					body = completion(short, `"stream":true,`)
				}
				for _, fault := range []refengine.Fault{refengine.Internal, refengine.Reject} { // one of the engine, and its refusal of the request
					require.NoError(t, b.p[0].SetFaults(dawdling, refengine.Rule{Fault: fault}))
					r := b.post(row.path, body)
					b.over()
					require.Equal(t, http.StatusOK, r.status)
					require.Positive(t, comments(&r, row.path))
					require.NotEmpty(t, row.read(t, r.body), r.body)
				}
				b.settle()
			})
		}
	}
}

// failOfChunks is the code of the only event of a stream, behind which comes [DONE].
func failOfChunks(t *testing.T, body string) string {
	t.Helper()
	event, end, _ := strings.Cut(body, "\n\n")
	require.Equal(t, "data: [DONE]\n\n", end)
	var said struct {
		Error struct{ Code, Message, Type string }
	}
	require.NoError(t, json.Unmarshal([]byte(strings.TrimPrefix(event, "data: ")), &said), body)
	require.NotEmpty(t, said.Error.Message)
	require.NotEmpty(t, said.Error.Type)
	return said.Error.Code
}

// A request is tried again elsewhere while its client gets comments.
func TestRetriesBehindComments(t *testing.T) {
	t.Parallel()
	for _, leg := range []string{refengine.LegProbe, refengine.LegDecode} {
		t.Run(leg, func(t *testing.T) {
			t.Parallel()
			b := start(t, kept(t, setup{prefill: []refengine.Config{{}, {}}, decode: []refengine.Config{{}, {}}}, 2))
			for _, e := range []*refengine.Engine{b.p[0], b.p[1], b.d[0], b.d[1]} {
				if (leg == refengine.LegProbe) == (e == b.p[0] || e == b.p[1]) {
					require.NoError(t, e.SetFaults(dawdling, refengine.Rule{Fault: refengine.Reset, Phase: refengine.PhaseBeforeHeaders, Count: 1}))
					break
				}
			}
			attempts := 0
			for range 2 { // one of them meets the fault
				r := b.post(mooncake.Chat.Path(), chat(short, `"stream":true,`))
				b.over()
				attempts = max(attempts, b.asked[len(b.asked)-1].Record.Attempts)
				if b.asked[len(b.asked)-1].Record.Attempts > 1 {
					require.Positive(t, comments(&r, mooncake.Chat.Path()))
				}
				text, finished, fail := read(t, r)
				require.True(t, finished, fail)
				right(t, reftext.OfUser(short).Answer, text)
			}
			require.Equal(t, 2, attempts)
			b.settle()
		})
	}
}

// dawdling is an engine that lets several spans pass before it answers.
var dawdling = refengine.Rule{Fault: refengine.Slow, DelayMS: int(slowly.Milliseconds()), Tokens: 1}

// A client that leaves behind comments is noticed, and nothing is left of its request.
func TestAClientThatLeavesBehindComments(t *testing.T) {
	t.Parallel()
	b := start(t, kept(t, setup{prefill: []refengine.Config{{Prompts: refengine.Prompts{Base: time.Second}}}}, 2))
	conn, br := b.wire(post(chat(short, `"stream":true,`), "HTTP/1.1"), 0)
	resp, err := http.ReadResponse(br, nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode, "the head is here long before the first token")
	require.NoError(t, conn.Close())
	b.over()
	require.Equal(t, "client_closed", b.asked[0].Record.Outcome)
	b.settle()
}

// post is a request for a chat as it stands on the wire.
func post(body, protocol string) string {
	return fmt.Sprintf("POST %s %s\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", mooncake.Chat.Path(),
		protocol, len(body), body)
}

// The connection is used again behind an answer with comments, whole or failed, and one of HTTP/1.0
// has no chunks and ends.
func TestTheConnectionBehindComments(t *testing.T) {
	t.Parallel()
	for _, loops := range []int{2, 0} {
		t.Run(fmt.Sprint(loops), func(t *testing.T) {
			t.Parallel()
			b := start(t, kept(t, setup{prefill: []refengine.Config{{Prompts: refengine.Prompts{Base: slowly}}}}, loops))
			ask := post(chat(short, `"stream":true,`), "HTTP/1.1")
			conn, br := b.wire(ask, 0)
			for i, fails := range []bool{false, true, false, false} {
				resp, err := http.ReadResponse(br, nil)
				require.NoError(t, err)
				body, err := io.ReadAll(resp.Body)
				require.NoError(t, err)
				r := reply{resp.StatusCode, resp.Header, string(body)}
				require.Positive(t, comments(&r, mooncake.Chat.Path()))
				require.Equal(t, "no", resp.Header.Get("X-Accel-Buffering"))
				_, finished, fail := read(t, r)
				require.Equal(t, fails, fail != "", r.body)
				require.NotEqual(t, fails, finished)
				b.over()
				if err = b.p[0].SetFaults(); i == 0 {
					err = b.p[0].SetFaults(dawdling, refengine.Rule{Fault: refengine.Internal})
				}
				require.NoError(t, err)
				_, err = io.WriteString(conn, ask)
				require.NoError(t, err)
			}
			require.NoError(t, conn.Close())
			old, br := b.wire(post(chat(short, `"stream":true,`), "HTTP/1.0"), 0)
			resp, err := http.ReadResponse(br, nil)
			require.NoError(t, err)
			require.Empty(t, resp.TransferEncoding)
			body, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			r := reply{resp.StatusCode, resp.Header, string(body)}
			require.Positive(t, comments(&r, mooncake.Chat.Path()))
			_, finished, _ := read(t, r)
			require.True(t, finished, r.body)
			_, err = old.Read(make([]byte, 1))
			require.ErrorIs(t, err, io.EOF)
			b.settle()
		})
	}
}

// Comments also come in the middle of an answer: while its engine is silent, and while it goes on
// elsewhere.
func TestCommentsInTheMiddle(t *testing.T) {
	t.Parallel()
	comment := string(sse.Silence(sse.Chunks))
	for name, faults := range map[string][]refengine.Rule{
		"a silent engine":           {{Fault: refengine.Slow, DelayMS: int(slowly.Milliseconds()), Leg: refengine.LegDecode}},
		"an answer that is resumed": {{Fault: refengine.Recomputed, AfterTokens: 3, Count: 1}},
	} {
		for _, loops := range []int{2, 0} {
			t.Run(fmt.Sprintf("%s, %d loops", name, loops), func(t *testing.T) {
				t.Parallel()
				b := start(t, kept(t, setup{prefill: []refengine.Config{{Prompts: refengine.Prompts{Base: slowly}}}}, loops))
				require.NoError(t, b.d[0].SetFaults(faults...))
				body := completion(short, `"stream":true,"max_tokens":6,"ignore_eos":true,`)
				r := b.post(mooncake.Completions.Path(), body)
				b.over()
				comments(&r, mooncake.Completions.Path())
				require.Contains(t, r.body, "\n\n"+comment)
				got := readSeamless(t, r)
				require.Empty(t, got.fail)
				require.Equal(t, 6, right(t, reftext.Of(short).Answer, got.texts[0]))
				b.settle()
			})
		}
	}
}

// An event that is larger than limits.event_bytes reaches its client in pieces. A comment between
// two pieces would be a part of the event.
func TestNoCommentComesInsideAnEvent(t *testing.T) {
	t.Parallel()
	for _, loops := range []int{2, 0} {
		t.Run(fmt.Sprintf("%d loops", loops), func(t *testing.T) {
			t.Parallel()
			const event = `{"id":"x","object":"text_completion","created":1,"model":"ref","choices":[{"index":0,"text":"%s","finish_reason":%s}]}`
			first, large := fmt.Sprintf(event, "a", "null"), fmt.Sprintf(event, strings.Repeat("b", 16<<10), "null")
			last := fmt.Sprintf(event, "c", `"stop"`)
			goOn := make(chan struct{})
			b := start(t, kept(t, setup{
				mixed:     []refengine.Config{{}},
				configure: func(c *config.Config, _ *Deps) { c.Limits.EventBytes = 4 << 10 },
				front: func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
					body, _ := io.ReadAll(r.Body)
					if !strings.Contains(string(body), "large") { // its client waits for its first token
						select {
						case <-goOn:
						case <-r.Context().Done():
						}
						return
					}
					w.Header().Set("Content-Type", "text/event-stream")
					for _, part := range []string{"data: " + first + sse.BlankLine, "data: " + large[:len(large)/2]} {
						_, _ = io.WriteString(w, part)
						_ = http.NewResponseController(w).Flush()
					}
					select {
					case <-goOn:
						_, _ = io.WriteString(w, large[len(large)/2:]+sse.BlankLine+"data: "+last+sse.BlankLine+sse.Done)
					case <-r.Context().Done():
					}
				},
			}, loops))
			said := make(chan reply, 1)
			go func() {
				said <- b.post(mooncake.Completions.Path(), completion("large", `"stream":true,"max_tokens":6,`))
			}()
			b.eventually("half of the event has come", func() bool {
				b.mu.Lock()
				defer b.mu.Unlock()
				return strings.Count(string(b.shown), "b") > 4<<10
			})
			resp, err := http.Post(b.url+mooncake.Completions.Path(), "application/json",
				strings.NewReader(completion("another", `"stream":true,"max_tokens":6,`)))
			require.NoError(t, err)
			defer func() { _ = resp.Body.Close() }()
			_, err = io.ReadFull(resp.Body, make([]byte, 5*len(sse.Silence(sse.Chunks)))) // so that the time of several comments is over
			require.NoError(t, err)
			close(goOn)
			r := <-said
			require.Contains(t, r.body, "data: "+large+sse.BlankLine)
			require.Contains(t, r.body, "data: "+last+sse.BlankLine)
		})
	}
}
