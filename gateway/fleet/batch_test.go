package fleet_test

import (
	"context"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/gateway/receipt"
)

// Batch is held back while other requests wait or run that need its slot, and runs when they have
// ended. By key or by header, it is seen in the status, on the page and in the metrics.
func TestBatchBesideOnline(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	refclient.KeyFile(t, file, "night ek-night , batch: true", "ops ek-ops , trusted: true",
		"nightops ek-nightops , trusted: true, batch: true")
	keyed := func(cfg *config.Config) { cfg.KeysFile = file }
	for name, begin := range map[string]func(*testing.T) *bed{
		"pairs": func(t *testing.T) *bed {
			return start(t, options{decode: []refengine.Config{{Slots: 2}}, configure: keyed})
		},
		"aggregated": func(t *testing.T) *bed {
			return start(t, options{mixed: []refengine.Config{{Slots: 2}}, configure: keyed})
		},
		"bound on arrival": func(t *testing.T) *bed {
			return early(t, refengine.SGLang, options{decode: []refengine.Config{{Slots: 2}}, configure: keyed})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := begin(t)
			ctx, leave := context.WithCancel(t.Context())
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, b.URL+refclient.ChatPath, strings.NewReader(chat(reftext.MakePrompt(1, 600), `"stream":true,"ignore_eos":true,`)))
			require.NoError(t, err)
			req.Header.Set("Authorization", "Bearer ek-ops")
			resp, err := b.HTTP.Do(req)
			require.NoError(t, err)
			defer func() { _ = resp.Body.Close() }()
			body := chat("a", `"max_tokens":2,`)
			held := b.queued("ek-night", body)
			second := b.queued("ek-ops", body, "X-Evenkeel-Class", "batch")
			require.EqualValues(t, 2, b.Metric(`evenkeel_prefill_queue_requests{priority="batch"}`))
			waits := b.receipts.Last(10, receipt.Filter{Key: "night"}, true)
			require.Len(t, waits, 1)
			require.Equal(t, "batch", waits[0].Class, "whoever looks at one that waits is told why")
			require.Zero(t, waits[0].Deadline)
			online := b.Post(refclient.ChatPath, body, "Authorization", "Bearer ek-ops", "X-Request-Id", "soon", "X-Evenkeel-Deadline-Ms", "60000",
				"X-Evenkeel-Priority", "3")
			require.Equal(t, 200, online.Status, "an online request finds a slot")
			soon := b.receipt("soon")
			require.Equal(t, 60_000., soon.Deadline)
			require.Equal(t, 3, soon.Priority)
			require.Empty(t, soon.Class)
			require.Equal(t, 200, b.Post(refclient.ChatPath, body, "Authorization", "Bearer ek-nightops", "X-Evenkeel-Class", "online").Status)
			require.Equal(t, 2, b.scheduler.Batch().Waiting)
			leave()
			require.Equal(t, 200, (<-held).Status)
			require.Equal(t, 200, (<-second).Status)
			b.settled(false)
			require.EqualValues(t, 2, b.Metric("evenkeel_prefill_batch_wait_seconds_count"))
			got := b.scheduler.Batch()
			require.EqualValues(t, 2, got.Ran)
			require.Positive(t, got.HeldS)
			require.Zero(t, got.Waiting)
		})
	}
}

// queued sends a request and returns when it waits.
func (b *bed) queued(key, body string, header ...string) <-chan reply {
	b.Helper()
	waiting := func() (n float64) {
		for line := range strings.Lines(b.page()) {
			if rest, ok := strings.CutPrefix(line, "evenkeel_prefill_queue_requests{"); ok {
				n += number(b.T, rest[strings.IndexByte(rest, ' ')+1:])
			}
		}
		return n
	}
	before := b.Metric("evenkeel_prefill_queue_displaced_total") + waiting()
	got := make(chan reply, 1)
	go func() { got <- b.Post(refclient.ChatPath, body, append(header, "Authorization", "Bearer "+key)...) }()
	b.Eventually("it waits", func() bool { return b.Metric("evenkeel_prefill_queue_displaced_total")+waiting() > before })
	return got
}

func number(t *testing.T, text string) float64 {
	t.Helper()
	n, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	require.NoError(t, err)
	return n
}
