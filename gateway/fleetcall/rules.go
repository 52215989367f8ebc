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

// Call is an operator's call to all engines, or to those of a group.
type Call struct {
	Path   string          `json:"path"`   // path on the engines, with its query
	Method string          `json:"method"` // HTTP method; default: POST
	Group  string          `json:"group"`  // decode group to call; empty: all engines
	Body   json.RawMessage `json:"body"`   // body that each engine gets; by default {}, and none for a GET
}

// Refusal says why no engine was called.
type Refusal struct {
	Status       int
	Code, Reason string
}

// Answer is the answer of one engine to an operator's call.
type Answer struct {
	Engine string          `json:"engine"`          // host:port
	Done   bool            `json:"done"`            // the engine did what it was asked for
	Status int             `json:"status"`          // HTTP status of the engine's answer; 0: no answer came
	Body   json.RawMessage `json:"body,omitempty"`  // body of the answer, at most 16 KiB; a string if it is not JSON, or has more than 8 levels
	Error  string          `json:"error,omitempty"` // why the engine did not do what it was asked for
	Ms     float64         `json:"ms"`              // how long the call took, in milliseconds
	// the engine restarted after its pause began: it has its initial weights again, and is paused only
	// if a later call has paused it
	Restarted bool `json:"restarted,omitempty"`

	sent bool // the call was sent, so the engine may have acted
}

// Result is the outcome of a call.
type Result struct {
	Done    bool     `json:"done"` // every engine did what it was asked for
	Path    string   `json:"path"`
	Group   string   `json:"group,omitempty"`
	Paused  []string `json:"paused,omitempty"` // the pauses in force after the call: group, path of the call, and time
	Engines []Answer `json:"engines"`
}

// target is the address of one or more engines. It is called once, although engines of two roles
// may share it.
type target struct {
	id     string   // host:port
	keys   []string // keys of the engines at this address: role and host:port
	target *engine.Target
}

// hasRestarted says whether an engine at the address restarted after its pause began. Engines of
// two roles may share the address.
func (t *target) hasRestarted(engines *roster.Snapshot) bool {
	return slices.ContainsFunc(t.keys, func(key string) bool {
		called := engines.Engine(key) // nil: the engine has left in the meantime
		return called != nil && called.RestartedInPause()
	})
}

// checkedCall is a call that was checked, with its engines.
type checkedCall struct {
	Call
	effects []string // what the call does to engines: config.CallPauses, CallEmpties, CallResumes
	targets []target
}

// does says whether the call has an effect on engines: config.CallPauses, CallEmpties or
// CallResumes.
func (p *checkedCall) does(what string) bool { return slices.Contains(p.effects, what) }

// keysWhere returns the keys of the engines of all targets for whose index matches returns true.
func (p *checkedCall) keysWhere(matches func(i int) bool) (all []string) {
	for i := range p.targets {
		if matches(i) {
			all = append(all, p.targets[i].keys...)
		}
	}
	return all
}

// setDefaults fills in the method and the body of a call if they are not given. It refuses a method
// that no call may have, and a GET with a body.
func (c *Call) setDefaults() *Refusal {
	c.Method = strings.ToUpper(c.Method)
	if c.Method == "" {
		c.Method = http.MethodPost
	}
	if !slices.Contains([]string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete}, c.Method) {
		return &Refusal{http.StatusBadRequest, "bad_body",
			fmt.Sprintf("%q is not a method of these; write GET, POST, PUT or DELETE", c.Method)}
	}
	if string(c.Body) == "null" { // a JSON null means that no body is given
		c.Body = nil
	}
	if len(c.Body) == 0 && c.Method != http.MethodGet {
		c.Body = json.RawMessage("{}") // SGLang's /pause_generation needs a body, and no other endpoint objects to one
	}
	if c.Method == http.MethodGet && len(c.Body) > 0 {
		return &Refusal{http.StatusBadRequest, "bad_body", "a GET has no body; write POST, or leave the body out"}
	}
	return nil
}

// check checks a call. It returns what the call does and which engines it goes to, or why it is
// refused. paths has, for each path that may be called, what a call of it does to engines
// (config.CallPauses, CallEmpties, CallResumes).
func (c Call) check(paths map[string][]string, engines *roster.Snapshot) (*checkedCall, *Refusal) {
	if refusal := c.setDefaults(); refusal != nil {
		return nil, refusal
	}
	effects, refusal := c.checkPath(paths)
	if refusal != nil {
		return nil, refusal
	}
	p := &checkedCall{Call: c, effects: effects, targets: targetsOf(engines, c.Group)}
	if refusal := p.checkTargets(engines.Pauses()); refusal != nil {
		return nil, refusal
	}
	if refusal := p.checkPauses(engines.Pauses()); refusal != nil {
		return nil, refusal
	}
	return p, nil
}

// checkPath returns what a call of the path does to engines, or why the path or its query is
// refused.
func (c *Call) checkPath(paths map[string][]string) (effects []string, _ *Refusal) {
	path, query, _ := strings.Cut(c.Path, "?")
	effects, listed := paths[path]
	notOfQuery := func(r rune) bool { return r <= ' ' || r > '~' || r == '#' } // a space, or not printable ASCII; # begins a fragment
	switch {
	case !listed:
		names := slices.Sorted(maps.Keys(paths))
		return nil, &Refusal{http.StatusNotFound, "not_found",
			fmt.Sprintf("%q is not among the paths that may be called%s; there are %s, and fleet_call.paths of the config adds others",
				path, spelling.Hint(path, names), strings.Join(names, ", "))}
	case strings.ContainsFunc(query, notOfQuery):
		return nil, &Refusal{http.StatusBadRequest, "bad_body", fmt.Sprintf("the query of %q has what no query has; encode it", path)}
	}
	return effects, nil
}

