package fleetcall

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/internal/spelling"
)

// Call is what an operator asks of engines.
type Call struct {
	Path   string          `json:"path"`   // of the engines, with its query
	Method string          `json:"method"` // default POST
	Group  string          `json:"group"`  // of engines that decode; empty: all engines
	Body   json.RawMessage `json:"body"`   // that each engine gets; without one it is {}, and a GET has none
}

// Refusal is why no engine was called.
type Refusal struct {
	Status       int
	Code, Reason string
}

// Answer is what one engine said.
type Answer struct {
	Engine    string          `json:"engine"`              // host:port
	Done      bool            `json:"done"`                // it did what it was asked for
	Status    int             `json:"status"`              // 0: no answer came
	Body      json.RawMessage `json:"body,omitempty"`      // what is no JSON is a text; at most 16 KiB of it
	Error     string          `json:"error,omitempty"`     // why it is not done
	Ms        float64         `json:"ms"`                  // the call took so long
	Restarted bool            `json:"restarted,omitempty"` // its process began after the pause that it is in: it has the weights of its start, and only a call since then has paused it

	sent bool // it may have acted
}

// Result is what came of a call.
type Result struct {
	Done    bool     `json:"done"` // by every engine
	Path    string   `json:"path"`
	Group   string   `json:"group,omitempty"`
	Paused  []string `json:"paused,omitempty"` // which engines are paused now, each with the reason
	Engines []Answer `json:"engines"`
}

// place is an address that is called once, although engines of two roles may share it.
type place struct {
	id     string
	keys   []string
	target *engine.Target
}

// plan is a call that may be made.
type plan struct {
	Call
	does   []string // config.CallPauses and others
	places []place
}

func (p *plan) is(what string) bool { return slices.Contains(p.does, what) }

// keys are the engines that are called, or of an answer that is meant.
func (p *plan) keys(meant func(i int) bool) (all []string) {
	for i := range p.places {
		if meant(i) {
			all = append(all, p.places[i].keys...)
		}
	}
	return all
}

// planned says what a call does and whom it calls.
func (c Call) planned(paths map[string][]string, engines *roster.Published) (*plan, *Refusal) {
	c.Method = strings.ToUpper(c.Method)
	if c.Method == "" {
		c.Method = http.MethodPost
	}
	if !slices.Contains([]string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete}, c.Method) {
		return nil, &Refusal{http.StatusBadRequest, "bad_body",
			fmt.Sprintf("%q is not a method of these; write GET, POST, PUT or DELETE", c.Method)}
	}
	if len(c.Body) == 0 && c.Method != http.MethodGet {
		c.Body = json.RawMessage("{}") // SGLang's /pause_generation wants a body, and nothing minds one
	}
	if c.Method == http.MethodGet && len(c.Body) > 0 {
		return nil, &Refusal{http.StatusBadRequest, "bad_body", "a GET has no body; write POST, or leave the body out"}
	}
	path, query, _ := strings.Cut(c.Path, "?")
	does, listed := paths[path]
	switch {
	case !listed:
		names := slices.Sorted(maps.Keys(paths))
		return nil, &Refusal{http.StatusNotFound, "not_found",
			fmt.Sprintf("%q is not among the paths that may be called%s; there are %s, and fleet_call.paths of the config adds others",
				path, spelling.Hint(path, names), strings.Join(names, ", "))}
	case strings.ContainsFunc(query, func(r rune) bool { return r <= ' ' || r > '~' || r == '#' }):
		return nil, &Refusal{http.StatusBadRequest, "bad_body", fmt.Sprintf("the query of %q has what no query has; encode it", path)}
	}
	p := &plan{Call: c, does: does}
	for _, e := range engines.Engines() {
		if e.Foreign() || c.Group != "" && !e.InGroup(c.Group) {
			continue
		}
		if i := slices.IndexFunc(p.places, func(o place) bool { return o.id == e.ID }); i >= 0 {
			p.places[i].keys = append(p.places[i].keys, e.Key())
			continue
		}
		p.places = append(p.places, place{e.ID, []string{e.Key()}, e.At(-1)})
	}
	if len(p.places) == 0 && c.Group == "" {
		return nil, &Refusal{http.StatusNotFound, "not_found", "there is no engine to call; GET /workers lists those that there are"}
	}
	if len(p.places) == 0 {
		return nil, &Refusal{http.StatusNotFound, "not_found",
			fmt.Sprintf("no engine that decodes is in group %q; GET /workers lists them, and without a group all engines are called", c.Group)}
	}
	if p.is(config.CallResumes) && c.Group != "" &&
		slices.ContainsFunc(engines.Pauses(), func(o roster.Pause) bool { return o.Group == "" && o.Left == nil }) {
		return nil, &Refusal{http.StatusConflict, "call_refused",
			fmt.Sprintf("all engines are paused, and not group %q alone; resume them all, by a call without a group", c.Group)}
	}
	return p, nil
}

// judge fills in whether an engine did what it was asked for. vLLM answers 200 with success false where a cache stays as it is, because
// requests or hand-offs hold its blocks (0.32 and 0.33, entrypoints/serve/dev/cache/api_router.py). SGLang answers 400 (0.5.23,
// entrypoints/http_server.py).
func (a *Answer) judge() {
	var told struct {
		Success *bool `json:"success"`
	}
	_ = json.Unmarshal(a.Body, &told) // if the body is not a JSON object, only the status of the answer counts
	switch {
	case a.Error != "":
	case a.Status == http.StatusNotFound || a.Status == http.StatusMethodNotAllowed:
		a.Error = "the engine has no such path for this method; vLLM has it only with VLLM_SERVER_DEV_MODE=1"
	case a.Status/100 != 2:
		a.Error = fmt.Sprintf("the engine answered %d", a.Status)
	case told.Success != nil && !*told.Success:
		a.Error = "the engine says that it did not do it; requests or hand-offs may still hold what was to be freed, so pause first, or call " +
			"again"
	default:
		a.Done = true
	}
}

// mayHaveActed says whether the engine may have done something of what it was asked for, also in a part of its ranks.
func (a *Answer) mayHaveActed() bool {
	return a.sent && a.Status != http.StatusNotFound && a.Status != http.StatusMethodNotAllowed
}

// refused says that the engine did not do it, and will not.
func (a *Answer) refused() bool { return !a.Done && (!a.sent || a.Status != 0) }

// then is what follows from the answers for the pause of the plan's group. end: it is over, but for the engines that are left. was are the
// pauses before the call.
func (p *plan) then(answers []Answer, was []roster.Pause) (end bool, left []string) {
	did := func(a Answer) bool { return a.Done }
	switch {
	case p.is(config.CallPauses): // one that no engine knows was none. Else the others are paused, and step with those that are not
		paused := slices.ContainsFunc(was, func(o roster.Pause) bool { return o.Group == p.Group && o.Left == nil })
		if paused || slices.ContainsFunc(answers, func(a Answer) bool { return !a.refused() }) {
			return false, nil
		}
		for _, o := range was { // what had not resumed before has not now
			left = slices.AppendSeq(left, maps.Keys(o.Left))
		}
		return true, left
	case p.is(config.CallResumes) && slices.ContainsFunc(answers, did):
		return true, p.keys(func(i int) bool { return !answers[i].Done })
	}
	return false, nil
}
