package engine

import (
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest/observer"
)

func TestWhatSaysThatAnEngineDoesNotHaveTheModel(t *testing.T) {
	for _, row := range []struct {
		name, body string
		status     int
		is         bool
	}{
		{"vLLM", `{"error":{"message":"The model \u0060org/x y\u0060 does not exist.","type":"NotFoundError","param":"model","code":404}}`, 404, true},
		{"vLLM's resolvers of adapters", `{"error":{"message":"LoRA adapter x does not exist","type":"NotFoundError","param":null,"code":404}}`, 404, true},
		{"vLLM before 0.11", `{"object":"error","message":"The model \u0060x\u0060 does not exist.","type":"NotFoundError","param":null,"code":404}`, 404, true},
		{"vLLM of a message", `{"type":"error","error":{"type":"NotFoundError","message":"The model \u0060x\u0060 does not exist."}}`, 404, true},
		{"vLLM's Rust front end", `{"error":{"message":"no x here","type":"invalid_request_error","param":null,"code":"model_not_found"}}`, 404, true},
		{"SGLang of a response", `{"error":{"message":"The model 'x' does not exist","type":"invalid_request_error","param":"model","code":404}}`, 404, true},
		{"SGLang without the adapter", `{"object":"error","message":"Got LoRA adapter that has never been loaded: x\nAll loaded adapters: dict_keys(['y']).","type":"BadRequest","param":null,"code":400}`, 400, true},
		{"SGLang without the adapter, nested", `{"error":{"message":"Got LoRA adapter that has never been loaded: x\nAll loaded adapters: dict_keys([])."}}`, 400, true},
		{"a text that quotes it", `{"error":{"message":"no Got LoRA adapter that has never been loaded: x","code":400}}`, 400, false},
		{"another status", `{"error":{"message":"The model \u0060x\u0060 does not exist.","code":400}}`, 400, false},
		{"a path that is not there", `{"detail":"Not Found"}`, 404, false},
		{"a response that is not there", `{"error":{"message":"Response with id 'The model \u0060x\u0060 does not exist.' not found.","code":404}}`, 404, false},
		{"a text", "The model 'x' does not exist.", 404, false},
		{"an error that is a text", `{"error":"Not Found"}`, 404, false},
		{"nothing", "", 404, false},
	} {
		require.Equal(t, row.is, Unlisted(row.status, []byte(row.body)) != nil, row.name)
	}
}

// An engine that does not have a model that its list has is asked for its list at once, and then
// once a second at most, however many requests it refuses.
func TestTheListOfAnEngineIsReadAgain(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, _ *prometheus.Registry) {
		time.Sleep(time.Second) // it reads the list every ten
		before := f.count("/v1/models")
		f.set("/v1/models", ok(`{"data":[{"id":"m"}]}`))
		for range 40 {
			m.ReportFailure("p0", fmt.Errorf("prefill p0 answered 404: %w", ErrUnlisted))
			time.Sleep(time.Millisecond)
		}
		require.Equal(t, []Model{{ID: "m"}}, m.Status("p0").Models, "within a moment")
		require.Equal(t, before+1, f.count("/v1/models"))
		f.set("/v1/models", ok(`{"data":[{"id":"m"},{"id":"x"}]}`))
		time.Sleep(3 * time.Second)
		require.Len(t, m.Status("p0").Models, 2, "a later refusal was looked into, too")
		time.Sleep(time.Minute)
		require.LessOrEqual(t, f.count("/v1/models"), before+2+8, "nobody has refused anything since")
		require.Equal(t, 1, logs.FilterMessageSnippet("its list has").Len())
		m.ReportFailure("nobody", ErrUnlisted)
	})
}
