package config

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// FleetCall has the settings of POST /admin/fleet/call, which sends one call to all engines.
type FleetCall struct {
	Timeout time.Duration       `yaml:"timeout"` // time limit for the calls to all engines together
	Paths   map[string][]string `yaml:"paths"`   // the allowed paths, each with those effects of a call that the proxy must know
}

// Effects of a call on an engine, to which the proxy must react.
const (
	CallPauses  = "pauses"  // the engine takes no requests after the call
	CallResumes = "resumes" // the engine takes requests again
	CallEmpties = "empties" // the engine's prefix cache is empty, or invalid because the model's weights have changed
)

// defaultCalls are the paths that are allowed although the file does not list them. They are those
// of vLLM 0.32 and 0.33, which has them only with VLLM_SERVER_DEV_MODE=1
// (entrypoints/rl/online/api_router.py, entrypoints/serve/dev/cache/api_router.py), and those of
// SGLang 0.5.23 (entrypoints/http_server.py). /pause empties the prefix cache unless its mode is
// keep.
var defaultCalls = map[string][]string{
	"/pause": {CallPauses, CallEmpties}, "/resume": {CallResumes}, "/reset_prefix_cache": {CallEmpties},
	"/pause_generation": {CallPauses}, "/continue_generation": {CallResumes}, "/flush_cache": {CallEmpties},
	// vLLM has these two only with VLLM_ALLOW_RUNTIME_LORA_UPDATING (0.31,
	// entrypoints/serve/lora/api_router.py).
	"/v1/load_lora_adapter": {}, "/v1/unload_lora_adapter": {},
}

// addDefaultPaths adds defaultCalls to the paths. If the file lists the same path, the effects in
// the file apply.
func (f *FleetCall) addDefaultPaths() {
	paths := maps.Clone(defaultCalls)
	maps.Copy(paths, f.Paths)
	f.Paths = paths
}

// checkFleetCall checks that each path is an engine's path for operators, and that its effects have
// names that evenkeel knows.
func (c *Config) checkFleetCall(bad report) {
	if c.FleetCall.Timeout <= 0 {
		bad("$.fleet_call.timeout", "%v; a time above 0 is needed", c.FleetCall.Timeout)
	}
	for path, does := range c.FleetCall.Paths {
		at := "$.fleet_call.paths." + path
		isPath := strings.HasPrefix(path, "/") && !strings.ContainsAny(path, "?# \t") && !strings.Contains(path, "..")
		_, isDefault := defaultCalls[path]
		if !isPath || strings.HasPrefix(path, "/v1/") && !isDefault { // other paths below /v1 are for clients
			bad(at, "%q is no path of an engine for operators; write one such as /update_weights, without a host and without a query", path)
		}
		for _, effect := range does {
			if !slices.Contains([]string{CallPauses, CallResumes, CallEmpties}, effect) {
				bad(at, "%q is nothing that a call does; write %s, %s or %s, or [] for none of these",
					effect, CallPauses, CallResumes, CallEmpties)
			}
		}
		if slices.Contains(does, CallPauses) && slices.Contains(does, CallResumes) {
			bad(at, "a call cannot pause and resume; write one of the two")
		}
	}
}
