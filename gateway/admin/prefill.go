package admin

import (
	"errors"
	"io"
	"net/http"

	"go.uber.org/zap"

	"evenkeel/prefill"
)

// prefill answers with the state of the prefill tier.
func (h *handler) prefill(w http.ResponseWriter, _ *http.Request) { reply(w, h.g.Prefill().Overview()) }

// setPrefillPolicy changes the prefill policy to the one that the body names.
func (h *handler) setPrefillPolicy(w http.ResponseWriter, r *http.Request) {
	h.setPolicyFromBody(w, r, "prefill policy", h.g.Prefill())
}

// scorePrefill takes the body of a request to /v1/... and says how each prefill engine would score
// for it. It sends the request to no engine.
func (h *handler) scorePrefill(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		fail(w, http.StatusBadRequest, "bad_body", err.Error())
		return
	}
	scores, err := h.g.ScorePrefill(body)
	if errors.Is(err, prefill.ErrModelNotFound) {
		fail(w, http.StatusNotFound, "model_not_found", err.Error())
		return
	}
	if err != nil {
		fail(w, http.StatusBadRequest, "bad_request", err.Error())
		return
	}
	reply(w, scores)
}

// hotspots answers with the classes of requests that share a long prefix and may overload the
// engines that hold it.
func (h *handler) hotspots(w http.ResponseWriter, _ *http.Request) {
	reply(w, h.g.Prefill().Hotspots())
}

// forgetPrefixes empties the prefix index; with ?candidate= only the part of that prefill engine.
func (h *handler) forgetPrefixes(w http.ResponseWriter, r *http.Request) {
	id := r.URL.Query().Get("candidate")
	if !h.g.ForgetPrefixes(id) {
		fail(w, http.StatusNotFound, "not_found", "no prefill candidate is named "+id+"; GET /prefill lists them")
		return
	}
	h.log.Info("an operator emptied the prefix index", zap.String("candidate", id))
	w.WriteHeader(http.StatusNoContent)
}
