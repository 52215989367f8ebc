package failure

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// seen is an error as its client tells it from others.
func seen(e *openai.Error) string {
	if e.RetryAfter > 0 {
		return fmt.Sprintf("%d %s, retry after %d", e.Status, e.Code, e.RetryAfter)
	}
	return fmt.Sprintf("%d %s", e.Status, e.Code)
}

func TestWhatTheQueueAndThePoolSayIsTranslated(t *testing.T) {
	queue := func(err error) *openai.Error { return UnplacedError("prefill", err, 0, "m", false) }
	pooled := func(err error) *openai.Error { return UnplacedError("decode", err, 7, "m", false) }
	for _, c := range []struct {
		name string
		of   func(error) *openai.Error
		err  error
		want string
	}{
		{"the arrival queue is full", queue, &prefill.FullError{Model: "m"}, "429 queue_full, retry after 1"},
		{"no prefill engine has memory", queue, prefill.ErrKVExhausted, "503 prefill_kv_exhausted, retry after 2"},
		{"the wait for a prefill engine was too long", queue, prefill.ErrQueueTimeout, "503 queue_timeout, retry after 2"},
		{"no prefill engine has the model", queue, prefill.ErrModelNotFound, "404 model_not_found"},
		{"the policy is unknown by now", queue, prefill.ErrBadPolicy, "400 bad_policy"},
		{"the proxy ends", queue, context.Canceled, "503 draining, retry after 1"},
		{"another proxy has the decode group", queue, prefill.ErrElsewhere, "503 not_owner, retry after 1"},
		{"no prefill engine lives", queue, prefill.ErrUnavailable, "503 prefill_unavailable, retry after 1"},
		{"the prompt is larger than any rank", pooled, board.ErrTooLarge, "400 prompt_too_long"},
		{"no rank had room before the prefill", pooled, pool.ErrUnbound, "503 queue_timeout, retry after 2"},
		{"no rank had room after it", pooled, pool.ErrTimeout, "503 pool_timeout, retry after 2"},
		{"the hand-off became too old", pooled, pool.ErrExpired, "503 pool_timeout, retry after 2"},
		{"the dispatcher ends", pooled, board.ErrDraining, "503 draining, retry after 1"},
		{"no engine lives, and each would do both", func(err error) *openai.Error { return UnplacedError("prefill", err, 0, "m", true) }, prefill.ErrUnavailable, "503 engine_unavailable, retry after 1"},
		{"no rank is up, and each would do both", func(err error) *openai.Error { return UnplacedError("decode", err, 7, "m", true) }, board.ErrNoWorkers, "503 engine_unavailable, retry after 1"},
		{"no rank lists the name any more", pooled, board.ErrNotListed, "404 model_not_found"},
		{"no rank is up", pooled, board.ErrNoWorkers, "503 decode_unavailable, retry after 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.want, seen(c.of(fmt.Errorf("request 7: %w", c.err))))
		})
	}
	require.Equal(t, UnplacedError("prefill", prefill.ErrModelNotFound, 0, "m", false),
		UnplacedError("decode", board.ErrNotListed, 7, "m", false))
	require.Equal(t, "model", UnplacedError("prefill", prefill.ErrModelNotFound, 0, "m", false).Param)
	require.Contains(t, UnplacedError("prefill", prefill.ErrModelNotFound, 0, "m", false).Message, `"m"`)
	require.Contains(t, UnplacedError("decode", board.ErrTooLarge, 4711, "m", false).Message, "4711 tokens")
}

// Where an engine stands is the operator's business, so no answer may hold its address.
func TestABrokenCallIsToldWithoutAddresses(t *testing.T) {
	const address = "10.1.2.3:8000"
	broken := func(phase engine.Phase, late bool, err error) error {
		return fmt.Errorf("attempt 2: %w", &engine.Error{Target: address, Phase: phase, Timeout: late, Err: err})
	}
	lost := fmt.Errorf("read tcp %s: connection reset by peer", address)
	for _, c := range []struct {
		name      string
		err       error
		call, cut string // as the answer, and within one that had begun
	}{
		{"it cannot be reached", broken(engine.PhaseConnect, false, lost), "503 decode_unavailable, retry after 1: the decode engine cannot be reached; retry later", "the connection was lost"},
		{"it cannot be reached in time", broken(engine.PhaseConnect, true, lost), "503 decode_unavailable, retry after 1: the decode engine cannot be reached; retry later", "silence for too long"},
		{"its head does not come", broken(engine.PhaseHead, true, lost), "504 decode_timeout: the decode engine was silent for too long", "silence for too long"},
		{"its stream is silent", fmt.Errorf("stream: %w", sse.ErrSilent), "504 decode_timeout: the decode engine was silent for too long", "stream: the engine sent no event in time"},
		{"it hangs up", broken(engine.PhaseHead, false, lost), "502 decode_failed: the decode engine failed: the connection was lost", "the connection was lost"},
		{"it says too much", broken(engine.PhaseBody, false, engine.ErrTooLarge), "502 decode_failed: the decode engine failed: more bytes than allowed", "more bytes than allowed"},
		{"it speaks something else", broken(engine.PhaseHead, false, engine.ErrMalformed), "502 decode_failed: the decode engine failed: not valid HTTP", "not valid HTTP"},
		{"its events are wrong", sse.ErrNotJSON, "502 decode_failed: the decode engine failed: the engine sent an event that is not a JSON object", "the engine sent an event that is not a JSON object"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := NoAnswer("decode", c.err)
			require.Equal(t, c.call, seen(e)+": "+e.Message)
			cut := StreamBroke("upstream_broken", c.err)
			require.Equal(t, "502 upstream_broken: the engine's answer broke off: "+c.cut, seen(cut)+": "+cut.Message)
			require.NotContains(t, string(e.JSON())+string(cut.JSON()), "10.1.2.3")
		})
	}
	require.Equal(t, "engine_unavailable", NoAnswer(Engine, broken(engine.PhaseConnect, false, lost)).Code)
	require.Equal(t, "the engine failed: it answered 500", BadGateway(Engine, "it answered 500").Message)
}

