package refengine

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The wire forms of SGLang 0.5.23 where a proxy reads them, of requests that no prefill engine
// meets.
func TestHowSGLangRefusesAResponseAndAMessage(t *testing.T) {
	p := sglang(t, 50*time.Millisecond, Config{})
	const message, response = `{%s"model":"ref","max_tokens":9,"messages":[{"role":"user","content":"a b"}]}`, `{%s"model":"ref","input":"a b"}`
	const roomless = "Invalid request: Disaggregated request received without bootstrap room id."
	lone := p.inRoom(7, "")
	for _, row := range []struct {
		name, path, form, more string
		status                 int
		says                   []string // of the answer, in this order
	}{
		{"a message without a room", "/v1/messages", message, "", 400, []string{`{"error":{"message":"` + roomless + `","type":"BadRequestError"},"type":"error"}`}},
		{"a message without a room, streamed", "/v1/messages", message, streaming, 200, []string{"event: message_start\n", "event: error\n", roomless, "event: message_stop\n"}},
		{"a response without a room", "/v1/responses", response, "", 400, []string{`"message":"` + roomless + `"`}},
		{"a response without a room, streamed", "/v1/responses", response, streaming, 200, []string{"event: response.created\n", "event: response.in_progress\n", "event: response.failed\n", `"code":"server_error","message":"` + roomless}},
		{"a message whose prefill nobody meets", "/v1/messages", message, lone, 500, []string{`"message":"Internal server error","type":"api_error"`}},
		{"a message whose prefill nobody meets, streamed", "/v1/messages", message, lone + streaming, 200, []string{"event: error\n", "KVTransferError", `"type":"api_error"`, "event: message_stop\n"}},
		{"a response whose prefill nobody meets", "/v1/responses", response, lone, 400, []string{`"message":"500: Prefill bootstrap failed`, "KVTransferError"}},
		{"a response whose prefill nobody meets, streamed", "/v1/responses", response, lone + streaming, 200, []string{"event: response.failed\n", "KVTransferError"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := do(p.c, "POST", p.p.URLs()[0]+row.path, fmt.Sprintf(row.form, row.more))
			require.Equal(t, row.status, r.status, r.body)
			rest := r.body
			for _, says := range row.says {
				_, after, ok := strings.Cut(rest, says)
				require.True(t, ok, "%s in %s", says, r.body)
				rest = after
			}
		})
	}
}

// Seen with the server of SGLang 0.5.23 before schedulers that compute nothing.
func TestWhatTheServerOfSGLangSays(t *testing.T) {
	e, p := sglangRanks(t, Config{Role: Prefill, DPSize: 2})
	const chat, message, response = "/v1/chat/completions", "/v1/messages", "/v1/responses"
	alone := `"bootstrap_host":"2.2.2.2","bootstrap_port":1,"bootstrap_room":2,"model":"ref",`
	ask := alone + `"max_tokens":3,"messages":[{"role":"user","content":"a b"}]`
	for _, row := range []struct{ path, header, body, says string }{
		{chat, "", `{` + ask + `,"routed_dp_rank":-1}`, `"routed_dp_rank=-1 out of range [0, 2)"`},
		{chat, "7", `{` + ask + `,"routed_dp_rank":0}`, `"routed_dp_rank=7 out of range [0, 2)"`},
		{chat, "0", `{` + ask + `,"routed_dp_rank":7}`, `"finish_reason":"length"`},
		{chat, "x", `{` + ask + `}`, `"Invalid X-Data-Parallel-Rank header: must be an integer, got 'x'"`},
		{message, "", `{` + ask + `,"routed_dp_rank":7}`, `{"error":{"message":"routed_dp_rank=7 out of range [0, 2)","type":"BadRequestError"},"type":"error"}`},
		{message, "", `{"model":"ref","messages":[]}`, `"type":"invalid_request_error"`},
		{response, "", `{` + alone + `"input":"a b","request_id":"resp_mine","max_output_tokens":9}`, `"id":"resp_mine"`},
		{response, "", `{` + alone + `"input":"a b","request_id":"resp_mine","max_output_tokens":9,"stream":true}`, `"id":"resp_mine"`},
	} {
		var headers []string
		if row.header != "" {
			headers = []string{"X-Data-Parallel-Rank", row.header}
		}
		r := do(p.c, "POST", e.URLs()[0]+row.path, row.body, headers...)
		require.Contains(t, r.body, row.says)
	}
}

// The series of the barrier are always there, and count only if the server is told to (0.5.23).
func TestSGLangCountsItsBarrierIfItIsToldTo(t *testing.T) {
	for _, told := range []bool{false, true} {
		e, p := sglangRanks(t, Config{Role: Decode, DPSize: 2, SGLang: SGLangOptions{BarrierMetrics: told}})
		r := do(p.c, "POST", e.URLs()[0]+"/v1/completions", `{"bootstrap_host":"2.2.2.2","bootstrap_port":1,"bootstrap_room":2,"model":"ref","max_tokens":4,"prompt":"a b","routed_dp_rank":0}`)
		require.Equal(t, 200, r.status, r.body)
		page := do(p.c, "GET", e.URLs()[0]+"/metrics", "").body
		for _, series := range []string{`sync_wait_seconds_count{L}`, `sync_wait_seconds_sum{L}`, `pairs_total{L,kind="imbalance"}`} { // of the rank that is idle
			line := "\nsglang:dp_attention_" + strings.Replace(series, "L", `model_name="ref",engine_type="decode",tp_rank="0",pp_rank="0",dp_rank="1"`, 1) + " "
			require.Contains(t, page, line)
			require.Equal(t, told, !strings.Contains(page, line+"0\n"), series)
		}
	}
}
