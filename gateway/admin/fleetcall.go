package admin

import (
	"errors"
	"net/http"

	"evenkeel/gateway/fleetcall"
)

// callFleet calls all engines, or those of one group. It answers 502 if some engine failed, for
// tools that look only at the status.
func (h *handler) callFleet(w http.ResponseWriter, r *http.Request) {
	var in fleetcall.Call
	if !readJSON(w, r, &in) {
		return
	}
	result, refusal := h.g.Calls().Do(r.Context(), in, operatorName(r))
	switch {
	case refusal != nil:
		fail(w, refusal.Status, refusal.Code, refusal.Reason)
	case !result.Done:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusBadGateway)
		reply(w, result)
	default:
		reply(w, result)
	}
}

// resetPrefixCache empties the prefix caches of all engines. It answers with an error if some
// engine did not do it.
func (h *handler) resetPrefixCache(w http.ResponseWriter, r *http.Request) {
	result, refusal := h.g.Calls().Do(r.Context(), fleetcall.Call{Path: "/reset_prefix_cache"}, operatorName(r))
	if refusal != nil {
		fail(w, refusal.Status, refusal.Code, refusal.Reason)
		return
	}
	var failed []error
	for _, a := range result.Engines {
		if !a.Done {
			failed = append(failed, errors.New("engine "+a.Engine+": "+a.Error))
		}
	}
	if len(failed) > 0 {
		fail(w, http.StatusBadGateway, "engine_failed", errors.Join(failed...).Error())
		return
	}
	reply(w, map[string]string{"message": "ok"})
}

// operatorName is how the log names an operator. An operator who sent the token has no other name
// than an address.
func operatorName(r *http.Request) string {
	if bearer(r) == "" {
		return r.RemoteAddr
	}
	return r.RemoteAddr + ", with the token"
}
