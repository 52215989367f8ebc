package fleet_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// cached is an engine whose prefix cache of so many blocks of 128 tokens is
// under pressure from what talks say.
const cached = 120

// publisher is such an engine that publishes KV events.
func publisher(change func(*refengine.Config)) refengine.Config {
	e := refengine.Config{KV: refengine.KV{PrefixCache: cached, Tokens: 1 << 20}, Answers: refengine.Answers{PromptTokensDetails: true},
		KVEvents: refengine.KVEvents{Address: "127.0.0.1:0", HWM: 1000}}
	if change != nil {
		change(&e)
	}
	return e
}

func followed(cfg *config.Config) {
	cfg.ExposeRoute, cfg.Prefill.KVEvents.Enabled = true, true
	cfg.Prefill.KVEvents.ReplayTimeout = patience // on a busy machine, too, a gap is made good
}

// talks are conversations whose turns come in turn, as token ids.
type talks struct {
	rng *rand.Rand
	ids [][]int32
}

func newTalks(n int) *talks {
	return &talks{rand.New(rand.NewPCG(1, 2)), make([][]int32, n)}
}

// next is the whole prompt of some conversation's next turn.
func (t *talks) next() []int32 {
	i := t.rng.IntN(len(t.ids))
	if len(t.ids[i]) > 2500 {
		t.ids[i] = nil
	}
	for range 150 + t.rng.IntN(400) {
		t.ids[i] = append(t.ids[i], 1+t.rng.Int32N(40_000))
	}
	return t.ids[i]
}

// together sends so many completions at once and waits for their ends.
func (b *bed) together(talk *talks, n int) {
	b.Helper()
	replies := make([]reply, n)
	var all sync.WaitGroup
	for i := range replies {
		text, err := json.Marshal(talk.next())
		require.NoError(b, err)
		all.Go(func() {
			replies[i] = b.Post("/v1/completions", fmt.Sprintf(`{"model":%q,"max_tokens":1,"prompt":%s}`, model, text))
		})
	}
	all.Wait()
	for _, r := range replies {
		require.Equal(b, http.StatusOK, r.Status, r.Body)
	}
}

func (b *bed) candidates() []prefill.CandidateStatus {
	b.Helper()
	return b.scheduler.Overview().Candidates
}

// caughtUp waits until every batch of the engines' events was taken in.
func (b *bed) caughtUp() {
	b.Helper()
	b.Eventually("all events are taken in", func() bool {
		for i, s := range b.candidates() {
			want := b.Prefill[i].Stats().Ranks[0].KVBatches
			if s.Mode != "precise" || s.Events.Batches < want || want > 0 && !s.Events.Complete {
				return false
			}
		}
		return true
	})
}

// Exact in both shapes of events, while conversations push each other out of
// the cache.
func TestKVEventsTellWhatIsCached(t *testing.T) {
	t.Parallel()
	for _, encoding := range []string{"array", "map"} {
		t.Run(encoding, func(t *testing.T) {
			t.Parallel()
			b := start(t, options{prefill: []refengine.Config{publisher(func(e *refengine.Config) { e.KVEvents.Encoding = encoding })},
				configure: followed})
			b.caughtUp()
			b.Hits([]int32{1, 2, 3}) // the first scrape may still be due, and with it the size of a block
			b.Eventually("the size of a block is known", func() bool { return b.scheduler.BlockTokens(model) == 128 })
			talk, sum := newTalks(12), 0
			for range 120 {
				predicted, actual := b.Hits(talk.next())
				require.Equal(t, actual, predicted)
				sum += actual
				b.caughtUp()
			}
			require.Positive(t, sum)
			require.Zero(t, b.Metric(`evenkeel_prefix_misprediction_ratio`))
			s := b.candidates()[0]
			require.EqualValues(t, cached, s.Events.Blocks, "the cache is full")
			require.Positive(t, s.Events.Batches)
			require.True(t, s.Events.Complete)
			require.Equal(t, 1.0, b.Metric(fmt.Sprintf("evenkeel_kv_events_precise{candidate=%q}", s.ID)))
			require.Equal(t, float64(s.Events.Batches), b.Metric(fmt.Sprintf("evenkeel_kv_events_batches_total{candidate=%q}", s.ID)))
		})
	}
}

