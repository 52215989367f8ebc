package refengine

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// The API server of each rank has adapters of its own, lists them behind its base model, and
// refuses what it does not list, in the words of vLLM 0.31 (entrypoints/openai/models/serving.py).
func TestAdaptersAreLoadedRankByRank(t *testing.T) {
	c := client(t)
	e := start(t, Config{DPSize: 2, Role: Aggregated, Model: Model{Aliases: []string{"also"}, Adapters: []string{"static"}}})
	listed := func(port int) (all []string) {
		var list struct {
			Data []struct {
				ID, Root string
				Parent   *string
			}
		}
		require.NoError(t, json.Unmarshal([]byte(do(c, "GET", e.URLs()[port]+"/v1/models", "").body), &list))
		for _, m := range list.Data {
			from := "-"
			if m.Parent != nil {
				from = *m.Parent
			}
			all = append(all, m.ID+" "+m.Root+" "+from)
		}
		return all
	}
	base := []string{"ref ref -", "also ref -", "static /adapters/static ref"}
	require.Equal(t, base, listed(0))
	ask := func(port int, how, body string) reply { return do(c, "POST", e.URLs()[port]+"/v1/"+how, body) }
	chat := func(port int, name string) reply {
		return ask(port, "chat/completions", fmt.Sprintf(`{"model":%q,"max_tokens":2,"messages":[{"role":"user","content":"hi"}]}`, name))
	}
	const load, unload = "load_lora_adapter", "unload_lora_adapter"

	r := chat(1, "x")
	require.Equal(t, 404, r.status)
	require.JSONEq(t, `{"error":{"message":"The model `+"`x`"+` does not exist.","type":"NotFoundError","param":"model","code":404}}`, r.body)
	r = ask(1, load, `{"lora_name":"x","lora_path":"/p"}`)
	require.Equal(t, 200, r.status, r.body)
	require.Equal(t, "Success: LoRA adapter 'x' added successfully.", r.body)
	require.Equal(t, base, listed(0), "the other rank has another API server")
	require.Equal(t, append(base, "x /adapters/x ref"), listed(1))
	require.Equal(t, 404, chat(0, "x").status)
	for name, called := range map[string]string{"x": "x", "static": "static", "also": "ref", "ref": "ref"} {
		var whole struct{ Model string }
		r := chat(1, name)
		require.Equal(t, 200, r.status, r.body)
		require.NoError(t, json.Unmarshal([]byte(r.body), &whole))
		require.Equal(t, called, whole.Model)
	}
	for body, want := range map[string]int{
		`{"lora_name":"x","lora_path":"/p"}`: 400, `{"lora_name":"x","lora_path":"/p","load_inplace":true}`: 200,
		`{"lora_name":"ref","lora_path":"/p"}`: 400, `{"lora_name":"also","lora_path":"/p"}`: 400, `{"lora_name":"y"}`: 400, `{"lora_path":"/p"}`: 400, `[]`: 400,
	} {
		require.Equal(t, want, ask(1, load, body).status, body)
	}
	for _, gone := range []struct {
		name   string
		status int
	}{{"x", 200}, {"x", 404}, {"ref", 404}, {"", 400}} {
		require.Equal(t, gone.status, ask(1, unload, fmt.Sprintf(`{"lora_name":%q}`, gone.name)).status, gone.name)
	}
	require.Equal(t, 404, chat(1, "x").status)

	e.Load(0, "y")
	require.Equal(t, append(base, "y /adapters/y ref"), listed(0))
	e.Kill()
	require.NoError(t, e.Revive())
	require.Equal(t, base, listed(0), "what was loaded while it ran is lost with it")
}

// Other servers list an adapter as they list a base model.
func TestAnAdapterMayBeListedWithoutItsParent(t *testing.T) {
	e := start(t, Config{Role: Aggregated, Model: Model{Adapters: []string{"x"}, Parentless: true}})
	list := do(client(t), "GET", e.URLs()[0]+"/v1/models", "").body
	require.Contains(t, list, `"id":"x"`)
	require.NotContains(t, list, `"parent":"ref"`)
}
