package refengine

import (
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/reftext"
)

// inRoom is what a proxy adds to both legs of a request to SGLang.
func (p pair) inRoom(room int, more string) string {
	at, err := url.Parse(p.p.URLs()[0])
	require.NoError(p, err)
	return fmt.Sprintf(`%s"bootstrap_host":%q,"bootstrap_port":%s,"bootstrap_room":%d,`, more, at.Hostname(), at.Port(), room)
}

const streaming = `"stream":true,`

// sglang starts engines whose time limits do not hold a test up.
func sglang(t *testing.T, limit time.Duration, shared Config) pair {
	shared.Connector = SGLang
	shared.SGLang.BootstrapTimeout, shared.SGLang.WaitingTimeout = limit, limit
	return pairOf(t, shared)
}

const patient = time.Minute

// both sends both legs at the same time, as a right proxy does, and returns what the clients of
// either get.
func (p pair) both(prompt, more string) (prefill reply, decode stream) {
	p.Helper()
	first, second := p.post(p.p, "p", prompt, more), p.post(p.d, "d", prompt, more)
	prefill = <-first.got
	return prefill, p.stream(second)
}

func TestBothLegsOfSGLangMeetInTheirRoom(t *testing.T) {
	p := sglang(t, patient, Config{Answers: Answers{PromptTokensDetails: true, ReasoningTokens: 2}})
	prompt := reftext.MakePrompt(1, 300)
	key := reftext.OfUser(prompt).Answer
	r, s := p.both(prompt, p.inRoom(1<<62, streaming+`"rid":"r-1","stream_options":{"include_usage":true,"continuous_usage_stats":true},`))
	require.Equal(t, 200, r.status, r.body)
	first := parseStream(t, r.body)
	require.Equal(t, "length", first.finish)
	require.Equal(t, usage{Prompt: 300, Completion: 1, Total: 301, Details: first.usage.Details}, *first.usage)

	n := reftext.NaturalLength(key)
	text := ""
	for _, event := range s.events {
		require.NotContains(t, event, "token_ids")
		require.NotContains(t, event, "stop_reason")
		require.NotContains(t, event, "fingerprint")
		text += event
	}
	require.Contains(t, text, `"delta":{"reasoning_content":"`)
	require.Contains(t, text, `"finish_reason":null,"matched_stop":null`)
	require.Contains(t, s.events[len(s.events)-2], `"delta":{},"logprobs":null,"finish_reason":"stop","matched_stop":2}],"usage":null}`, "the end has no content and no usage")
	require.Contains(t, s.events[0], `"role":"assistant","content":""},"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}`)
	require.Equal(t, "r-1", s.id)
	require.True(t, s.done)
	require.Equal(t, n+1, s.usages, "every token, final event")
	require.Equal(t, reftext.Text(key, n), reftext.Text(key, 2)+s.content)
	require.Zero(t, s.usage.Details.Cached, "what the prefill engine had")
	p.nothingHeld()
}

func TestAnAnswerOfSGLangInOnePiece(t *testing.T) {
	p := sglang(t, patient, Config{})
	first := p.post(p.p, "p", "a b", p.inRoom(5, `"max_tokens":4,`))
	r := <-p.post(p.d, "d", "a b", p.inRoom(5, `"max_tokens":4,`)).got
	require.Equal(t, 200, r.status, r.body)
	require.Contains(t, r.body, `"finish_reason":"length","matched_stop":null}],"usage":{"prompt_tokens":2,"total_tokens":6,"completion_tokens":4,"reasoning_tokens":0},"metadata"`)
	require.NotContains(t, r.body, "kv_transfer_params")
	require.Contains(t, (<-first.got).body, `"completion_tokens":1,`)
}

func TestAPrefillOfSGLangDoesNotBeginBeforeItsDecodeEngineIsThere(t *testing.T) {
	p := sglang(t, 50*time.Millisecond, Config{})
	r := <-p.post(p.p, "p", "a b", p.inRoom(1, "")).got // a proxy that awaits the prefill before it sends the decode
	require.Equal(t, 500, r.status)
	require.Contains(t, r.body, `timed out after 50ms in KVPoll.Bootstrapping"`)
	require.Zero(t, p.p.Stats().Tokens)
	require.EqualValues(t, 1, p.p.Stats().RoomTimeouts)
}

