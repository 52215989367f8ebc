package admin

import (
	"net/http"
	"time"
)

// bodyTime is how long a client may take to send a body.
const bodyTime = 10 * time.Second

// limitBodyTime ends connections whose clients do not send the body that they announced. Without it
// net/http would wait for the rest of a body before it answers, even if the route takes no body or
// the request has no token. At the end of a body, net/http itself lifts the deadline.
func limitBodyTime(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength != 0 { // -1: a body of unknown length
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime)) // fails only for the writers of tests
		}
		next.ServeHTTP(w, r)
	})
}

// writeTime is how long a client may take to read what one write sends, unless its route sets a
// deadline itself.
const writeTime = time.Minute

// limitWriteTime ends connections whose clients do not read their answers. Without it net/http
// would keep an answer for ever.
func limitWriteTime(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next.ServeHTTP(&timedWriter{ResponseWriter: w, conn: http.NewResponseController(w)}, r)
	})
}

// timedWriter limits the time of each write.
type timedWriter struct {
	http.ResponseWriter
	conn        *http.ResponseController
	ownDeadline bool // the route has set a deadline
}

func (w *timedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *timedWriter) SetWriteDeadline(t time.Time) error {
	w.ownDeadline = true
	return w.conn.SetWriteDeadline(t)
}

func (w *timedWriter) Write(p []byte) (int, error) {
	if !w.ownDeadline {
		_ = w.conn.SetWriteDeadline(time.Now().Add(writeTime)) // fails only for the writers of tests
	}
	return w.ResponseWriter.Write(p)
}
