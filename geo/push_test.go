package geo

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// bench is a region with one prefill engine, whose gauges and clock a test sets.
type bench struct {
	*testing.T
	peers     *Peers
	scheduler *prefill.Scheduler
	now       time.Time
	gauges    prefill.Sample
	during    func() // a scrape, once
	asked     int
	served    []*prefill.Lease
}

func newBench(t *testing.T, policyText string, change func(*Config)) *bench {
	t.Helper()
	b := &bench{T: t, now: time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)}
	var err error
	b.scheduler, err = prefill.New(prefill.Config{
		Policy: "lmetric", Clock: func() time.Time { return b.now }, Scrape: prefill.ScrapeConfig{Interval: 500 * time.Millisecond},
		Scraper: func(context.Context, prefill.Candidate) (prefill.Sample, error) {
			if act := b.during; act != nil {
				b.during = nil
				act()
			}
			return b.gauges, nil
		},
	})
	require.NoError(t, err)
	b.scheduler.SetCandidates([]prefill.Candidate{{ID: "a", Models: []string{"m"}, CapacityTokens: 1 << 40, Live: true,
		Profile: &mooncake.Profile{MaxNumSeqs: 32}}})
	b.peers, _ = node(t, func(c *Config) {
		c.Queue, c.Policy = b.scheduler, policyText
		if change != nil {
			change(c)
		}
	})
	return b
}

// arrive has so many requests arrive, and returns how many more the engine got.
func (b *bench) arrive(n int) int {
	before := len(b.served)
	for range n {
		b.asked++
		id := fmt.Sprint(b.asked)
		q := b.peers.NewQuery(Ask{ID: id, Model: "m"})
		b.scheduler.Offer(prefill.Request{ID: id, Model: "m", PromptTokens: 10, Remote: q}, func(l *prefill.Lease, err error) {
			require.NoError(b, err)
			b.served = append(b.served, l)
		})
	}
	return len(b.served) - before
}

// answer gives so many first tokens, to the oldest first.
func (b *bench) answer(n int) {
	for range n {
		l := b.served[0]
		b.served = b.served[1:]
		l.Answered(prefill.Usage{}, b.now.Add(time.Hour))
		l.Release()
	}
}

// scrape reads the engine's gauges, with the clock a little further.
func (b *bench) scrape(running, waiting float64) {
	b.now = b.now.Add(time.Millisecond)
	b.gauges.Running, b.gauges.Waiting = running, waiting
	b.scheduler.Scrape(b.Context(), "a")
}

func TestTheEngineGetsWhatItsScrapeLeavesRoomFor(t *testing.T) {
	for _, row := range []struct {
		running, waiting float64
		pushes           int
	}{{30, 0, 2}, {0, 0, 32}, {40, 0, 1}, {10, 1, 0}} {
		b := newBench(t, "skylb:push=sp-p", nil)
		b.scrape(row.running, row.waiting)
		require.Equal(t, row.pushes, b.arrive(40), "%+v", row)
	}
}

func TestAFirstTokenGivesCreditBackAndAScrapeSetsItAnew(t *testing.T) {
	b := newBench(t, "skylb:push=sp-p", nil)
	b.scrape(29, 0)
	require.Equal(t, 3, b.arrive(20))
	served := len(b.served)
	b.answer(2)
	require.Equal(t, served, len(b.served), "two that waited took their places")
	b.scrape(32, 4)
	b.answer(2)
	require.Len(t, b.served, 1, "requests wait in the engine, whoever sent them")
	b.scrape(22, 0)
	require.Len(t, b.served, 1+10)
}

func TestWhatIsSentWhileAScrapeIsUnderWayIsNotInIt(t *testing.T) {
	b := newBench(t, "skylb:push=sp-p", nil)
	b.scrape(30, 0)
	require.Equal(t, 1, b.arrive(1))
	b.during = func() { require.Equal(t, 1, b.arrive(1)) }
	b.scrape(30, 0)
	require.Equal(t, 1, b.arrive(5), "of the two that the scrape allows")
}

func TestWhatOthersHaveWaitingCountsAgainstTheLimit(t *testing.T) {
	b := newBench(t, "skylb", nil)
	require.Equal(t, 2, b.arrive(2))
	b.scrape(1, 5) // one of ours runs, or both wait: three at least are others'
	require.Equal(t, 3, b.arrive(20))
	b.answer(1)
	require.Len(t, b.served, 5)
	b.scrape(0, 5)
	require.Len(t, b.served, 8, "all that wait are ours")
}

func TestMaxUnansweredFollowsTheTraffic(t *testing.T) {
	b := newBench(t, "skylb", func(c *Config) { c.Push.MaxUnanswered = auto })
	require.Equal(t, 8, b.arrive(20), "nothing is known yet")
	b.now = b.now.Add(time.Second)
	b.answer(8)
	b.answer(8)
	b.answer(4)
	for range 30 { // 20 a second, and a second to the first token
		b.arrive(20)
		b.now = b.now.Add(time.Second)
		b.answer(len(b.served))
		for len(b.served) > 0 {
			b.answer(1)
		}
	}
	require.Equal(t, 30, b.arrive(200), "half more than arrives in a second")
}

func TestBlindSendsAll(t *testing.T) {
	b := newBench(t, "skylb:push=blind", nil)
	require.Equal(t, 100, b.arrive(100))
	b = newBench(t, "skylb:push=sp-o,max_outstanding=24", nil)
	require.Equal(t, 24, b.arrive(100))
}

func TestAScrapeAtWhichSomethingWaitsSaysNothingOfRoom(t *testing.T) {
	b := newBench(t, "skylb:push=sp-p", nil)
	b.scrape(30, 0)
	b.scrape(0, 3)
	require.Zero(t, b.arrive(40), "something waits there")
	b.now = b.now.Add(10 * time.Second) // and that is not known any more
	require.Equal(t, 2, b.arrive(1), "what the last scrape left at which nothing waited")
}
