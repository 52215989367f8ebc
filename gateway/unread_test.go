package gateway_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// long asks for an answer of a few hundred KB.
const long = `"ignore_eos":true,"max_tokens":400,"logprobs":true,"top_logprobs":20,`

// longCompletion is long for an endpoint whose logprobs are a number.
const longCompletion = `"ignore_eos":true,"max_tokens":4000,"logprobs":20,`

// unread sends a request of a key, and reads nothing.
func (c *cluster) unread(key, path, body string) net.Conn {
	c.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(c.URL, "http://"))
	require.NoError(c, err)
	c.Cleanup(func() { _ = conn.Close() })
	require.NoError(c, conn.(*net.TCPConn).SetReadBuffer(16<<10))
	_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"+
		"Content-Length: %d\r\n\r\n%s", path, key, len(body), body)
	require.NoError(c, err)
	return conn
}

// bodies is evenkeel_bodies_bytes.
func (c *cluster) bodies() int { return int(c.Metric("evenkeel_bodies_bytes")) }

// unreadOptions are those of a cluster whose sockets keep little of what clients do not read.
func unreadOptions(t *testing.T, bodies int, keys ...string) options {
	file := filepath.Join(t.TempDir(), "keys.yaml")
	refclient.KeyFile(t, file, keys...)
	step := refengine.Steps{C0: 100_000, TokensPerChunk: 8} // 100 µs
	return options{decode: []refengine.Config{{DPSize: 2, Slots: 16, Steps: step}}, configure: func(cfg *config.Config) {
		cfg.KeysFile, cfg.Limits.WriteTimeout, cfg.Limits.ClientBacklog = file, patience, 16<<10
		cfg.Limits.Body, cfg.Limits.Bodies = 1<<20, bodies
		cfg.Limits.KeepAlive = 0
	}}
}

// The engines are done with a request whose answer its client does not read. The answer still
// counts for its key, which may have few at once.
func TestAnAnswerThatItsClientDoesNotReadIsStillRunning(t *testing.T) {
	t.Parallel()
	c := start(t, unreadOptions(t, 1<<30, "few ek-few , max_concurrent: 4"))
	var clients []net.Conn
	for i := range 4 {
		conn := c.unread("ek-few", refclient.ChatPath, chat(fmt.Sprint("story ", i), long))
		c.Eventually("its answer waits", func() bool { return c.bodies() > (i+1)*200<<10 })
		clients = append(clients, conn)
	}
	c.Eventually("the engines are done", func() bool { return c.Decode[0].Stats().Running == 0 })
	ask := func() reply { return c.Post(refclient.ChatPath, chat("a", ""), "Authorization", "Bearer ek-few") }
	r := ask()
	require.Equal(t, http.StatusTooManyRequests, r.Status, r.Body)
	require.Contains(t, r.Body, "queue_full")

	resp, err := http.ReadResponse(bufio.NewReader(clients[0]), nil)
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Greater(t, len(body), 200<<10)
	require.Equal(t, http.StatusOK, ask().Status, "a client that has its answer has room for the next one")
	for _, conn := range clients[1:] {
		require.NoError(t, conn.Close())
	}
	c.Eventually("nothing is charged", func() bool { return c.bodies() == 0 })
}

// One caller's answers take no more memory than its bodies may.
func TestAnswersThatAreNotReadLeaveRoomForOthers(t *testing.T) {
	t.Parallel()
	c := start(t, unreadOptions(t, 2<<20, "greedy ek-greedy", "modest ek-modest"))
	refused := func() int { return int(c.Metric(`evenkeel_requests_total{outcome="overloaded"}`)) }
	for i := range 6 {
		bodies, before := c.bodies(), refused()
		conn := c.unread("ek-greedy", refclient.ChatPath, chat(fmt.Sprint("story ", i), long))
		c.Eventually("it waits, or is refused", func() bool { return c.bodies() > bodies+200<<10 || refused() > before })
		if refused() > before {
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			require.NoError(t, err)
			require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
			require.Equal(t, "1", resp.Header.Get("Retry-After"))
			require.NoError(t, resp.Body.Close())
		}
	}
	require.NotZero(t, refused())
	require.LessOrEqual(t, c.bodies(), 1<<20, "as much as is free for others")
	r := c.Post(refclient.ChatPath, chat("another caller", long), "Authorization", "Bearer ek-modest")
	require.Equal(t, http.StatusOK, r.Status, r.Body)
}

