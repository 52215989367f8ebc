package sse

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// What a client gets before its first event is whole events, which tell of nothing. An error behind them is an event of its endpoint,
// and the last one.
func TestWhatComesBeforeAnEvent(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/chat/completions": "data: {\"error\":{\"message\":\"no engine\",\"type\":\"server_error\",\"param\":null,\"code\":\"prefill_unavailable\"}}\n\ndata: [DONE]\n\n",
		"/v1/messages":         "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"server_error\",\"message\":\"no engine\"}}\n\n",
		"/v1/responses":        "event: error\ndata: {\"type\":\"error\",\"code\":\"prefill_unavailable\",\"message\":\"no engine\",\"param\":null,\"sequence_number\":0}\n\n",
	} {
		form := FormOf(path)
		frames := NewFramer(0)
		frames.Feed(Silence(form))
		m := NewMirror(Ask{Form: form})
		for e, ok := frames.Next(); ok; e, ok = frames.Next() {
			out, _ := m.Event(e, nil)
			require.False(t, m.Started(), "%s: it is no token: %s", path, out)
		}
		require.Zero(t, frames.held(), "it is whole")
		require.Equal(t, want, string(OnlyFailure(nil, form, "no engine", "server_error", "prefill_unavailable")), path)
	}
}