// answers is one call to an engine that answers so.
func answers(t *testing.T, status int, header http.Header, body string) *engine.Response {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for name, values := range header {
			w.Header()[name] = values
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(server.Close)
	at, err := url.Parse(server.URL)
	require.NoError(t, err)
	client := engine.NewClient(engine.Options{})
	t.Cleanup(client.Close)
	wait := 10 * time.Second
	resp, err := client.NewCall(&engine.Target{ID: at.Host, URL: at, Rank: -1}).Do(http.MethodPost, "/", nil, nil,
		engine.Deadlines{Connect: wait, FirstByte: wait, Idle: wait})
	require.NoError(t, err)
	t.Cleanup(resp.Close)
	return resp
}

// An engine's 4xx is the client's business and comes byte for byte. What it says of the proxy's
// credential, and its 5xx, are not.
func TestWhatAnEngineRefusesReachesTheClientOnlyIfItIsTheClientsFault(t *testing.T) {
	const said = `{"error":{"message":"secret of the engine"}}`
	for _, c := range []struct {
		name   string
		status int
		after  string // Retry-After
		body   string
		want   string
		raw    bool // the client gets the engine's body
		alarm  bool
	}{
		{"a bad request", 400, "9", said, "400 engine_refused", true, false},
		{"too many requests", 429, "9", said, "429 engine_refused, retry after 9", true, false},
		{"too many requests, and it does not say until when", 429, "", said, "429 engine_refused, retry after 1", true, false},
		{"our key is wrong", 401, "", said, "502 prefill_failed", false, true},
		{"our key may not", 403, "", said, "502 prefill_failed", false, true},
		{"it is overloaded", 503, "30", said, "503 prefill_unavailable, retry after 30", false, false},
		{"it is overloaded, until a date", 503, "Fri, 31 Dec 2027 23:59:59 GMT", said, "503 prefill_unavailable, retry after 1", false, false},
		{"it is overloaded for a day", 503, "86400", said, "503 prefill_unavailable, retry after 3600", false, false},
		{"it is overloaded for longer than a number holds", 503, "99999999999999999999", said, "503 prefill_unavailable, retry after 3600", false, false},
		{"it is overloaded until before", 503, "-3", said, "503 prefill_unavailable, retry after 1", false, false},
		{"it fails", 500, "30", said, "502 prefill_failed", false, false},
		{"it redirects", 302, "", said, "502 prefill_failed", false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			header := http.Header{"Content-Type": {"application/x-odd"}}
			if c.after != "" {
				header.Set("Retry-After", c.after)
			}
			core, logs := observer.New(zap.ErrorLevel)
			resp := answers(t, c.status, header, c.body)
			e := RefusalError(zap.New(core), "prefill", "p0", resp.StatusCode(), resp, RefusalBody(resp))
			require.Equal(t, c.want, seen(e))
			if c.raw {
				require.Equal(t, c.body, string(e.JSON()))
				require.Equal(t, "application/x-odd", e.ContentType)
			} else {
				require.NotContains(t, string(e.JSON()), "secret of the engine")
			}
			if c.alarm {
				require.Len(t, logs.FilterField(zap.String("engine", "p0")).FilterField(zap.Int("status", c.status)).All(), 1)
			} else {
				require.Zero(t, logs.Len())
			}
		})
	}
}

func TestARefusalWithoutABodyIsPassedOnWithoutOne(t *testing.T) {
	require.Empty(t, RelayedRefusal(404, answers(t, 404, nil, ""), nil).JSON())
}

func TestTheBeginningOfARefusalIsEnough(t *testing.T) {
	resp := answers(t, 400, nil, strings.Repeat("a", maxErrorBody+1))
	require.Len(t, RefusalBody(resp), maxErrorBody)
}