// With decode context parallelism, and with several groups of layers, the metrics have the size of
// other blocks.
func TestKVEventsKnowTheSizeOfABlockBest(t *testing.T) {
	t.Parallel()
	b := start(t, options{prefill: []refengine.Config{publisher(nil)}, configure: followed})
	key := b.fleet.Now().Engines()[0].Key()
	says := b.monitor.Status(key)
	says.Memories = engine.Memories{"0": {Capacity: says.Memories.Of(0).Capacity, Block: engine.Reading{Tokens: 32, From: "another group"}}}
	b.fleet.OnStatus(key, says)
	require.Equal(t, 32, b.scheduler.BlockTokens(model), "until an event has named a block")
	talk, sum := newTalks(12), 0
	b.Hits(talk.next())
	b.Eventually("events have named blocks", func() bool { return b.scheduler.BlockTokens(model) == 128 })
	for range 30 {
		b.caughtUp()
		predicted, actual := b.Hits(talk.next())
		require.Equal(t, actual, predicted)
		sum += actual
	}
	require.Positive(t, sum)
}

// Text is followed, too, where an engine tells its token ids.
func TestEnginesTellTheTokenIDsOfText(t *testing.T) {
	t.Parallel()
	b := start(t, options{prefill: []refengine.Config{publisher(nil)}, configure: func(cfg *config.Config) {
		followed(cfg)
		cfg.Prefill.Index.Tokenize, cfg.Prefill.Index.TokenizeTimeout = prefill.TokenizeEngine, patience
	}})
	b.Eventually("the size of a block is known", func() bool { return b.scheduler.BlockTokens(model) == 128 })
	words := strings.Repeat("the same long story ", 200)
	for i, more := range []string{"", "and then ", "and then they lived ", "and then they lived "} {
		b.caughtUp()
		predicted, actual := b.Hits(words + strings.Repeat(more, 60))
		require.Equal(t, actual, predicted, "turn %d", i)
		require.Equal(t, i > 0, actual > 0)
	}
	require.Equal(t, 3.0, b.Metric(`evenkeel_prefix_tokenize_total{outcome="engine"}`))
	require.Equal(t, 1.0, b.Metric(`evenkeel_prefix_tokenize_total{outcome="cached"}`))
}

// A restart empties the cache, and the events say so.
func TestARestartedPublisherIsCold(t *testing.T) {
	t.Parallel()
	b := start(t, options{prefill: []refengine.Config{publisher(nil)}, configure: followed, dirty: true})
	b.Eventually("the size of a block is known", func() bool { return b.scheduler.BlockTokens(model) == 128 })
	// Nobody would miss a first batch that was published before there was a subscriber.
	b.Eventually("its events are followed", func() bool { e := b.candidates()[0].Events; return e != nil && e.Connected })
	story := newTalks(1).next()
	b.Hits(story)
	b.caughtUp()
	predicted, actual := b.Hits(story)
	require.Equal(t, actual, predicted)
	require.Positive(t, actual)

	b.Eventually("it is told to hold blocks", func() bool { return b.candidates()[0].Events.Blocks > 0 })
	b.Prefill[0].Kill()
	b.Eventually("the engine is found down, and its events are missed", func() bool {
		return !b.ready() && !b.candidates()[0].Events.Connected
	})
	require.NoError(t, b.Prefill[0].Revive())
	b.Eventually("the engine is up again", func() bool {
		s := b.candidates()[0]
		return b.ready() && s.Mode == "precise" && s.Events.Connected
	})
	require.Zero(t, b.candidates()[0].Events.Blocks)
	predicted, actual = b.Hits(story)
	require.Equal(t, actual, predicted)
	require.Zero(t, actual)
}

