package request

import (
	"bytes"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// breaker is the writer of a decode engine whose nth event (from 1) reaches the proxy as spoil
// makes it. The engine's events are cut out of what it writes, wherever a write ends.
type breaker struct {
	http.ResponseWriter
	spoil   func(event []byte) []byte
	nth     int
	seen    int
	pending []byte
}

func (w *breaker) Write(p []byte) (int, error) {
	w.pending = append(w.pending, p...)
	for {
		end := bytes.Index(w.pending, []byte("\n\n"))
		if end < 0 {
			return len(p), nil
		}
		event := bytes.Clone(w.pending[:end+2])
		w.pending = w.pending[end+2:]
		if w.seen++; w.seen == w.nth {
			event = w.spoil(event)
		}
		if _, err := w.ResponseWriter.Write(event); err != nil {
			return 0, err
		}
	}
}

func (w *breaker) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *breaker) Flush() { w.ResponseWriter.(http.Flusher).Flush() }

// broken has what an event may have become on its way, where something between the engine and the
// proxy has broken it. An event that is lost whole, or that comes without data, is not among them:
// by the rules of event streams it is no event, and nothing in the stream tells of it.
var broken = map[string]func(event []byte) []byte{
	"half of its JSON":   func(e []byte) []byte { return append(bytes.TrimRight(e, "\n")[:len(e)/2], "\n\n"...) },
	"no JSON":            func(e []byte) []byte { return replaceData(e, "<html>502 Bad Gateway</html>") },
	"a list":             func(e []byte) []byte { return replaceData(e, "[1,2]") },
	"null":               func(e []byte) []byte { return replaceData(e, "null") },
	"bytes of no text":   func(e []byte) []byte { return replaceData(e, "\xff\xfe\x00{") },
	"joined to the next": func(e []byte) []byte { return bytes.TrimRight(e, "\n") },
}

// replaceData keeps the other lines of an event.
func replaceData(event []byte, data string) []byte {
	var b strings.Builder
	for _, line := range strings.Split(strings.TrimRight(string(event), "\n"), "\n") {
		if strings.HasPrefix(line, "data:") {
			line = "data: " + data
		}
		b.WriteString(line + "\n")
	}
	return []byte(b.String() + "\n")
}

// Every attempt at the request meets the broken event. So the client is told of an error, before
// the first byte by the status and afterwards by an event, and never gets a text with a hole as if
// it were whole.
func TestABrokenEventInTheMiddle(t *testing.T) {
	eachDialect(t, append([]string{mooncake.AscendMooncakeV1}, anyone...), func(t *testing.T, d dialect, o setup) {
		if o.profile.Ascend() {
			o.profile.GivesBack = new(false)
		}
		for name, spoil := range broken {
			for _, nth := range []int{4, 9} {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					o := o
					o.late = true
					var at int
					o.front = func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
						engine.ServeHTTP(&breaker{ResponseWriter: w, spoil: spoil, nth: at}, r)
					}
					o.configure = func(c *config.Config, _ *Deps) { shortGrace(c) }
					b := start(t, o)
					at = nth // what engines said to each other before the test was whole
					for _, stream := range []bool{true, false} {
						got := d.judge(b, "words to prefill", stream)
						require.NotEqual(t, "right", got, "event %d, stream %t", nth, stream)
						if !stream {
							require.Equal(t, "502", got, "event %d", nth)
						}
					}
					b.settle()
				})
			}
		}
	})
}