func TestARoomBelongsToOneRank(t *testing.T) {
	for _, row := range []struct {
		name            string
		room            int
		prefill, decode string // what the legs say of ranks
		right           bool
	}{
		{"the room says it", 6, ``, ``, true},
		{"all say the same", 6, `"routed_dp_rank":2,`, `"routed_dp_rank":1,"disagg_prefill_dp_rank":2,`, true},
		{"the prefill leg names another", 6, `"routed_dp_rank":3,`, `"disagg_prefill_dp_rank":3,`, false},
		{"the decode leg names another", 6, `"routed_dp_rank":2,`, `"disagg_prefill_dp_rank":1,`, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			limit := 60 * time.Millisecond
			if row.right {
				limit = patient
			}
			p := sglang(t, limit, Config{DPSize: 4, DPMode: "internal"})
			first, second := p.post(p.p, "p", "a b", p.inRoom(row.room, streaming+row.prefill)),
				p.post(p.d, "d", "a b", p.inRoom(row.room, streaming+row.decode))
			require.Equal(t, row.right, p.stream(first).errorMessage == "")
			s := p.stream(second)
			require.Equal(t, row.right, p.right("a b", s))
			if !row.right {
				require.Contains(t, s.errorMessage, "KVTransferError", "it waited as long as it may, for nobody told it")
			}
		})
	}
}

func TestARequestToSGLangNeedsARoom(t *testing.T) {
	p := sglang(t, patient, Config{})
	for more, says := range map[string]string{
		``:                       "Disaggregated request received without bootstrap room id",
		`"bootstrap_room":1,`:    "bootstrap_host",
		`"bootstrap_room":"a",`:  "of the wrong type",
		`"bootstrap_room":-1,`:   "without bootstrap room",
		`"bootstrap_room":[1],`:  "of the wrong type",
		`"bootstrap_room":null,`: "without bootstrap room",
	} {
		r := <-p.post(p.d, "d", "a b", more).got
		require.Equal(t, 400, r.status)
		require.Contains(t, r.body, says)
	}
	require.EqualValues(t, 400, (<-p.post(p.p, "p", "a b", p.inRoom(1, `"routed_dp_rank":"x",`)).got).status)
	require.Error(t, Config{Connector: SGLang}.WithDefaults().Validate(), "an engine for both")
}

// Who closes the answer of the prefill before its end has aborted it.
func TestAPrefillWhoseAnswerIsNotReadIsAborted(t *testing.T) {
	p := sglang(t, 100*time.Millisecond, Config{KV: KV{TransferBase: time.Second}})
	first, second := p.post(p.p, "p", "a b", p.inRoom(1, streaming)), p.post(p.d, "d", "a b", p.inRoom(1, streaming))
	eventually(t, "it is in its transfer", func() bool { return p.p.Stats().Tokens == 1 })
	first.leave()
	require.Contains(t, p.stream(second).errorMessage, "no KV came within 100ms")
	require.EqualValues(t, 1, p.d.Stats().RoomTimeouts)
	p.nothingHeld()
}

func TestADecodeEngineGivesUpWhenThePrefillEngineIsGone(t *testing.T) {
	p := sglang(t, patient, Config{SGLang: SGLangOptions{Heartbeat: 5 * time.Millisecond}})
	second := p.post(p.d, "d", "a b", p.inRoom(1, streaming))
	eventually(t, "it waits", func() bool { return p.d.Stats().KVUsed > 0 })
	p.p.Kill()
	require.Contains(t, p.stream(second).errorMessage, "bootstrap")
	require.Contains(t, p.stream(p.post(p.d, "d", "a b", p.inRoom(2, streaming))).errorMessage, "bootstrap", "nor does it begin")
}

func TestARoomUsedAgainGivesTheOtherRequestsText(t *testing.T) {
	p := sglang(t, 100*time.Millisecond, Config{})
	_, s := p.both("a b", p.inRoom(7, streaming))
	require.True(t, p.right("a b", s))
	_, s = p.both("c d e", p.inRoom(7, streaming))
	require.False(t, p.right("c d e", s))
	require.True(t, p.right("a b", s), "another client's answer")
	require.EqualValues(t, 1, p.p.Stats().Replays)
}

func TestLegsThatSampleDifferentlyGiveWrongText(t *testing.T) {
	p := sglang(t, patient, Config{})
	p.post(p.p, "p", "a b", p.inRoom(1, streaming))
	require.False(t, p.right("a b", p.stream(p.post(p.d, "d", "a b", p.inRoom(1, streaming+`"temperature":0.5,`)))))
	require.EqualValues(t, 1, p.d.Stats().SampledApart)
}