func TestAnErrorEventKeepsItsStatusOnlyIfItRefusesTheRequest(t *testing.T) {
	for status, want := range map[int]string{
		400: "400 c", 404: "404 c", 429: "429 c, retry after 1", 401: "502 c", 403: "502 c", 500: "502 c", 503: "502 c", 200: "502 c", 0: "502 c",
	} {
		e := FromStream(sse.Failure{Status: status, Type: "t", Code: "c", Message: "m"})
		require.Equal(t, want, seen(e), status)
		require.Equal(t, []string{"t", "m"}, []string{e.Type, e.Message})
	}
}

// SGLang blames the request in these words, though no engine could have served it.
func TestKVThatDidNotArriveIsKnownByItsWords(t *testing.T) {
	err := errors.New("it answered 400")
	for said, want := range map[string]bool{
		"KVTransferError(bootstrap_room=7): Decode instance could be dead": true,
		"Prefill transfer failed for request rank=0":                       true,
		"Decode handshake failed for request rank=0":                       true,
		"Prefill bootstrap failed for request rank=0":                      true,
		"timed out in KVPoll.Bootstrapping":                                true,
		"the prompt is too long":                                           false,
		"":                                                                 false,
	} {
		got := MarkUndelivered(err, said)
		require.ErrorIs(t, got, err)
		require.Equal(t, want, errors.Is(got, ErrUndelivered), said)
	}
}

// SGLang answers 400 to a response that failed, with the text of an exception.
func TestTheStatusInTheTextOfARefusal(t *testing.T) {
	for said, want := range map[string]int{
		`{"error":{"message":"500: Decode transfer failed","code":400}}`:        500,
		`{"error":{"message":"503: the queue is full"}}`:                        503,
		`{"error":{"message":"429: too many"}}`:                                 429,
		`{"error":{"message":"400: no"}}`:                                       400,
		`{"error":{"message":"499: no"}}`:                                       400,
		`{"error":{"message":"401: no"}}`:                                       400,
		`{"error":{"message":"600: no"}}`:                                       400,
		`{"error":{"message":"the prompt has 500: too many"}}`:                  400,
		`{"error":{"message":""}}`:                                              400,
		`500: `:                                                                 400,
		`{"type":"error","error":{"type":"api_error","message":"500: a text"}}`: 500,
	} {
		require.Equal(t, want, CorrectStatus("/v1/responses", 400, []byte(said)), said)
		require.Equal(t, 404, CorrectStatus("/v1/responses", 404, []byte(said)), said)
		require.Equal(t, 400, CorrectStatus("/v1/chat/completions", 400, []byte(said)), said)
	}
}

func TestTheLastAttemptIsToldIfNoRankComputesThePromptAlone(t *testing.T) {
	last := openai.NewError(http.StatusBadGateway, "decode_failed", "it answered 500")
	require.Equal(t, "499 client_closed", seen(NoLocalRank(true, last)), "nobody reads what came last")
	require.Same(t, last, NoLocalRank(false, last))
	require.Equal(t, "503 decode_unavailable, retry after 1", seen(NoLocalRank(false, nil)))
}

func TestACauseIsTheErrorAndElseTheAnswersCode(t *testing.T) {
	require.Equal(t, "decode_timeout", (&Fault{ClientError: LateKV}).Cause())
	require.Equal(t, "it was late", (&Fault{ClientError: LateKV, Err: errors.New("it was late")}).Cause())
}

// An engine may write anything into the head of its answer, and the log gets one of few words.
func TestAContentTypeIsToldInOurWords(t *testing.T) {
	for kind, want := range map[string]string{
		"": "no content type", " ; charset=utf-8": "no content type", "text/html; charset=utf-8": "content type text/html",
		"application/json": "content type application/json", "text/plain": "content type text/plain", "text/<script>": "a content type that we do not know",
	} {
		require.Equal(t, want, DescribeContentType([]byte(kind)), kind)
	}
}

// What an engine refuses in an answer with status 200 is the client's; what it says of itself is
// not.
func TestWhatAnEngineSaysWithStatus200(t *testing.T) {
	for answer, status := range map[string]int{
		`{"error":{"message":"temperature must be non-negative","type":"BadRequestError","code":400}}`: 400,
		`{"error":{"message":"later","code":429}}`:                                                     429,
		`{"error":{"message":"no","type":"BadRequestError","code":401}}`:                               0,
		`{"error":{"message":"it failed","code":500}}`:                                                 0,
		`{"error":{"message":"it failed","code":502}}`:                                                 0,
		`{"error":"boom"}`: 0,
	} {
		f := RefusedInAnswer(lifecycle.Prefill,
			fmt.Errorf("prefill a: %w: %w", mooncake.ErrPrefillFailed, &mooncake.SaidError{Answer: []byte(answer)}))
		if status == 0 {
			require.Nil(t, f, answer)
			continue
		}
		require.Equal(t, status, f.Status)
		require.Equal(t, status, f.ClientError.Status)
		require.Equal(t, lifecycle.ReasonOfStatus(status), f.Reason)
		require.NotContains(t, f.Err.Error(), "temperature", "it may repeat the prompt")
	}
	require.Nil(t, RefusedInAnswer(lifecycle.Prefill, errors.New("another")))
}
