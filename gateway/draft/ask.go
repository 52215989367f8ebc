// Package draft writes a first config file: from flags, or from what engines tell
// of themselves when they are asked.
package draft

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"
	"unicode"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// Bounds of what is asked.
const (
	askTimeout = 5 * time.Second // for each path of an engine
	askAtOnce  = 16              // engines
	answerSize = 1 << 20         // bytes of an answer
	told       = 120             // characters of what an engine says of itself
	modelsTold = 3
)

// Entry is an engine of the file: what is known of it, and in words what it said and what
// it did not say.
type Entry struct {
	config.Engine

	Role      string // prefill, decode, or empty: unknown
	Connector string // that it has, empty: unknown
	Bootstrap int    // port of its bootstrap server, 0: unknown
	Notes     []string
}

func (e *Entry) note(format string, args ...any) {
	e.Notes = append(e.Notes, fmt.Sprintf(format, args...))
}

// Ask asks the engines at these entries' URLs what they are, several at once, and fills in
// what they tell. key is sent to engines that want one.
func Ask(ctx context.Context, entries []Entry, keyEnv string) {
	client := engine.NewClient(engine.Options{ReadBuffer: 64 << 10})
	defer client.Close()
	var all sync.WaitGroup
	free := make(chan struct{}, askAtOnce)
	for i := range entries {
		free <- struct{}{}
		all.Go(func() {
			defer func() { <-free }()
			ask(ctx, client, &entries[i], keyEnv)
		})
	}
	all.Wait()
}

func ask(ctx context.Context, client *engine.Client, e *Entry, keyEnv string) {
	target, err := config.Target(e.Engine, &mooncake.Profile{APIKeyEnv: keyEnv})
	if err != nil {
		e.note("It could not be asked: %s.", clean(err.Error()))
		return
	}
	get := func(path string) (status int, body []byte, err error) {
		ctx, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		return client.Get(ctx, target, path, answerSize)
	}
	switch status, _, err := get("/health"); {
	case err != nil:
		e.note("It did not answer GET /health (%s), so nothing is known of it.", why(err))
		return
	case status != http.StatusOK:
		e.note("It answered GET /health with status %d: it may still be starting.", status)
	}
	version := ""
	if status, body, err := get("/version"); err == nil && status == http.StatusOK {
		var v struct{ Version string }
		if json.Unmarshal(body, &v) == nil {
			version = clean(v.Version)
		}
	}
	e.server(get, version)
	e.models(ctx, client, target)
	e.metrics(ctx, client, target)
}

// server takes what /server_info tells. SGLang always has it; vLLM has it only with
// VLLM_SERVER_DEV_MODE=1.
func (e *Entry) server(get func(path string) (int, []byte, error), version string) {
	var body []byte
	for _, path := range []string{"/server_info", "/get_server_info"} { // the name before SGLang 0.5.3
		if status, b, err := get(path); err == nil && status == http.StatusOK {
			body = b
			break
		}
	}
	var sglang struct {
		Version   string `json:"version"`
		Mode      string `json:"disaggregation_mode"`
		Bootstrap int    `json:"disaggregation_bootstrap_port"`
		Slots     int    `json:"max_running_requests"`
		Ranks     int    `json:"dp_size"`
	}
	if json.Unmarshal(body, &sglang) == nil && sglang.Mode != "" {
		e.note("It is SGLang %s.", orUnknown(clean(sglang.Version)))
		e.Connector, e.Bootstrap = mooncake.SGLang, sglang.Bootstrap
		if sglang.Ranks > 1 {
			e.Ranks = sglang.Ranks
		}
		if n := sglang.Slots / max(1, sglang.Ranks); n > 0 {
			e.Slots = n
		}
		e.is(map[string]string{"prefill": "prefill", "decode": "decode"}[sglang.Mode], "its disaggregation_mode is "+clean(sglang.Mode))
		return
	}
	e.note("Its version is %s.", orUnknown(version))
	role := vllmSays(body, "kv_role")
	e.is(map[string]string{"kv_producer": "prefill", "kv_consumer": "decode"}[role], "its kv_role is "+role)
	if name := vllmSays(body, "kv_connector"); name != "" {
		if e.Connector = connectors[name]; e.Connector == "" {
			e.note("Its kv_connector is %s, for which there is no profile (docs/engines.md).", name)
		}
	}
}

