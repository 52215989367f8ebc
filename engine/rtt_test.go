package engine

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest/observer"
)

func TestRTTIsThatOfHealthChecksOverOpenConnections(t *testing.T) {
	f := newFake()
	f.delay = 20 * time.Millisecond
	watched(t, f, func(t *testing.T, m *Monitor, _ *observer.ObservedLogs, _ *prometheus.Registry) {
		require.Zero(t, m.RTT("p0"), "the first one connects")
		require.Zero(t, m.RTT("p1"))
		time.Sleep(3 * time.Second)
		require.Equal(t, 20*time.Millisecond, m.RTT("p0"))

		f.mu.Lock()
		f.delay = 120 * time.Millisecond
		f.mu.Unlock()
		time.Sleep(1500 * time.Millisecond)
		require.InDelta(t, 60, m.RTT("p0").Milliseconds(), 25, "one or two of them count three tenths each")
		time.Sleep(30 * time.Second)
		require.InDelta(t, 120, m.RTT("p0").Milliseconds(), 1)
	})
}
