package admin

import (
	"cmp"
	"net/http"
	"strconv"
	"time"

	"evenkeel/gateway/live"
	"evenkeel/gateway/receipt"
)

// decisions lists the receipts of the last requests, newest first. n is how many (100 if it is left
// out). model, key, outcome, engine, find and slow_ms select receipts. running=1 also lists
// requests that have not ended. brief=1 gives one line per receipt. id selects a single request by
// its own id or by the X-Request-Id of its client.
func (h *handler) decisions(w http.ResponseWriter, r *http.Request) {
	q, ring := r.URL.Query(), h.g.Receipts()
	if ring == nil {
		fail(w, http.StatusNotFound, "not_found", "no receipts are kept: admin.receipts is 0")
		return
	}
	n, err := strconv.Atoi(cmp.Or(q.Get("n"), "100"))
	withRunning, err2 := strconv.ParseBool(cmp.Or(q.Get("running"), "0"))
	brief, err3 := strconv.ParseBool(cmp.Or(q.Get("brief"), "0"))
	slowMs, err4 := strconv.ParseFloat(cmp.Or(q.Get("slow_ms"), "0"), 64)
	isValid := cmp.Or(err, err2, err3, err4) == nil && n >= 1 && slowMs >= 0 // a slowMs of NaN is not valid either
	if !isValid {
		fail(w, http.StatusBadRequest, "bad_query",
			"n is a number of receipts from 1 on, running and brief are 0 or 1, slow_ms is a time from 0 on")
		return
	}
	if id := q.Get("id"); id != "" {
		found := ring.Find(id, n)
		if len(found) == 0 { // another proxy may have it
			fail(w, http.StatusNotFound, "not_found",
				"no receipt is kept of a request with this id; it is too long ago (admin.receipts), or another proxy had it")
			return
		}
		reply(w, map[string]any{"receipts": found})
		return
	}
	ended, running := ring.Count()
	list := ring.Last(n, receipt.Filter{
		Model: q.Get("model"), Key: q.Get("key"), Outcome: q.Get("outcome"), Engine: q.Get("engine"), ID: q.Get("find"), SlowMs: slowMs,
	}, withRunning)
	if brief {
		reply(w, map[string]any{"kept": ended, "running": running, "receipts": []*receipt.Receipt{}, // an empty list, and not null
			"decisions": live.Decisions(list, time.Now())})
		return
	}
	reply(w, map[string]any{"kept": ended, "running": running, "receipts": list})
}
