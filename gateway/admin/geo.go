package admin

import (
	"cmp"
	"net/http"
	"strconv"

	"go.uber.org/zap"

	"evenkeel/gateway/owner"
	"evenkeel/geo"
)

// peersOr404 returns what this proxy knows of its peers in other regions. If there are no other
// regions, it answers the request with 404 and returns nil.
func (h *handler) peersOr404(w http.ResponseWriter) *geo.Peers {
	peers := h.g.Geo()
	if peers == nil {
		fail(w, http.StatusNotFound, "not_found", "there are no other regions: geo.mode is off")
	}
	return peers
}

// regions is the answer to GET /geo: the peers of this proxy, and for which regions and decode
// groups it holds the lease.
type regions struct {
	geo.Status
	Owners []owner.RegionStatus `json:"owners,omitempty"`
	HA     *owner.HAStatus      `json:"ha,omitempty"`
}

// geo answers with the peers of this proxy, and with what it owns (regions).
func (h *handler) geo(w http.ResponseWriter, _ *http.Request) {
	if peers := h.peersOr404(w); peers != nil {
		reply(w, regions{peers.Status(), h.g.Owners(), h.g.HA()})
	}
}

// tuneGeo changes the policy for choosing a region, and its parameters. The body is
// {"policy":NAME,"qs":1,"w":1,"load":50,"min_gain_ms":10}. Any of the keys may be left out.
func (h *handler) tuneGeo(w http.ResponseWriter, r *http.Request) {
	peers := h.peersOr404(w)
	var t geo.Tuning
	if peers == nil || !readJSON(w, r, &t) { // the request has been answered with an error
		return
	}
	before := peers.PolicyText()
	if err := peers.Tune(t); err != nil {
		fail(w, http.StatusBadRequest, "bad_policy", err.Error())
		return
	}
	h.log.Info("an operator changed the geo policy", zap.String("from", before), zap.String("to", peers.PolicyText()), zap.Any("tuning", t))
	reply(w, peers.Status())
}

// receipts lists the last n requests that were forwarded to other regions; n comes from the query.
func (h *handler) receipts(w http.ResponseWriter, r *http.Request) {
	peers := h.peersOr404(w)
	if peers == nil {
		return
	}
	limit, err := strconv.Atoi(cmp.Or(r.URL.Query().Get("n"), "100"))
	if err != nil || limit < 1 {
		fail(w, http.StatusBadRequest, "bad_query", "n is a number of receipts from 1 on")
		return
	}
	reply(w, map[string]any{"receipts": peers.Receipts(limit)})
}
