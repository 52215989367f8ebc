package admission

import (
	"testing"
	"time"

	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/keys"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/request"
	"evenkeel/mooncake"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
	"go.uber.org/zap"
)

// The edge outlives a handler's panic, so the caller's limits have to, too.
func TestAPanicGivesBackWhatTheRequestHolds(t *testing.T) {
	reg := prometheus.NewRegistry()
	told, err := journal.New(journal.Config{Registerer: reg, Log: zap.NewNop()})
	require.NoError(t, err)
	d := New(Deps{Requests: request.New(request.Deps{Registerer: reg, Log: zap.NewNop(), Journal: told})})
	set, err := keys.Parse("keys.yaml", []byte("keys:\n  - name: k\n    sha256: "+keys.Hash("ek-k")+"\n    max_concurrent: 1\n"))
	require.NoError(t, err)
	key, ok := set.Authenticate([]byte("Bearer ek-k"))
	require.True(t, ok)
	for range 3 { // each needs the key's only answer
		in := d.newIncoming(journal.LogEntry{ID: "x", Arrival: time.Now()})
		require.Panics(t, func() {
			d.serveOrRefuse(&fasthttp.RequestCtx{}, in, func() *openai.Error {
				require.Nil(t, in.applyKey(&fasthttp.RequestCtx{}, key, nil, time.Now()))
				panic("on purpose")
			})
		})
		require.Zero(t, d.deps.Requests.Open())
		d.deps.Requests.ConcludePanicked(in.Incoming) // as an answer that is closed afterwards ends it
		require.Zero(t, d.deps.Requests.Open())
	}
}

// Operators tell a key at its own limit from a queue that is full for all, and its client
// reads no key of the config.
func TestAKeyAtItsLimitIsToldAsItsOwn(t *testing.T) {
	set, err := keys.Parse("keys.yaml", []byte("keys:\n  - name: k\n    sha256: "+keys.Hash("ek-k")+"\n    max_concurrent: 1\n"))
	require.NoError(t, err)
	r := requestContext{}
	r.key, _ = set.Authenticate([]byte("Bearer ek-k"))
	require.Nil(t, r.countAnswers(1))
	other := requestContext{key: r.key}
	fail := other.countAnswers(1)
	require.Equal(t, "queue_full", fail.Code)
	require.True(t, fail.ByKeyLimit)
	require.Equal(t, "key k has all the answers that it may have at once (max_concurrent in keys_file: 1)", fail.Why)
	require.NotContains(t, string(fail.JSON())+fail.Error(), "keys_file")
}

func TestWhatEnginesOfSGLangDoNotServe(t *testing.T) {
	m := roster.Route{Name: "m", Board: "m", SGLang: true}
	lora, old := m, m
	lora.Adapter, old.NoHandOff[mooncake.Messages] = "adapter", true
	require.Nil(t, checkEnginesServe(mooncake.Responses, m))
	require.Nil(t, checkEnginesServe(mooncake.Responses, old))
	require.Nil(t, checkEnginesServe(mooncake.Messages, roster.Route{Name: "a", Board: "m", NoHandOff: old.NoHandOff}), "not of SGLang")
	require.Contains(t, checkEnginesServe(mooncake.Responses, lora).Message, "with the base model")
	require.Nil(t, checkEnginesServe(mooncake.Messages, lora))
	require.Nil(t, checkEnginesServe(mooncake.Generate, lora))
	fail := checkEnginesServe(mooncake.Messages, old)
	require.Equal(t, []any{404, "no_such_route"}, []any{fail.Status, fail.Code})
	require.Contains(t, fail.Message, "SGLang 0.5.23 or later")
}
