package detect

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func overloaded(model string) Finding {
	return Finding{Kind: Overload, Severity: Bad, Panel: "pool", WhereKind: "model", Where: model,
		What: "All 96 decode slots of model " + model + " are taken, and 527 requests wait in the pool"}
}

// What an engine does once it is back is no part of its outage.
func TestAnOutageIsToldAsOneWhenItIsOver(t *testing.T) {
	var b Book
	for s := range 600 {
		b.Observe(noon.Add(time.Duration(s)*time.Second), []Finding{down("h1:1", refused)})
	}
	b.Observe(noon.Add(610*time.Second), []Finding{amiss("h1:1"), amiss("h1:2")})
	in := b.Incidents()
	require.Len(t, in, 2)
	require.Equal(t, "Engine trouble", in[0].Headline)
	require.Equal(t, noon.Add(610*time.Second).UnixMilli(), in[0].SinceMs, "it was not slow while it was down")
	require.Equal(t, "Decode engine h1:1 is down: "+refused, in[1].What)
	require.NotZero(t, in[1].UntilMs)

	b = Book{} // at one moment it is one incident, which is told as it was at its worst
	b.Observe(noon, []Finding{down("h1:1", refused)})
	b.Observe(noon.Add(9*time.Second), []Finding{amiss("h1:1"), amiss("h1:2")})
	b.Observe(noon.Add(5*time.Minute), nil)
	in = b.Incidents()
	require.Len(t, in, 1)
	require.Equal(t, Bad, in[0].Severity)
	require.Equal(t, "Decode engine h1:1 is down: "+refused, in[0].What)
}

// What comes and goes on a host is not told of an outage there that began long ago.
func TestSlowMetricsAreNotOfAnOldOutage(t *testing.T) {
	var b Book
	b.Observe(noon, []Finding{down("h1:1", refused)})
	b.Observe(noon.Add(time.Hour), []Finding{down("h1:1", refused), amiss("h1:2")})
	require.Len(t, b.Incidents(), 2)
}

// An overload is the cause of a full queue even while a slot is free for the moment.
func TestAnOverloadThatRestsLeads(t *testing.T) {
	var b Book
	full := Finding{Kind: QueueFull, Severity: Bad, What: "Requests are refused, because a queue is full"}
	for s, found := range [][]Finding{{overloaded("m"), full}, {full}, {overloaded("m"), full}, {full, failing2()}} {
		b.Observe(noon.Add(time.Duration(s)*time.Second), found)
		in := b.Incidents()
		require.Len(t, in, 1)
		require.Equal(t, "Overload", in[0].Headline, s)
		require.Equal(t, []string{"m"}, in[0].Where, s)
		require.Equal(t, 1, in[0].Count, s)
	}
}

// When what led is gone, what rests is counted.
func TestAnOverloadAfterAnOutageIsCounted(t *testing.T) {
	var b Book
	b.Observe(noon, []Finding{down("d1:1", refused), overloaded("m")})
	b.Observe(noon.Add(time.Second), nil)
	in := b.Incidents()
	require.Len(t, in, 1)
	require.Equal(t, "Overload", in[0].Headline)
	require.Equal(t, 1, in[0].Count)
	require.Equal(t, []string{"m"}, in[0].Where)
}

// All engines of a side die under load: the proxy is not ready since then, and because of them.
func TestAProxyIsNotUnreadyOfOverload(t *testing.T) {
	var b Book
	b.Observe(noon, []Finding{overloaded("m")})
	for s := range 1800 {
		b.Observe(noon.Add(time.Duration(s)*time.Second), []Finding{overloaded("m")})
	}
	at := noon.Add(1801 * time.Second)
	b.Observe(at, []Finding{down("d1:1", refused), {Kind: NotReady, Severity: Bad, What: "The proxy is not ready: no healthy decode engine"}})
	for _, in := range b.Incidents() {
		if in.Headline == "Overload" {
			require.NotContains(t, in.Clients, "not ready")
		} else {
			require.Contains(t, in.Clients, "The proxy is not ready: no healthy decode engine.")
			require.Contains(t, in.Clients, "get an error, because no other engine is left.")
			require.Equal(t, "All new requests get a 503", in.Headline)
			require.Equal(t, "All new requests get a 503, because decode engine d1:1 is down: "+refused, in.What)
			require.Equal(t, at.UnixMilli(), in.SinceMs)
		}
	}
}

// Engines that come with new names all the time are forgotten as fast.
func TestWhatRestsIsBounded(t *testing.T) {
	var b Book
	n := 0
	for s := range 5 {
		var found []Finding
		for range maxFindings {
			n++
			found = append(found, amiss(fmt.Sprintf("p%d:1", n)))
		}
		b.Observe(noon.Add(time.Duration(s)*time.Second), found)
		for _, o := range b.list {
			require.LessOrEqual(t, len(o.members), maxFindings)
		}
		require.LessOrEqual(t, len(b.list), maxIncidents)
	}
	b.Observe(noon.Add(time.Hour), nil)
	b.Observe(noon.Add(2*time.Hour), nil)
	require.Empty(t, b.list)
}
