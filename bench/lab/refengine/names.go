package refengine

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	"evenkeel/internal/rawjson"
)

// adapters are the LoRA adapters that the API server of each port has loaded. Those that were
// loaded while it runs are lost with it.
type adapters struct {
	mu     sync.Mutex
	byPort [][]string
}

func newAdapters(cfg Config, ports int) *adapters {
	a := &adapters{byPort: make([][]string, ports)}
	for port := range a.byPort {
		a.byPort[port] = slices.Clone(cfg.Model.Adapters)
	}
	return a
}

func (a *adapters) of(port int) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.byPort[port])
}

// change loads an adapter or unloads it, and says whether it was there before.
func (a *adapters) change(port int, name string, load bool) (was bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	at := slices.Index(a.byPort[port], name)
	switch {
	case at < 0 && load:
		a.byPort[port] = append(a.byPort[port], name)
	case at >= 0 && !load:
		a.byPort[port] = slices.Delete(a.byPort[port], at, at+1)
	}
	return at >= 0
}

// Load has the API server of a port load an adapter, and Unload has it unload one, as the endpoints
// do.
func (e *Engine) Load(port int, name string) { e.change(port, name, true) }

// Unload is the reverse of Load. Requests that run with the adapter go on.
func (e *Engine) Unload(port int, name string) { e.change(port, name, false) }

func (e *Engine) change(port int, name string, load bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.life != nil {
		e.life.adapters.change(port, name, load)
	}
}

// lists says whether a request at a port may ask for a model, and by which name the answer calls
// it: that of the adapter, else the first of the base model (check_model and model_name in
// entrypoints/openai/models/serving.py of vLLM 0.31).
func (a *adapters) lists(cfg *Config, port int, name string) (called string, ok bool) {
	if cfg.Connector == SGLang { // it takes any name, and repeats it
		return name, true
	}
	if name == "" || name == cfg.Model.Name || slices.Contains(cfg.Model.Aliases, name) {
		return cfg.Model.Name, true
	}
	return name, slices.Contains(a.of(port), name)
}

// adapterOf is the LoRA adapter with which SGLang computes a request; empty: with none. The text
// behind the name of the base model and a colon counts before lora_path (0.5.23, _resolve_lora_path
// in entrypoints/openai/serving_base.py).
func (a *adapters) adapterOf(cfg *Config, port int, model, path string) (string, *apiError) {
	adapter, named := strings.CutPrefix(model, cfg.Model.Name+":")
	switch _, behind, hasColon := strings.Cut(model, ":"); {
	case named:
	case hasColon && model != cfg.Model.Name:
		adapter = behind
	default:
		adapter = path
	}
	if adapter != "" && !slices.Contains(a.of(port), adapter) { // _resolve_lora_path in managers/tokenizer_manager.py
		return "", refuse(400, "Got LoRA adapter that has never been loaded: %s\nAll loaded adapters: dict_keys([]).", adapter)
	}
	return adapter, nil
}

func noSuchModel(name string) *apiError {
	return refuse(404, "The model `%s` does not exist.", name).of("model")
}

// modelCard is a model in their list, as vLLM 0.32.0 was recorded. Its places are the name, the
// root, the parent, the length and the time.
const modelCard = `{"id":%[1]s,"object":"model","created":%[5]d,"owned_by":"vllm","root":%[2]s,"parent":%[3]s,"max_model_len":%[4]v,` +
	`"permission":[{"id":"modelperm-reference","object":"model_permission","created":%[5]d,"allow_create_engine":false,` +
	`"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,` +
	`"organization":"*","group":null,"is_blocking":false}]}`

// serveModels lists the base model by all its names, and then the adapters.
func (l *life) serveModels(x *exchange) bool {
	cfg, created := l.engine.cfg, l.began.Unix()
	text := func(s string) []byte { return rawjson.AppendString(nil, s) }
	base, parent := text(cfg.Model.Name), []byte("null")
	var cards []string
	for _, name := range append([]string{cfg.Model.Name}, cfg.Model.Aliases...) {
		cards = append(cards, fmt.Sprintf(modelCard, text(name), base, "null", cfg.Model.MaxLen, created))
	}
	if !cfg.Model.Parentless {
		parent = base
	}
	for _, name := range l.adapters.of(x.Port) {
		cards = append(cards, fmt.Sprintf(modelCard, text(name), text("/adapters/"+name), parent, "null", created))
	}
	return x.Answer(200, typeJSON, fmt.Appendf(nil, `{"object":"list","data":[%s]}`, strings.Join(cards, ",")))
}

// serveAdapter loads an adapter or unloads it, where the engine was started with
// VLLM_ALLOW_RUNTIME_LORA_UPDATING (load_lora_adapter and unload_lora_adapter in
// entrypoints/openai/models/serving.py of vLLM 0.31).
func serveAdapter(l *life, x *exchange, load bool) bool {
	var ask struct {
		Name    string `json:"lora_name"`
		Path    string `json:"lora_path"`
		Inplace bool   `json:"load_inplace"`
	}
	if err := json.Unmarshal(x.Body, &ask); err != nil {
		return x.fail(refuse(400, "body: %v", err).of("body"))
	}
	_, listed := l.adapters.lists(&l.engine.cfg, x.Port, ask.Name)
	base := ask.Name == l.engine.cfg.Model.Name || slices.Contains(l.engine.cfg.Model.Aliases, ask.Name)
	switch {
	case load && (ask.Name == "" || ask.Path == ""):
		return x.fail(refuse(400, "Both 'lora_name' and 'lora_path' must be provided."))
	case load && base:
		return x.fail(refuse(400, "The lora adapter '%s' conflicts with a served base model.", ask.Name))
	case load && listed && !ask.Inplace:
		return x.fail(refuse(400,
			"The lora adapter '%s' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True.", ask.Name))
	case !load && ask.Name == "":
		return x.fail(refuse(400, "'lora_name' needs to be provided to unload a LoRA adapter."))
	case !load && (base || !listed):
		return x.fail(refuse(404, "The lora adapter '%s' cannot be found.", ask.Name))
	}
	l.adapters.change(x.Port, ask.Name, load)
	done := "removed"
	if load {
		done = "added"
	}
	return x.Answer(http.StatusOK, "text/plain; charset=utf-8", []byte("Success: LoRA adapter '"+ask.Name+"' "+done+" successfully."))
}
