package roster

import (
	"crypto/tls"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/mooncake"
)

// An arrival speaks for the core of its rank only where it cannot have waited for us: what a slow
// client kept in the socket was made long before.
func TestWhatSpeaksForACore(t *testing.T) {
	for _, row := range []struct {
		name     string
		bytes    int // of each arrival
		tls      bool
		endpoint mooncake.Endpoint
		rank     int
		tokens   bool
		speaks   bool
	}{
		{"an event at a time", 200, false, mooncake.Chat, -1, true, true},
		{"comments of the API server", 200, false, mooncake.Chat, -1, false, false},
		{"a backlog", 4 << 10, false, mooncake.Chat, -1, true, false},
		{"an event at a time, over TLS", 200, true, mooncake.Chat, -1, true, false},
		{"of a rank that the request names", 200, false, mooncake.Chat, 1, true, true},
		{"of a response, which may be on another rank", 200, false, mooncake.Responses, 1, true, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rank := &Rank{Signs: engine.NewLiveness(), Target: &engine.Target{Rank: row.rank}}
				if row.tls {
					rank.Target.TLS = &tls.Config{}
				}
				var came engine.LastRead
				began := time.Now()
				for range 60 {
					time.Sleep(time.Second)
					rank.ObserveRead(&came, row.endpoint, row.bytes, false, row.tokens, time.Now())
				}
				require.Equal(t, row.speaks, rank.Signs.LastSign().After(began))
			})
		})
	}
}