// A subscriber that falls behind loses batches, and is replayed them.
func TestASlowSubscriberIsReplayed(t *testing.T) {
	t.Parallel()
	b := start(t, options{prefill: []refengine.Config{publisher(func(b *refengine.Config) {
		b.KVEvents.HWM, b.KVEvents.Delay = 1, 10*time.Millisecond
	})}, configure: followed})
	b.Eventually("the size of a block is known", func() bool { return b.scheduler.BlockTokens(model) == 128 })
	talk := newTalks(12)
	gaps := func() float64 {
		return b.Metric(fmt.Sprintf("evenkeel_kv_events_gaps_total{candidate=%q,result=\"replayed\"}", b.candidates()[0].ID))
	}
	b.Eventually("a gap was made good", func() bool {
		b.together(talk, 8) // one after the other may be slower than the subscriber
		b.Hits(talk.next()) // a gap shows with the next batch
		return gaps() > 0
	})
	b.Eventually("all is taken in, and exact", func() bool {
		predicted, actual := b.Hits(talk.next())
		return predicted == actual
	})
}

// Engines that are told of but do not publish are as they were without.
func TestWithoutEventsTheCacheIsKnownFromAnswers(t *testing.T) {
	t.Parallel()
	b := start(t, options{prefill: []refengine.Config{{KV: refengine.KV{PrefixCache: cached},
		Answers: refengine.Answers{PromptTokensDetails: true}}}, configure: func(cfg *config.Config) {
		followed(cfg)
		cfg.Engines.Prefill[0].KVEventsPort = 1 // nobody listens
	}})
	b.Eventually("the size of a block is known", func() bool { return b.scheduler.BlockTokens(model) == 128 })
	story := newTalks(1).next()
	b.Hits(story)
	predicted, actual := b.Hits(story)
	require.Positive(t, actual)
	require.Positive(t, predicted)
	s := b.candidates()[0]
	require.Equal(t, "approximate", s.Mode)
	require.False(t, s.Events.Connected)
	require.Zero(t, b.Metric(fmt.Sprintf("evenkeel_kv_events_precise{candidate=%q}", s.ID)))
}

// The system chooses the ports of these publishers, and only the engine knows them. A restarted
// engine has other ones.
func TestWhereRanksPublishIsTheEnginesWord(t *testing.T) {
	t.Parallel()
	two := publisher(func(e *refengine.Config) { e.Version, e.DPMode, e.DPSize = "0.33.0", "internal", 2 })
	for name, o := range map[string]options{
		"prefill":    {prefill: []refengine.Config{two}},
		"aggregated": {mixed: []refengine.Config{two}},
		"a port of the config at which nobody listens": {mixed: []refengine.Config{two}},
	} {
		t.Run(name, func(t *testing.T) {
			o.dirty = true
			o.configure = func(cfg *config.Config) {
				followed(cfg)
				for _, all := range [][]config.Engine{cfg.Engines.Prefill, cfg.Engines.Aggregated} {
					for i := range all {
						all[i].Ranks, all[i].KVEventsPort, all[i].KVReplayPort = 2, 0, 0
						if strings.Contains(name, "config") {
							all[i].KVEventsPort, all[i].KVReplayPort = 1, 2
						}
					}
				}
			}
			b := start(t, o)
			engines := &b.Prefill
			if o.prefill == nil {
				engines = &b.Decode
			}
			status := func() (all []*prefill.EventsStatus) {
				told := b.scheduler.Overview()
				for _, s := range told.Candidates {
					if s.Events != nil {
						all = append(all, s.Events)
					}
				}
				for i := range told.Ranks {
					all = append(all, &told.Ranks[i].Events)
				}
				return all
			}
			atTheirPorts := func() bool {
				all := status()
				for i, s := range all {
					if at, _ := (*engines)[0].KVEvents(i); !s.Connected || s.Source != at {
						return false
					}
				}
				return len(all) == 2
			}
			b.Eventually("each rank's publisher is followed", atTheirPorts)
			old := (*engines)[0]
			again := old.Config()
			again.Server.Listen, again.KVEvents.Address = strings.TrimPrefix(old.URLs()[0], "http://"), "127.0.0.1:0"
			before, _ := old.KVEvents(0)
			old.Close()
			(*engines)[0] = b.Engine(again)
			after, _ := (*engines)[0].KVEvents(0)
			require.NotEqual(t, before, after)
			b.Eventually("each rank's publisher is followed at its new port", atTheirPorts)
		})
	}
}