func TestAbortTakesAllWhoseIDBeginsSo(t *testing.T) {
	abort := func(p pair, e *Engine, body string) {
		require.Equal(t, 200, do(p.c, "POST", e.URLs()[0]+"/abort_request", body).status)
	}
	p := sglang(t, patient, Config{})
	waiting := func(room int, rid string) pending {
		return p.post(p.p, rid, "a b", p.inRoom(room, fmt.Sprintf(`%s"rid":%q,`, streaming, rid)))
	}
	one, twelve, two := waiting(1, "r-1"), waiting(2, "r-12"), waiting(3, "r-2")
	eventually(t, "all wait", func() bool {
		return strings.Contains(do(p.c, "GET", p.p.URLs()[0]+"/metrics", "").body, `bootstrap_queue_reqs{model_name="ref",engine_type="prefill",tp_rank="0",pp_rank="0",dp_rank="0"} 3`)
	})
	abort(p, p.p, `{"rid":"r-1"}`)
	require.Equal(t, "abort", p.stream(one).finish)
	require.Equal(t, "abort", p.stream(twelve).finish, "a longer id begins with it")
	second := p.post(p.d, "d", "a b", p.inRoom(3, streaming))
	require.True(t, p.right("a b", p.stream(second)))
	require.Equal(t, "length", p.stream(two).finish)

	three := p.post(p.d, "d2", "a b", p.inRoom(4, `"rid":"x",`))
	eventually(t, "it waits", func() bool { return p.d.Stats().KVUsed > 0 })
	abort(p, p.d, `{"rid":""}`)
	require.Contains(t, (<-three.got).body, `"finish_reason":"abort"`, "an empty id begins them all")
	p.nothingHeld()
}

// The decode leg must not end before the prefill leg: its pages are given away while they are
// written.
func TestPagesThatAreFreedTooEarlySpoilTheNextRequest(t *testing.T) {
	for name, early := range map[string]bool{"decode first": true, "prefill first": false} {
		t.Run(name, func(t *testing.T) {
			p := sglang(t, patient, Config{})
			require.NoError(t, p.p.SetFaults(Rule{Fault: BootstrapSlow, DelayMS: 100, Count: 1}))
			first, second := p.post(p.p, "p", "a b", p.inRoom(1, streaming)), p.post(p.d, "d", "a b", p.inRoom(1, streaming))
			eventually(t, "both wait", func() bool { return p.d.Stats().KVUsed > 0 && p.p.Stats().Probes == 1 })
			if !early {
				first.leave()
			}
			second.leave()
			eventually(t, "its pages are free", func() bool { return p.d.Stats().KVUsed == 0 })
			victim := p.post(p.d, "d2", "c d e", p.inRoom(2, streaming))
			eventually(t, "it has them", func() bool { return p.d.Stats().KVUsed > 0 })
			if early {
				require.Equal(t, "length", p.stream(first).finish, "the prefill engine writes as if nothing had happened")
			}
			p.post(p.p, "p2", "c d e", p.inRoom(2, streaming))
			require.Equal(t, !early, p.right("c d e", p.stream(victim)))
			require.Equal(t, early, p.d.Stats().FreedWrites == 1)
		})
	}
}

func TestAPrefillThatIsAbortedMayAnswer200(t *testing.T) {
	p := sglang(t, patient, Config{})
	require.NoError(t, p.p.SetFaults(Rule{Fault: PrefillAbort200}))
	prompt := reftext.MakePrompt(1, 300)
	r, s := p.both(prompt, p.inRoom(1, streaming+`"stream_options":{"include_usage":true},`))
	first := parseStream(t, r.body)
	require.Equal(t, "length", first.finish)
	require.Equal(t, 150, first.usage.Prompt, "only its usage shows it")
	require.False(t, p.right(prompt, s))
	require.Empty(t, s.errorMessage)
}

func TestABootstrapMayBeSlow(t *testing.T) {
	for limit, right := range map[time.Duration]bool{patient: true, 20 * time.Millisecond: false} {
		p := sglang(t, limit, Config{})
		require.NoError(t, p.p.SetFaults(Rule{Fault: BootstrapSlow, DelayMS: 40}))
		r, s := p.both("a b", p.inRoom(1, streaming))
		require.Equal(t, right, parseStream(t, r.body).errorMessage == "")
		require.Equal(t, right, p.right("a b", s))
	}
}

