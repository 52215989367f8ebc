package detect

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// No text that is the same in every moment says what numbers of the same page may deny.
func TestNoFixedTextDeniesHarm(t *testing.T) {
	for kind, d := range kinds {
		require.NotContains(t, d.clients+d.clientsOfPrefill, "notice nothing", kind)
	}
}

// The end of a load is no harm. Engines that give less while as many requests are open are one.
func TestTheEndOfALoadIsNoHarm(t *testing.T) {
	harm := func(open func(s int) int64) string {
		var w Watch
		tokens := int64(0)
		for s := range 90 {
			f := &Facts{At: noon.Add(time.Duration(s) * time.Second), Proxy: Proxy{Ready: true, Open: 40}}
			f.Engines = []Engine{{ID: "d:1", Role: "decode", State: "up"}}
			tokens += 1300
			if s >= 60 {
				tokens -= 1300
				f.Proxy.Open, f.Engines[0].State = open(s), "down"
			}
			w.Update(f, Sample{At: f.At, Tokens: tokens, Ended: uint64(s)})
		}
		return w.Incidents()[0].Harm
	}
	require.Equal(t, "Since then no request failed", harm(func(int) int64 { return 0 }))
	require.Equal(t, "Since then no request failed; and engines give 0 tokens per second, and gave 1300", harm(func(int) int64 { return 40 }))
}

// Two engines of two groups: both groups are named, and the command asks both engines.
func TestEnginesOfSeveralGroupsAreNamedWithTheirGroups(t *testing.T) {
	var b Book
	f := &Facts{At: noon, Proxy: Proxy{Ready: true}}
	for i, group := range []string{"a", "b", "b"} {
		f.Engines = append(f.Engines, Engine{ID: fmt.Sprintf("h%d:80", i+1), Role: "decode", Group: group, State: "down", Why: refused})
	}
	b.Observe(noon, Find(f, Ended{}))
	in := b.Incidents()
	require.Len(t, in, 1)
	require.Equal(t, "These are the decode engines h1:80, h2:80 and h3:80. They are of the groups a and b.", in[0].Named)
	require.Equal(t, `for e in h1:80 h2:80 h3:80; do curl -sm 3 -i http://$e/health; done`, in[0].Command)
	f.Engines[0].State = "up"
	b = Book{}
	b.Observe(noon, Find(f, Ended{}))
	require.Equal(t, "They are of the group b.", b.Incidents()[0].Named)
}