// What ranks that do both have in their caches is known from their KV events, while conversations
// push each other out.
func TestKVEventsTellWhatRanksThatDoBothHold(t *testing.T) {
	t.Parallel()
	b := start(t, options{mixed: []refengine.Config{publisher(nil), publisher(nil)}, configure: followed})
	ranks := func() []prefill.RankEvents {
		return b.scheduler.Overview().Ranks
	}
	// A stream that begins anew takes batches in once more, so that their number alone does not tell
	// whether the last one was taken in.
	caughtUp := func() {
		b.Eventually("all events are taken in, and no more come", func() bool {
			before := ranks()
			time.Sleep(50 * time.Millisecond)
			all := ranks()
			if len(before) != 2 || len(all) != 2 {
				return false
			}
			for n, r := range all {
				i := slices.IndexFunc(b.Decode, func(e *refengine.Engine) bool { return strings.Contains(e.URLs()[0], strings.TrimSuffix(r.ID, "/0")) })
				want := b.Decode[i].Stats().Ranks[0].KVBatches
				if r.Mode != "precise" || r.Events.Batches < want || want > 0 && !r.Events.Complete || before[n].Events.Batches != r.Events.Batches {
					return false
				}
			}
			return true
		})
	}
	caughtUp()
	talk := newTalks(12)
	b.Hits(talk.next())
	b.Eventually("the size of a block is known", func() bool { return b.scheduler.BlockTokens(model) == 128 })
	sum := 0
	for range 60 {
		predicted, actual := b.Hits(talk.next())
		require.Equal(t, actual, predicted)
		sum += actual
		caughtUp()
	}
	require.Positive(t, sum)
	for _, r := range ranks() {
		require.Equal(t, 1.0, b.Metric(fmt.Sprintf("evenkeel_kv_events_precise{candidate=%q}", r.ID)))
		require.Equal(t, float64(r.Events.Batches), b.Metric(fmt.Sprintf("evenkeel_kv_events_batches_total{candidate=%q}", r.ID)))
	}
}

// What is predicted without events against what engines count, while
// conversations push each other out of the cache.
func TestPredictedAgainstCountedHits(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		told    int64 // blocks
		suspect string
	}{
		{"the capacity is known", cached, ""},
		{"the engine has a quarter of what it is told to have", 4 * cached, "less"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			b := start(t, options{
				prefill: []refengine.Config{{KV: refengine.KV{PrefixCache: cached, Tokens: 1 << 20},
					Answers: refengine.Answers{PromptTokensDetails: true}}},
				profile: mooncake.Profile{KVTokensPerRank: 128 * row.told}, configure: func(cfg *config.Config) { cfg.ExposeRoute = true },
			})
			b.Eventually("the size of a block is known", func() bool { return b.scheduler.BlockTokens(model) == 128 })
			talk, predicted, off := newTalks(24), 0, 0
			for range 250 {
				p, a := b.Hits(talk.next())
				predicted += p
				off += max(p-a, a-p)
			}
			share := float64(off) / float64(predicted)
			t.Logf("%d tokens predicted, %.1f %% off", predicted, 100*share)
			s := b.candidates()[0]
			require.EqualValues(t, row.suspect, s.CapacitySuspect)
			suspect := b.Metric(fmt.Sprintf("evenkeel_prefix_capacity_suspect{candidate=%q,holds=\"less\"}", s.ID))
			if row.suspect == "" {
				require.Less(t, share, 0.1)
				require.Less(t, b.Metric("evenkeel_prefix_misprediction_ratio"), 0.1)
				require.Zero(t, suspect)
			} else {
				require.Greater(t, b.Metric("evenkeel_prefix_misprediction_ratio"), 0.2)
				require.Equal(t, 1.0, suspect)
				require.Equal(t, 1, b.logs.FilterMessageSnippet("prefix cache holds less than").Len())
			}
			require.Equal(t, 1.0, b.Metric(fmt.Sprintf("evenkeel_prefix_feedback_available{model=%q}", model)))
		})
	}
}
