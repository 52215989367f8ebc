package admin

import (
	"errors"
	"net/http"

	"evenkeel/gateway/fleetcall"
)

// callFleet calls all engines, or those of one group. It answers 502 if some engine failed, for tools that look only at the status.
func (h *handler) callFleet(w http.ResponseWriter, r *http.Request) {
	var in fleetcall.Call
	if !read(w, r, &in) {
		return
	}
	out, wrong := h.g.Calls().Do(r.Context(), in, caller(r))
	switch {
	case wrong != nil:
		fail(w, wrong.Status, wrong.Code, wrong.Reason)
	case !out.Done:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusBadGateway)
		reply(w, out)
	default:
		reply(w, out)
	}
}

func (h *handler) resetPrefixCache(w http.ResponseWriter, r *http.Request) {
	out, wrong := h.g.Calls().Do(r.Context(), fleetcall.Call{Path: "/reset_prefix_cache"}, caller(r))
	if wrong != nil {
		fail(w, wrong.Status, wrong.Code, wrong.Reason)
		return
	}
	var failed []error
	for _, a := range out.Engines {
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

// caller names an operator in the log. An operator who sent the token has no other name than an address.
func caller(r *http.Request) string {
	if bearer(r) == "" {
		return r.RemoteAddr
	}
	return r.RemoteAddr + ", with the token"
}
