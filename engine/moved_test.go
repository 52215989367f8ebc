package engine

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// hosts are the engines at addresses, and the addresses of the one name that they have.
type hosts struct {
	mu   sync.Mutex
	at   map[netip.Addr]*fake // nil: a host that is not there, and that nothing comes back from
	name []netip.Addr
}

func (h *hosts) lead(to ...string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.name = nil
	for _, a := range to {
		h.name = append(h.name, netip.MustParseAddr(a))
	}
}

func (h *hosts) lookup(context.Context, string) ([]netip.Addr, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]netip.Addr(nil), h.name...), nil
}

func (h *hosts) dial(ctx context.Context, network, address string) (net.Conn, error) {
	h.mu.Lock()
	f := h.at[h.name[0]]
	h.mu.Unlock()
	if f == nil {
		<-ctx.Done()
		return nil, &net.OpError{Op: "dial", Err: ctx.Err()}
	}
	return f.dial(ctx, network, address)
}

// moves runs body beside a monitor of an engine with a name, which leads to 10.0.0.1. Answers are kept by the engine there.
func moves(t *testing.T, h *hosts, body func(t *testing.T, m *Monitor, c *Client, logs *observer.ObservedLogs)) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		h.lead("10.0.0.1")
		c := NewClient(Options{Dial: h.dial, Lookup: h.lookup})
		m := NewMonitor(MonitorConfig{Client: c, Registerer: prometheus.NewPedanticRegistry(), Log: zap.New(core)})
		m.Set([]Instance{{ID: "p0", Role: "prefill", Target: target(t, "http://p0:8000")}})
		defer runs(t, m, c)()
		synctest.Wait()
		require.True(t, m.Status("p0").Up)
		body(t, m, c, logs)
	})
}

// Connections to the host of before still answer. The engine goes down once, and it stays down until its name leads to a host
// that answers.
func TestANameThatMovesToAHostThatIsDead(t *testing.T) {
	for name, gone := range map[string]bool{"the host is not there": true, "nobody listens there": false} {
		t.Run(name, func(t *testing.T) {
			old, dead, third := newFake(), newFake(), newFake()
			dead.refuseAll(true)
			if gone {
				dead = nil
			}
			h := &hosts{at: map[netip.Addr]*fake{netip.MustParseAddr("10.0.0.1"): old, netip.MustParseAddr("10.0.0.2"): dead,
				netip.MustParseAddr("10.0.0.3"): third}}
			moves(t, h, func(t *testing.T, m *Monitor, c *Client, logs *observer.ObservedLogs) {
				h.lead("10.0.0.2")
				at := time.Now()
				for m.Status("p0").Up {
					require.Less(t, time.Since(at), 30*time.Second)
					// Somebody keeps a connection from before, as streams do, and gives it back all the time.
					ctx, stop := context.WithTimeout(t.Context(), 5*time.Second)
					_, _, err := c.Get(ctx, target(t, "http://p0:8000"), "/health", 100)
					stop()
					m.ReportFailure("p0", err)
					m.Answered("p0")
					time.Sleep(100 * time.Millisecond)
				}
				s := m.Status("p0")
				require.Equal(t, Moved{From: "10.0.0.1", To: "10.0.0.2", At: s.Moved.At}, s.Moved)
				require.WithinRange(t, s.Moved.At, at, time.Now())
				require.ErrorContains(t, s.Err, "its name has another address now, 10.0.0.2 instead of 10.0.0.1, which was seen at ")
				for range 600 {
					m.Answered("p0") // a stream of before is not over
					time.Sleep(100 * time.Millisecond)
					require.False(t, m.Status("p0").Up)
				}
				require.Len(t, logs.FilterMessage("an engine is down").All(), 1)
				require.Len(t, logs.FilterMessage("an engine is up").All(), 1)
				require.Len(t, logs.FilterMessageSnippet("has another address now; it is up only").All(), 1)

				h.lead("10.0.0.3")
				time.Sleep(20 * time.Second)
				s = m.Status("p0")
				require.True(t, s.Up)
				require.NoError(t, s.Err)
				require.Equal(t, "10.0.0.3", s.Moved.To)
				require.Len(t, logs.FilterMessage("an engine is up").All(), 2)
			})
		})
	}
}

// A name that moves to a host that answers moves its engine: nothing goes to the host of before any more.
func TestANameThatMovesToAHostThatAnswers(t *testing.T) {
	old, next := newFake(), newFake()
	next.set("/metrics", ok(metricsPage(200)))
	h := &hosts{at: map[netip.Addr]*fake{netip.MustParseAddr("10.0.0.1"): old, netip.MustParseAddr("10.0.0.2"): next}}
	moves(t, h, func(t *testing.T, m *Monitor, _ *Client, logs *observer.ObservedLogs) {
		h.lead("10.0.0.2")
		time.Sleep(15 * time.Second)
		s := m.Status("p0")
		require.True(t, s.Up)
		require.Equal(t, "10.0.0.2", s.Moved.To)
		require.EqualValues(t, 200, s.StartTime)
		asked := old.count("/health")
		time.Sleep(time.Minute)
		require.Equal(t, asked, old.count("/health"))
		require.Empty(t, logs.FilterMessage("an engine is down").All())
	})
}

// Resolvers tell the addresses of a name in any order, and replace one of several.
func TestANameWithSeveralAddressesHasNotMoved(t *testing.T) {
	f := newFake()
	h := &hosts{at: map[netip.Addr]*fake{netip.MustParseAddr("10.0.0.1"): f, netip.MustParseAddr("10.0.0.2"): f,
		netip.MustParseAddr("10.0.0.3"): f}}
	moves(t, h, func(t *testing.T, m *Monitor, _ *Client, logs *observer.ObservedLogs) {
		for _, to := range [][]string{{"10.0.0.1", "10.0.0.2"}, {"10.0.0.2", "10.0.0.1"}, {"10.0.0.3", "10.0.0.2"}} {
			h.lead(to...)
			time.Sleep(25 * time.Second)
		}
		require.Zero(t, m.Status("p0").Moved)
		require.Len(t, logs.All(), 1, "it is up")
	})
}

// An engine of an address without a name that takes no connections any more, while one from before is answered still, is down until a new
// one is.
func TestAnEngineIsUpOnlyByANewConnection(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, _ *prometheus.Registry) {
		f.refuseAll(true)
		m.ReportFailure("p0", &Error{Target: "e0", Phase: PhaseConnect, Err: &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}})
		require.False(t, m.Status("p0").Up)
		for range 600 {
			time.Sleep(100 * time.Millisecond)
			require.False(t, m.Status("p0").Up)
		}
		f.refuseAll(false)
		time.Sleep(3 * time.Second)
		require.True(t, m.Status("p0").Up)
		require.Len(t, logs.FilterMessage("an engine is down").All(), 1)
	})
}