// How a failed transfer looks in a stream is read in a copy of the source [?].
func TestInferredATransferThatFailsIsAnErrorEvent(t *testing.T) {
	for fault, says := range map[Fault]string{FailedSent: "the prefill engine has failed", DoneLost: "no KV came within"} {
		p := sglang(t, 100*time.Millisecond, Config{})
		require.NoError(t, p.p.SetFaults(Rule{Fault: fault}))
		r, s := p.both("a b", p.inRoom(1, streaming))
		require.Equal(t, 200, r.status)
		require.Contains(t, s.errorMessage, says)
		require.Contains(t, s.errorMessage, `"code":500`)
		require.True(t, s.done)
		require.Empty(t, s.content)
	}
	p := sglang(t, 100*time.Millisecond, Config{})
	require.Equal(t, 500, (<-p.post(p.d, "d", "a b", p.inRoom(1, "")).got).status, "without a stream it is a status")
}

func TestWhatSGLangTellsOfItself(t *testing.T) {
	p := sglang(t, patient, Config{})
	get := func(e *Engine, path string) reply { return do(p.c, "GET", e.URLs()[0]+path, "") }
	require.Equal(t, 404, get(p.d, "/version").status)
	page := get(p.d, "/metrics").body
	for _, name := range []string{"num_running_reqs", "num_queue_reqs", "token_usage", "num_used_tokens", "max_total_num_tokens",
		"num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs"} {
		require.Contains(t, page, "\nsglang:"+name+`{model_name="ref",engine_type="decode",tp_rank="0",pp_rank="0",dp_rank="0"} `)
	}
	require.NotContains(t, page, "vllm:")
	require.NotContains(t, page, "sglang:realtime_tokens_total{", "no series before the first token")
	require.Contains(t, get(p.p, "/metrics").body, "sglang:num_prefill_inflight_queue_reqs")
}

// It counts tokens as it makes them, the first of an answer where its prompt was computed, and
// lengths once a request has ended.
func TestWhatSGLangCounts(t *testing.T) {
	p := sglang(t, patient, Config{})
	r, s := p.both("a b", p.inRoom(1, streaming+`"max_tokens":5,`))
	require.Equal(t, 200, r.status)
	require.True(t, s.done)
	eventually(t, "the request has left", func() bool { return p.d.Stats().Running == 0 })
	page := do(p.c, "GET", p.d.URLs()[0]+"/metrics", "").body
	for _, line := range []string{
		`sglang:realtime_tokens_total{model_name="ref",engine_type="decode",tp_rank="0",pp_rank="0",dp_rank="0",mode="decode"} 4`,
		`sglang:generation_tokens_histogram_bucket{model_name="ref",le="5.0"} 1`,
		`sglang:generation_tokens_histogram_sum{model_name="ref"} 5`, `sglang:prompt_tokens_histogram_count{model_name="ref"} 1`,
	} {
		require.Contains(t, page, "\n"+line+"\n")
	}
	require.NotContains(t, page, `mode="prefill_compute"`)
	page = do(p.c, "GET", p.p.URLs()[0]+"/metrics", "").body
	require.Contains(t, page, `engine_type="prefill",tp_rank="0",pp_rank="0",dp_rank="0",mode="prefill_compute"} `)
	require.NotContains(t, page, `mode="decode"`)
}

// A request whose KV is on its way has a place of its own, of which there are two for each slot.
func TestSGLangHasPlacesForRequestsWhoseKVIsOnItsWay(t *testing.T) {
	p := sglang(t, patient, Config{Slots: 1})
	for i := range 4 {
		p.post(p.d, fmt.Sprint("d", i), "a b", p.inRoom(i, streaming))
	}
	eventually(t, "three have blocks, one waits for a place", func() bool {
		return strings.Contains(do(p.c, "GET", p.d.URLs()[0]+"/metrics", "").body, `decode_transfer_queue_reqs{model_name="ref",engine_type="decode",tp_rank="0",pp_rank="0",dp_rank="0"} 3`) &&
			p.d.Stats().Waiting == 4
	})
}

// sglangRanks is a server of SGLang with several ranks behind one port.
func sglangRanks(t *testing.T, cfg Config) (*Engine, pair) {
	cfg.Connector, cfg.DPMode = SGLang, "internal"
	e := start(t, cfg)
	return e, pair{T: t, p: e, d: e, c: client(t)}
}

