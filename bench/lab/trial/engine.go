// Package trial plays the same loads to ranks behind one address, once through the engine's own
// balancing and once through evenkeel, in short blocks in turn, and says what the difference is.
// Before that, it simulates what the difference should be.
package trial

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"evenkeel/engine"
)

// Engine is what is known of the ranks behind the address.
type Engine struct {
	Kind     string         `json:"engine"` // vllm or sglang
	Version  string         `json:"version"`
	Model    string         `json:"model"` // without folders; empty: it has odd letters
	Ranks    int            `json:"ranks"`
	Slots    int            `json:"slots"`                              // of a rank
	Budget   int            `json:"token_budget,omitempty"`             // tokens of a rank in a step
	Interval int            `json:"prefill_schedule_interval,omitzero"` // prompts are computed in every so many steps
	Room     int64          `json:"kv_tokens_per_rank,omitempty"`       // 0: not told
	Context  int            `json:"max_model_len,omitempty"`            // 0: not told
	Settings map[string]any `json:"settings,omitempty"`                 // as the engine tells them
	Tokens   float64        `json:"tokens_per_word,omitempty"`          // that the engine counts for each word of our prompts

	Asks string `json:"-"` // the whole name of the model, which requests must have
}

// The kinds, as the laws name them.
const (
	vLLM   = "vllm"
	sglang = "sglang"
)

const (
	patience   = 5 * time.Second // with each answer
	answerSize = 4 << 20
)

// Ask asks the engine what it is. Ranks and slots are for others to find out. What it does not tell
// stays empty.
func Ask(ctx context.Context, client *engine.Client, at *engine.Target) (e Engine) {
	get := func(path string, into any) bool {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		status, body, err := client.Get(ctx, at, path, answerSize)
		return err == nil && status == http.StatusOK && json.Unmarshal(body, into) == nil
	}
	e.Kind = vLLM
	var version struct{ Version string }
	if get("/version", &version) {
		e.Version = word(version.Version)
	}
	var told map[string]any
	if get("/server_info?config_format=json", &told) || get("/get_server_info", &told) {
		if _, ok := told["disaggregation_mode"]; ok {
			e.Kind = sglang
			e.Version = word(told["version"])
		}
		e.Settings = settings(told)
	}
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	models, _ := engine.Models(within, client, at)
	if len(models) > 0 {
		m := &models[0]
		e.Asks, e.Context = m.ID, m.MaxModelLen
		e.Model = modelName(m.ID)
	}
	within, cancel = context.WithTimeout(ctx, patience)
	defer cancel()
	if page, err := engine.Scrape(within, client, at); err == nil {
		e.Room = page.Memories(models).Tokens() // of all ranks, until these are counted
	}
	return e
}

// Count says how many ranks there are, and how many requests each runs at once.
func (e *Engine) Count(ranks, slots int) {
	e.Ranks, e.Slots = ranks, slots
	e.Room /= int64(max(1, ranks))
}
