package admin

import (
	"net/http"
	"time"
)

// bodyTime is how long a client may take to send a body.
const bodyTime = 10 * time.Second

// limitBodyTime ends connections whose clients do not send the body that they announced. Without it net/http would wait for the rest of a
// body before it answers, even if the route takes no body or the request has no token. At the end of a body, net/http itself lifts the
// deadline.
func limitBodyTime(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength != 0 { // -1: a body of unknown length
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime)) // fails only for the writers of tests
		}
		next.ServeHTTP(w, r)
	})
}
