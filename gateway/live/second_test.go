package live

import (
	"encoding/json"
	"net/http/httptest"
	"testing"
	"time"
)

// BenchmarkSecond is what a second costs of judging and telling 144 ranks, whose facts cost nothing
// here: without a reader one second in five is a look, with one every second is, and its document
// is compressed, sent and read.
func BenchmarkSecond(b *testing.B) {
	for name, read := range map[string]bool{"nobody-reads": false, "page-open": true} {
		b.Run(name, func(b *testing.B) {
			f := NewFake(144)
			w := f.Watch()
			l := f.Live(w)
			second := func() {
				f.Pass(time.Second)
				w.CheckOnce(b.Context())
			}
			for range 3600 { // the samples of an hour are kept
				second()
			}
			if read {
				server := httptest.NewServer(l)
				defer server.Close()
				r := stream(b, server.URL, "gzip")
				defer r.body.Close()
				for _, v := range []any{&History{}, &Document{}, &Strip{}} {
					r.next(b, v)
				}
				alone := second
				second = func() {
					alone()
					for r.next(b, new(json.RawMessage)) != "document" {
					}
				}
			}
			for b.Loop() {
				second()
			}
		})
	}
}
