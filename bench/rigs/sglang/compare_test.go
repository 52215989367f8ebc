package main

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/rigs/asked"
)

func said(status int, kind, text string) answer {
	return answer{asked.Answer{Status: status, Head: http.Header{"Content-Type": {kind}}, Body: []byte(text)}}
}

func TestAnswersAreJudged(t *testing.T) {
	const (
		whole   = `{"text":"a","output_ids":[1],"meta_info":{"id":"x","e2e_latency":1.5}}`
		later   = `{"text":"a","output_ids":[1],"meta_info":{"id":"y","e2e_latency":2.5}}`
		other   = `{"text":"b","output_ids":[2],"meta_info":{"id":"x","e2e_latency":1.5}}`
		refusal = `{"error":{"message":"no","code":400}}`
		aborted = `{"text":"","output_ids":[],"meta_info":{"finish_reason":{"type":"abort","message":"no","status_code":400}}}`
		ours    = `{"error":{"message":"not here","code":"unsupported"}}`
		stream  = "text/event-stream; charset=utf-8"
		object  = "application/json"
	)
	events := func(all ...string) (text string) {
		for _, e := range all {
			text += "data: " + e + "\n\n"
		}
		return text + "data: [DONE]\n\n"
	}
	for _, row := range []struct {
		name            string
		direct, through answer
		named, refuses  bool
		same            bool
	}{
		{"only the name and times differ", said(200, object, whole), said(200, object, later), false, false, true},
		{"the client has named it", said(200, object, whole), said(200, object, later), true, false, false},
		{"another token", said(200, object, whole), said(200, object, other), false, false, false},
		{"another status", said(200, object, whole), said(500, object, whole), false, false, false},
		{"a stream", said(200, stream, events(whole, `{"output_ids":[1,2]}`)), said(200, stream, events(whole, `{"output_ids":[1,2]}`)), false, false, true},
		{"an event that takes a token back", said(200, stream, events(whole, whole)), said(200, stream, events(`{"output_ids":[2]}`, whole)), false, false, false},
		{"a stream without its end", said(200, stream, events(whole)), said(200, stream, "data: "+whole+"\n\n"), false, false, false},
		{"a refusal with a status, or as the first event", said(200, stream, events(refusal)), said(400, object, refusal), false, false, true},
		{"a refusal by the scheduler", said(200, stream, events(aborted)), said(400, object, refusal), false, false, true},
		{"evenkeel's own refusal of what SGLang refuses", said(400, object, refusal), said(400, object, ours), false, false, true},
		{"evenkeel's own refusal of what SGLang answers", said(200, object, whole), said(400, object, ours), false, false, false},
		{"one that it is to refuse", said(200, object, whole), said(400, object, ours), false, true, true},
		{"one that it was to refuse", said(200, object, whole), said(200, object, whole), false, true, false},
	} {
		same, why := judge(row.direct, row.through, row.named, row.refuses)
		require.Equal(t, row.same, same, "%s: %s", row.name, why)
	}
}

func TestAStreamMayBreakOff(t *testing.T) {
	whole := said(200, "text/event-stream", "data: {\"output_ids\":[1,2,3]}\n\ndata: [DONE]\n\n")
	for text, broken := range map[string]bool{
		"data: {\"output_ids\":[1,2]}\n\ndata: {\"error\":{}}\n\n": true,
		"data: {\"output_ids\":[1,2]}\n\n":                         false,
		"data: {\"output_ids\":[4]}\n\ndata: {\"error\":{}}\n\n":   false,
	} {
		require.Equal(t, broken, breaks(whole, said(200, "text/event-stream", text)), text)
	}
}