const scores = `{"model":"ref","query":"a","items":["b"],"label_token_ids":[1]}`

// Read in 0.5.23: managers/data_parallel_controller.py, follow_bootstrap_room_scheduler and
// maybe_external_dp_rank_routing. The controller catches no exception, and its parent process ends
// the whole server.
func TestWhatEndsAServerOfSGLang(t *testing.T) {
	masked := []Rule{{Fault: MaskedRank, Rank: new(1)}}
	for _, row := range []struct {
		name       string
		cfg        Config
		path, body string
		status     int // 0: it is gone
	}{
		{"a score has no room", Config{Role: Prefill, DPSize: 2}, "/v1/score", scores, 0},
		{"an order has no room", Config{Role: Prefill, DPSize: 2}, "/v1/rerank", `{"model":"ref","query":"a","documents":["b"]}`, 0},
		{"a completion without a room", Config{Role: Prefill, DPSize: 2}, "/v1/completions", `{"model":"ref","prompt":"a"}`, 0},
		{"a rank is named instead", Config{Role: Prefill, DPSize: 2}, "/v1/completions", `{"model":"ref","prompt":"a","routed_dp_rank":1}`, 400},
		{"a rank that is not there", Config{Role: Prefill, DPSize: 2}, "/v1/completions", `{"model":"ref","prompt":"a","routed_dp_rank":2}`, 400},
		{"one rank has no controller", Config{Role: Prefill}, "/v1/score", scores, 400},
		{"the ranks of a decode server take turns", Config{Role: Decode, DPSize: 2}, "/v1/completions", `{"model":"ref","prompt":"a"}`, 400},
		{"unless they follow the room", Config{Role: Decode, DPSize: 2, SGLang: SGLangOptions{LoadBalance: "follow_bootstrap_room"}},
			"/v1/completions", `{"model":"ref","prompt":"a"}`, 0},
		{"a vector is not made", Config{Role: Prefill, DPSize: 2}, "/v1/embeddings", `{"model":"ref","input":"a"}`, 400},
		{"the first rank before the first", Config{Role: Prefill, DPSize: 2}, "/v1/completions", `{"model":"ref","prompt":"a","routed_dp_rank":-1}`, 400},
		{"a rank without a GPU is named", Config{Role: Decode, DPSize: 2, Faults: masked}, "/v1/completions", `{"model":"ref","prompt":"a","routed_dp_rank":1}`, 0},
		{"another one is named", Config{Role: Decode, DPSize: 2, Faults: masked}, "/v1/completions", `{"model":"ref","prompt":"a","routed_dp_rank":0}`, 400},
		{"none is named", Config{Role: Decode, DPSize: 2, Faults: masked}, "/v1/completions", `{"model":"ref","prompt":"a"}`, 400},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel() // /health takes a second
			e, p := sglangRanks(t, row.cfg)
			resp, err := p.c.Post(e.URLs()[0]+row.path, "application/json", strings.NewReader(row.body))
			if err == nil {
				_ = resp.Body.Close()
			}
			if row.status != 0 {
				require.NoError(t, err)
				require.Equal(t, row.status, resp.StatusCode)
				require.Equal(t, 200, do(p.c, "GET", e.URLs()[0]+"/health", "").status)
				return
			}
			require.Error(t, err, "nothing answers")
			require.EqualValues(t, 1, e.Stats().Crashes)
			require.NoError(t, e.Revive())
			require.Equal(t, 200, do(p.c, "GET", e.URLs()[0]+"/health", "").status)
		})
	}
}

