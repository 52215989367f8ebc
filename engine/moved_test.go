package engine

import (
	"context"
	"net"
	"net/netip"
	"sync"
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

// moves runs body beside a monitor of an engine with a name, which leads to 10.0.0.1. Answers are
// kept by the engine there.
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

// Connections to the host of before still answer. The engine goes down once, and it stays down
// until its name leads to a host that answers.
func TestANameThatMovesToAHostThatIsDead(t *testing.T) {
	old, third := newFake(), newFake()
	third.set("/metrics", ok(metricsPage(200)))
	h := &hosts{at: map[netip.Addr]*fake{netip.MustParseAddr("10.0.0.1"): old,
		netip.MustParseAddr("10.0.0.3"): third, netip.MustParseAddr("10.0.0.4"): old}}
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
		require.Len(t, logs.FilterMessageSnippet("has another address now; it is up only").All(), 1)

		h.lead("10.0.0.3")
		time.Sleep(20 * time.Second)
		s = m.Status("p0")
		require.True(t, s.Up)
		require.NoError(t, s.Err)
		require.Equal(t, "10.0.0.3", s.Moved.To)
		require.EqualValues(t, 200, s.StartTime)

		// It answers at once where it moves next, so nothing goes to the host of before any more.
		h.lead("10.0.0.4")
		time.Sleep(15 * time.Second)
		asked := third.count("/health")
		time.Sleep(time.Minute)
		require.Equal(t, asked, third.count("/health"))
		require.Len(t, logs.FilterMessage("an engine is down").All(), 1)
	})
}

// Resolvers tell the addresses of a name in any order, and replace one of several.
func TestANameWithSeveralAddressesHasNotMoved(t *testing.T) {
	var a address
	for _, row := range []struct {
		found []byte
		moved bool
	}{{[]byte{1}, false}, {[]byte{1, 2}, false}, {[]byte{2, 1}, false}, {[]byte{3, 2}, false}, {[]byte{1, 4}, true}} {
		var found []netip.Addr
		for _, host := range row.found {
			found = append(found, netip.AddrFrom4([4]byte{10, 0, 0, host}))
		}
		require.Equal(t, row.moved, a.resolve(found, time.Now()))
	}
	require.Equal(t, "10.0.0.2,10.0.0.3 10.0.0.1,10.0.0.4", a.moved.From+" "+a.moved.To)
}
