package gateway_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/openai/answertest"
	"evenkeel/geo"
	"evenkeel/mooncake"
)

const responsesPath = "/v1/responses"

// respond is the body of a response to a prompt, with more members.
func respond(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"input":%q}`, more, model, prompt)
}

// nixl are engines of vLLM. Those of vllm-ascend do not serve responses.
func nixl(o options) options {
	o.profile.Connector = mooncake.NIXLPull
	if o.prefill == nil {
		o.prefill = []refengine.Config{{PrefixCache: 4096, PromptTokensDetails: true}}
	}
	if o.decode == nil {
		o.decode = []refengine.Config{{DPSize: 2, PromptTokensDetails: true}}
	}
	for _, list := range [][]refengine.Config{o.prefill, o.decode} {
		for i := range list {
			list[i].Connector = refengine.NIXLPull
		}
	}
	return o
}

// A proxy that does not admit to the decode group refuses what it may not send to the one that does.
func TestAStandbyRefusesResponsesAndMessages(t *testing.T) {
	t.Parallel()
	us := standbyOf(t, takesMessages(options{}), func(http.ResponseWriter, *http.Request) { t.Error("it was forwarded") })
	r := us.post(responsesPath, respond("a", ""))
	require.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
	said, _, _ := failure(t, r)
	require.Equal(t, geo.RejectOwner, said)
	require.NotEmpty(t, r.header.Get("Retry-After"))
	r = us.post(messagesPath, wordsOf("a", `"stream":true,`))
	require.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
	kind, says := answertest.Refused(t, r.body)
	require.Equal(t, "overloaded_error", kind)
	require.Contains(t, says, "another proxy")
	got := us.knock("us-2", chatPath, chat("one", "")) // nor may it forward what came from another proxy
	require.Equal(t, http.StatusServiceUnavailable, got.status, got.body)
	require.Equal(t, geo.RejectOwner, got.header.Get(geo.RejectHeader))
	require.Equal(t, geo.RejectOwner, code(got.body))
	require.Zero(t, us.decode[0].Stats().Requests)
	require.Zero(t, us.prefill[0].Stats().Requests)
}