// checkTargets refuses a call that would go to no engine, unless it ends the pause of a group whose
// engines have left.
func (p *checkedCall) checkTargets(pauses []roster.Pause) *Refusal {
	isPaused := slices.ContainsFunc(pauses, func(pause roster.Pause) bool { return pause.Group == p.Group })
	endsEmptyPause := p.does(config.CallResumes) && isPaused
	switch {
	case len(p.targets) > 0 || endsEmptyPause:
		return nil
	case p.Group == "":
		return &Refusal{http.StatusNotFound, "not_found", "there is no engine to call; GET /workers lists those that there are"}
	}
	return &Refusal{http.StatusNotFound, "not_found",
		fmt.Sprintf("no engine that decodes is in group %q; GET /workers lists them, and without a group all engines are called", p.Group)}
}

// checkPauses refuses a call that resumes one group while all engines are paused by one call: a
// part of such a pause cannot end.
func (p *checkedCall) checkPauses(pauses []roster.Pause) *Refusal {
	ofAllEngines := func(pause roster.Pause) bool { return pause.Group == "" && !pause.Left }
	resumesGroup := p.does(config.CallResumes) && p.Group != ""
	if resumesGroup && slices.ContainsFunc(pauses, ofAllEngines) {
		return &Refusal{http.StatusConflict, "call_refused",
			fmt.Sprintf("all engines are paused, and not group %q alone; resume them all, by a call without a group", p.Group)}
	}
	return nil
}

// targetsOf returns the addresses of the engines that decode in a group; an empty group means all
// engines. It leaves out an engine whose region another proxy owns, because this proxy sends it no
// requests. Engines with the same address share a target.
func targetsOf(engines *roster.Snapshot, group string) (targets []target) {
	for _, e := range engines.Engines() {
		called := group == "" || e.InGroup(group)
		if !called || e.OwnedByOther() {
			continue
		}
		if i := slices.IndexFunc(targets, func(known target) bool { return known.id == e.ID }); i >= 0 {
			targets[i].keys = append(targets[i].keys, e.Key())
			continue
		}
		targets = append(targets, target{e.ID, []string{e.Key()}, e.At(roster.NoRank)})
	}
	return targets
}

// setDone sets whether an engine did what it was asked for, and otherwise why not. An engine does
// not empty a cache while requests or hand-offs hold blocks of it: vLLM then answers 200 with
// success false (0.32 and 0.33, entrypoints/serve/dev/cache/api_router.py), and SGLang answers 400
// (0.5.23, entrypoints/http_server.py).
func (a *Answer) setDone() {
	var reply struct {
		Success *bool `json:"success"`
	}
	_ = json.Unmarshal(a.Body, &reply) // if the body is not a JSON object, only the status of the answer counts
	switch {
	case a.Error != "": // the answer did not come, or broke off
	case a.Status == http.StatusNotFound || a.Status == http.StatusMethodNotAllowed:
		a.Error = "the engine has no such path for this method; vLLM has it only with VLLM_SERVER_DEV_MODE=1"
	case a.Status/100 != 2:
		a.Error = fmt.Sprintf("the engine answered %d", a.Status)
	case reply.Success != nil && !*reply.Success:
		a.Error = "the engine says that it did not do it; requests or hand-offs may still hold what was to be freed, so pause first, or call " +
			"again"
	default:
		a.Done = true
	}
}

// mayHaveActed says whether the engine may have done what it was asked for, at least on some of its
// ranks. An engine that does not have the path, or not for this method, did nothing.
func (a *Answer) mayHaveActed() bool {
	return a.sent && a.Status != http.StatusNotFound && a.Status != http.StatusMethodNotAllowed
}

// didNotAct says that the engine did not do what it was asked for, and will not do it later.
func (a *Answer) didNotAct() bool {
	mayComeLater := a.sent && a.Status == 0 // the engine has the call, and has not answered
	return !a.Done && !mayComeLater
}

// endsPause says by the engines' answers whether the pause of the called group ends. before are the
// engines before the call. unresumed are the keys of the engines that stay paused even then,
// because they did not resume in this call or in an earlier one.
func (p *checkedCall) endsPause(answers []Answer, before *roster.Snapshot) (ends bool, unresumed []string) {
	switch {
	case p.does(config.CallPauses):
		return p.endsNewPause(answers, before)
	case p.does(config.CallResumes):
		return p.endsByResume(answers)
	}
	return false, nil
}

// endsNewPause says whether the pause that this call has begun ends at once: it is new, and every
// engine refused it. If one engine is paused, or may be later, those that step with it must get no
// requests. Engines that were paused before the call stay paused.
func (p *checkedCall) endsNewPause(answers []Answer, before *roster.Snapshot) (ends bool, unresumed []string) {
	mayPause := func(a Answer) bool { return !a.didNotAct() } // the engine is paused, or may be later
	isOfGroup := func(pause roster.Pause) bool { return pause.Group == p.Group && !pause.Left }
	if slices.ContainsFunc(before.Pauses(), isOfGroup) || slices.ContainsFunc(answers, mayPause) {
		return false, nil
	}
	return true, p.keysWhere(func(i int) bool { return slices.ContainsFunc(p.targets[i].keys, before.Paused) })
}

// endsByResume says whether a call that resumes ends the pause: it does once any engine has
// resumed, or if no engine is there. The pause then goes on only for the engines that did not do
// what they were asked for (unresumed).
func (p *checkedCall) endsByResume(answers []Answer) (ends bool, unresumed []string) {
	anyResumed := slices.ContainsFunc(answers, func(a Answer) bool { return a.Done })
	if !anyResumed && len(answers) > 0 {
		return false, nil
	}
	return true, p.keysWhere(func(i int) bool { return !answers[i].Done })
}
