package gateway_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
)

// SGLang answers with the base model unless an adapter is named behind the base model's name, or by
// lora_path. So both engines of a pair are asked in that way, at every endpoint, and the client
// reads the name that it gave.
func TestAnAdapterOfSGLangAnswers(t *testing.T) {
	t.Parallel()
	const adapter = "x"
	forms := map[string]string{
		refclient.ChatPath:       `{"model":%q,"max_tokens":4,"stream":%t,"messages":[{"role":"user","content":"hi"}]}`,
		refclient.CompletionPath: `{"model":%q,"max_tokens":4,"stream":%t,"prompt":["hi","ho"]}`,
		"/v1/messages":           `{"model":%q,"max_tokens":4,"stream":%t,"messages":[{"role":"user","content":"hi"}]}`,
		"/generate":              `{"model":%q,"sampling_params":{"max_new_tokens":4},"stream":%t,"text":"hi"}`,
	}
	for _, base := range []string{model, "gpt-oss:120b"} {
		t.Run(base, func(t *testing.T) {
			t.Parallel()
			has := refengine.Config{Model: refengine.Model{Name: base, Adapters: []string{adapter}}}
			b := early(t, refengine.SGLang, options{prefill: []refengine.Config{has}, decode: []refengine.Config{has}})
			list := b.Ask("GET", b.URL+"/v1/models", "").Body
			for _, name := range []string{base, adapter, base + ":" + adapter} {
				require.Contains(t, list, fmt.Sprintf(`{"id":%q,`, name))
			}
			adapted := func() [2]int64 { return [2]int64{b.Prefill[0].Stats().Adapted, b.Decode[0].Stats().Adapted} }
			for _, asked := range []string{adapter, base + ":" + adapter, base} {
				for path, form := range forms {
					for _, stream := range []bool{false, true} {
						what := fmt.Sprintf("asked for %s at %s, stream %t", asked, path, stream)
						before := adapted()
						r := b.Post(path, fmt.Sprintf(form, asked, stream))
						require.Equal(t, http.StatusOK, r.Status, "%s: %s", what, r.Body)
						says := strings.Count(r.Body, fmt.Sprintf(`"model":%q`, asked))
						require.Equal(t, strings.Count(r.Body, `"model":`), says, "%s: %s", what, r.Body)
						require.Equal(t, path != "/generate", says > 0, what)
						legs := int64(1)
						if path == refclient.CompletionPath {
							legs = 2
						}
						if asked == base {
							legs = 0
						}
						require.Equal(t, [2]int64{before[0] + legs, before[1] + legs}, adapted(), what)
					}
				}
			}
			for name, path := range map[string]string{
				adapter: "/v1/responses", base + ":" + adapter: "/v1/score", base + ":other": refclient.ChatPath,
			} {
				r := b.Post(path, fmt.Sprintf(`{"model":%q,"max_output_tokens":9,"input":"hi","messages":[{"role":"user","content":"hi"}]}`, name))
				require.Equal(t, http.StatusNotFound, r.Status, "%s at %s: %s", name, path, r.Body)
			}
		})
	}
}
