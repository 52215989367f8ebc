package prefill

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAConfigThatCannotWorkIsRefused(t *testing.T) {
	scraper := func(context.Context, Candidate) (Sample, error) { return Sample{}, nil }
	for _, tt := range []struct {
		name string
		cfg  Config
		want string // in the error; empty: accepted
	}{
		{"nothing set", Config{}, ""},
		{"the defaults", func() Config { c := Default(); c.Scraper = scraper; return c }(), ""},
		{"an unknown policy", Config{Policy: "fastest"}, `unknown policy "fastest"`},
		{"a gate that never opens again", Config{KVThreshold: 0.01}, "kv_threshold"},
		{"a gate that never closes", Config{KVThreshold: 1.1}, "kv_threshold"},
		{"a threshold that is no number", Config{KVThreshold: math.NaN()}, "kv_threshold"},
		{"scraping without a scraper", Config{Scrape: ScrapeConfig{Interval: time.Second}}, "scraper"},
		{"a negative interval", Config{Scrape: ScrapeConfig{Interval: -1}}, "scrape.interval"},
		{"a negative scrape timeout", Config{Scrape: ScrapeConfig{Timeout: -1}}, "scrape.timeout"},
		{"a negative queue", Config{Queue: QueueConfig{Max: -1}}, "queue.max"},
		{"a negative queue timeout", Config{Queue: QueueConfig{Timeout: -1}}, "queue.timeout"},
		{"negative attempts", Config{Retry: RetryConfig{Attempts: -1}}, "retry.attempts"},
		{"a negative backoff", Config{Retry: RetryConfig{Base: -1}}, "retry.base"},
		{"the longest backoff", Config{Retry: RetryConfig{Base: maxRetryBase}}, ""},
		{"a backoff that could not be doubled eight times", Config{Retry: RetryConfig{Base: math.MaxInt64 >> 7}}, "write 1h0m0s or less"},
		{"more retries than requests", Config{Retry: RetryConfig{Budget: 1.5}}, "retry.budget"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := New(tt.cfg)
			if tt.want == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, tt.want)
			}
		})
	}
}
