package admin

import (
	"cmp"
	"net/http"
	"strconv"
)

// decisions lists the receipts of the last requests, the latest first: ?n= of
// them (100), ?model= of one model, ?running=1 those that have not ended; ?id=
// those of a request, by its id or by the X-Request-Id of its client.
func (h *handler) decisions(w http.ResponseWriter, r *http.Request) {
	q, ring := r.URL.Query(), h.g.Receipts()
	if ring == nil {
		fail(w, http.StatusNotFound, "not_found", "no receipts are kept: admin.receipts is 0")
		return
	}
	n, err := strconv.Atoi(cmp.Or(q.Get("n"), "100"))
	running, err2 := strconv.ParseBool(cmp.Or(q.Get("running"), "0"))
	if err != nil || err2 != nil || n < 1 {
		fail(w, http.StatusBadRequest, "bad_query", "n is a number of receipts from 1 on, running 0 or 1")
		return
	}
	if id := q.Get("id"); id != "" {
		found := ring.Find(id, n)
		if len(found) == 0 {
			fail(w, http.StatusNotFound, "not_found", "no receipt is kept of a request with this id; it is too long ago (admin.receipts), or another proxy had it")
			return
		}
		reply(w, map[string]any{"receipts": found})
		return
	}
	ended, open := ring.Count()
	reply(w, map[string]any{"kept": ended, "running": open, "receipts": ring.Last(n, q.Get("model"), running)})
}