// Read in 0.5.23: disaggregation/common/conn.py, CommonKVSender.
func TestARankOfSGLangChecksItsRoom(t *testing.T) {
	for _, row := range []struct {
		name    string
		prefill Config
		rank    string // in the prefill leg, besides routed_dp_rank
		right   bool
		posts   int64
	}{
		{"with DP attention each rank knows its number", Config{}, ``, true, 0},
		{"a replica takes itself for the first", Config{SGLang: SGLangOptions{Replicas: true}}, ``, false, 0},
		{"and does not look where the leg says the rank", Config{SGLang: SGLangOptions{Replicas: true}}, `"disagg_prefill_dp_rank":3,`, true, 0},
		{"ranks that take turns tell the bootstrap server", Config{SGLang: SGLangOptions{LoadBalance: "round_robin"}}, ``, true, 1},
		{"unless the leg says the rank", Config{SGLang: SGLangOptions{LoadBalance: "round_robin"}}, `"disagg_prefill_dp_rank":3,`, true, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			limit := 60 * time.Millisecond
			if row.right {
				limit = patient
			}
			cfg := row.prefill
			cfg.Role, cfg.DPSize, cfg.SGLang.WaitingTimeout = Prefill, 4, limit
			e, p := sglangRanks(t, cfg)
			p.d, _ = sglangRanks(t, Config{Role: Decode, SGLang: SGLangOptions{WaitingTimeout: limit}})
			first := p.post(e, "p", "a b", p.inRoom(7, streaming+`"routed_dp_rank":3,`+row.rank))
			second := p.post(p.d, "d", "a b", p.inRoom(7, streaming+`"disagg_prefill_dp_rank":3,`))
			says := p.stream(first).errorMessage
			require.Equal(t, row.right, says == "", says)
			require.Equal(t, row.right, p.right("a b", p.stream(second)))
			require.Equal(t, row.posts, e.Stats().RankPosts)
		})
	}
}

// Read in 0.5.23: arg_groups/pd_disaggregation_hook.py. No other request finds KV that an aborted
// prefill has left.
func TestADecodeRankOfSGLangKeepsNoPrefixes(t *testing.T) {
	p := sglang(t, patient, Config{KV: KV{PrefixCache: 64}})
	prompt := reftext.MakePrompt(1, 300)
	require.NoError(t, p.p.SetFaults(Rule{Fault: PrefillAbort200, Count: 1}))
	_, s := p.both(prompt, p.inRoom(1, streaming))
	require.False(t, p.right(prompt, s))
	_, s = p.both(prompt, p.inRoom(2, streaming))
	require.True(t, p.right(prompt, s))
	require.Zero(t, p.d.Stats().BadHits)
}

// Read in 0.5.23: disaggregation/fake/conn.py. SGLang warms its ranks up in this way.
func TestSGLangRunsARequestAloneWithItsFakeHost(t *testing.T) {
	p := sglang(t, patient, Config{KV: KV{PrefixCache: 8}})
	prompt := reftext.MakePrompt(1, 300)
	for _, e := range []*Engine{p.p, p.d} {
		r := <-p.post(e, "alone", prompt, `"bootstrap_host":"2.2.2.2","bootstrap_port":1,"bootstrap_room":0,"max_tokens":2,"ignore_eos":true,`).got
		require.Equal(t, 200, r.status, r.body)
		require.Contains(t, r.body, `"finish_reason":"length"`)
	}
	_, s := p.both(prompt, p.inRoom(1, streaming))
	require.True(t, p.right(prompt, s), "the pages of the other one are in no cache")
	require.Zero(t, p.d.Stats().BadHits)
	p.nothingHeld()
}

// Read in 0.5.23: entrypoints/openai/serving_completions.py, serving_chat.py.
func TestOnlyCompletionsOfSGLangTellTokenIDs(t *testing.T) {
	p := sglang(t, patient, Config{})
	at := func(e *Engine, path, body string) pending {
		r := pending{got: make(chan reply, 1)}
		go func() { r.got <- do(p.c, "POST", e.URLs()[0]+path, body) }()
		return r
	}
	body := func(room int, stream string) string {
		return fmt.Sprintf(`{"model":"ref","prompt":"a b",%s"return_token_ids":true,"max_tokens":3}`, p.inRoom(room, stream))
	}
	first := at(p.p, "/v1/completions", body(1, streaming))
	s := parseStream(t, (<-at(p.d, "/v1/completions", body(1, streaming)).got).body)
	ids := fmt.Sprintf(`"prompt_token_ids":[%d,%d]`, reftext.Of("a b").IDs[0], reftext.Of("a b").IDs[1])
	require.Len(t, s.events, 3)
	require.Contains(t, s.events[0], ids)
	require.NotContains(t, s.events[1], "prompt_token_ids")
	for _, event := range s.events {
		require.Contains(t, event, `"token_ids":[`)
	}
	require.Contains(t, (<-first.got).body, ids)
	first = at(p.p, "/v1/completions", body(2, ""))
	require.Contains(t, (<-at(p.d, "/v1/completions", body(2, "")).got).body, ids)
	<-first.got

	r := <-p.post(p.d, "d", "a b", p.inRoom(3, streaming+`"return_token_ids":true,`)).got
	require.Equal(t, 400, r.status)
	require.Contains(t, r.body, "not supported with streaming on /v1/chat/completions")
}