// vllmSays finds a value in vLLM's config, as text or as JSON.
func vllmSays(body []byte, key string) string {
	m := regexp.MustCompile(key + `["']?\s*[:=]\s*["']?(\w+)`).FindSubmatch(body)
	if m == nil {
		return ""
	}
	return clean(string(m[1]))
}

// connectors are the profiles' names for those of the engines.
var connectors = map[string]string{
	"NixlConnector": mooncake.NIXLPull, "NixlPullConnector": mooncake.NIXLPull, "NixlPushConnector": mooncake.NIXLPush, "MooncakeConnector": mooncake.VLLMMooncake,
	"MooncakeConnectorV1": mooncake.AscendMooncakeV1, "MooncakeHybridConnector": mooncake.AscendMooncakeV1, "MooncakeLayerwiseConnector": mooncake.AscendLayerwise,
}

// is takes up the role that an engine tells, against that which a person gave.
func (e *Entry) is(role, because string) {
	switch {
	case role == "" && e.Role == "":
		e.note("Nothing that it answers says whether it prefills or decodes.")
	case e.Role == "":
		e.Role = role
		e.note("It is a %s engine: %s.", role, because)
	case role != "" && role != e.Role:
		e.note("You call it a %s engine, but %s, which makes it a %s engine. Check its start command.", e.Role, because, role)
	}
}

func (e *Entry) models(ctx context.Context, client *engine.Client, target *engine.Target) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	models, err := engine.Models(ctx, client, target)
	var status *engine.StatusError
	switch {
	case errors.As(err, &status) && (status.Status == http.StatusUnauthorized || status.Status == http.StatusForbidden):
		e.note("It wants an API key. Export it as OPENAI_API_KEY and run init again, and start the proxy with it.")
	case err != nil:
		e.note("GET /v1/models did not tell its models: %s.", why(err))
	case len(models) == 0:
		e.note("GET /v1/models lists no model.")
	}
	for i, m := range models {
		if i == modelsTold {
			e.note("It serves %d more models.", len(models)-i)
			break
		}
		if m.MaxModelLen > 0 {
			e.note("It serves %q, with a context of %d tokens.", clean(m.ID), m.MaxModelLen)
		} else {
			e.note("It serves %q.", clean(m.ID))
		}
	}
}

func (e *Entry) metrics(ctx context.Context, client *engine.Client, target *engine.Target) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	sample, err := engine.Scrape(ctx, client, target)
	if err != nil {
		e.note("GET /metrics could not be read: %s. Without its gauges, other clients of this engine are not seen.", why(err))
		return
	}
	if n := len(sample.Engines()); n > 1 && e.Ranks == 0 {
		e.Ranks = n
		e.note("Its metrics name %d DP ranks.", n)
	}
	if tokens, ok := sample.CacheTokens(-1); ok {
		e.note("Its KV cache has room for %d tokens in all.", tokens)
	} else {
		e.note("It does not tell how many tokens its KV cache holds. If it never does, write kv_tokens of each rank.")
	}
}

// why is the cause of a failed call, without the address, which stands beside it.
func why(err error) string {
	var call *engine.Error
	if errors.As(err, &call) && call.Err != nil {
		err = call.Err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Sprintf("no answer within %v", askTimeout)
	}
	return clean(err.Error())
}

// clean makes what a stranger said fit for a comment of one line.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	if r := []rune(s); len(r) > told {
		s = string(r[:told]) + "..."
	}
	return strings.TrimSpace(s)
}

func orUnknown(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}
