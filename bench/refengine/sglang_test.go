package refengine

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The wire forms of SGLang 0.5.23 where a proxy reads them, of requests that no prefill engine meets.
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
		{"a message without a room", "/v1/messages", message, "", 400, []string{`{"error":{"message":"` + roomless + `","type":"invalid_request_error"},"type":"error"}`}},
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