// Whoever wrote an answer, it is charged until its client has it.
func TestEveryLongAnswerIsCharged(t *testing.T) {
	t.Parallel()
	o := unreadOptions(t, 1<<30, "one ek-one")
	o.profile.NonStream = mooncake.NonStreamAssemble
	o = takesMessages(o)
	c := start(t, o)
	text, longText := strings.Repeat("a ", 20<<10), strings.Repeat("word ", 30<<10) // a stream echoes the text without logprobs
	for name, row := range map[string]struct{ path, body string }{
		"a chat":                      {refclient.ChatPath, chat("a", long)},
		"a completion":                {"/v1/completions", completion("a", longCompletion)},
		"several answers":             {refclient.ChatPath, chat("a", long+`"n":3,`)},
		"an echo":                     {"/v1/completions", completion(text, `"echo":true,"logprobs":5,"max_tokens":2,`)},
		"logprobs of a prompt":        {"/v1/completions", completion(text, `"prompt_logprobs":5,"max_tokens":1,`)},
		"an echo by a prefill engine": {"/v1/completions", completion(longText, `"echo":true,"logprobs":5,"max_tokens":1,"stream":true,`)},
		"echoes by prefill engines":   {"/v1/completions", completion(longText, `"echo":true,"logprobs":5,"max_tokens":1,"stream":true,"n":2,`)},
		"a response":                  {"/v1/responses", fmt.Sprintf(`{"model":%q,"max_output_tokens":20000,"ignore_eos":true,"input":"a"}`, model)},
		"tokens":                      {"/tokenize", fmt.Sprintf(`{"model":%q,"prompt":%q}`, model, text)},
	} {
		t.Run(name, func(t *testing.T) {
			read := c.Post(row.path, row.body, "Authorization", "Bearer ek-one")
			require.Equal(t, http.StatusOK, read.Status, read.Body)
			require.Greater(t, len(read.Body), 100<<10)
			requests := func() int64 { return c.Prefill[0].Stats().Requests + c.Decode[0].Stats().Requests }
			before := requests()
			conn := c.unread("ek-one", row.path, row.body)
			require.Eventually(t, func() bool {
				isRead := requests() > before || row.path == "/tokenize" // which its engine does not count
				return isRead && c.bodies() > len(read.Body)/2 && c.Prefill[0].Stats().Running+c.Decode[0].Stats().Running == 0
			}, patience, time.Millisecond)
			require.NoError(t, conn.Close())
			require.Eventually(t, func() bool { return c.bodies() == 0 }, patience, time.Millisecond)
		})
	}
}

// So are those that another region gave.
func TestAForwardedAnswerThatIsNotReadIsCharged(t *testing.T) {
	t.Parallel()
	here, there := unreadOptions(t, 1<<30, "one ek-one"), unreadOptions(t, 1<<30, "one ek-one")
	more := here.configure
	here.configure = func(cfg *config.Config) { more(cfg); remote(cfg) }
	us, eu := pair(t, here, there)
	for name, body := range map[string]string{"one": chat("a", long), "several": chat("a", long+`"n":2,`)} {
		conn := us.unread("ek-one", refclient.ChatPath, body)
		us.Eventually(name+" waits", func() bool { return us.bodies() > 200<<10 })
		require.Zero(t, us.Decode[0].Stats().Requests)
		eu.Eventually("the other region is done", func() bool { return eu.bodies() == 0 })
		require.NoError(t, conn.Close())
		us.Eventually("nothing is charged", func() bool { return us.bodies() == 0 })
	}
}
