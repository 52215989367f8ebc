package gateway_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/prefill"
)

// cached is an engine whose prefix cache of so many blocks of 128 tokens is
// under pressure from what talks say.
const cached = 120

// publisher is such an engine that publishes KV events.
func publisher(change func(*refengine.Config)) refengine.Config {
	c := refengine.Config{PrefixCache: cached, KVTokens: 1 << 20, PromptTokensDetails: true, KVEvents: "127.0.0.1:0", KVEventsHWM: 1000}
	if change != nil {
		change(&c)
	}
	return c
}

func followed(cfg *config.Config) {
	cfg.ExposeRoute, cfg.Prefill.KVEvents.Enabled = true, true
	cfg.Prefill.KVEvents.ReplayTimeout = 500 * time.Millisecond
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

// hits sends a completion and returns how many tokens of its prompt were
// predicted to be cached, and how many were.
func (c *cluster) hits(prompt any) (predicted, actual int) {
	c.Helper()
	text, err := json.Marshal(prompt)
	require.NoError(c, err)
	r := c.post("/v1/completions", fmt.Sprintf(`{"model":%q,"max_tokens":1,"prompt":%s}`, model, text))
	require.Equal(c, http.StatusOK, r.status, r.body)
	predicted, err = strconv.Atoi(r.header.Get("X-Evenkeel-Hit-Tokens"))
	require.NoError(c, err)
	var answer struct {
		Usage struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	require.NoError(c, json.Unmarshal([]byte(r.body), &answer))
	return predicted, answer.Usage.Details.Cached
}

// together sends so many completions at once and waits for their ends.
func (c *cluster) together(talk *talks, n int) {
	c.Helper()
	replies := make([]reply, n)
	var all sync.WaitGroup
	for i := range replies {
		text, err := json.Marshal(talk.next())
		require.NoError(c, err)
		all.Go(func() {
			replies[i] = c.post("/v1/completions", fmt.Sprintf(`{"model":%q,"max_tokens":1,"prompt":%s}`, model, text))
		})
	}
	all.Wait()
	for _, r := range replies {
		require.Equal(c, http.StatusOK, r.status, r.body)
	}
}

func (c *cluster) candidates() []prefill.CandidateStatus {
	c.Helper()
	var o prefill.Overview
	require.NoError(c, json.Unmarshal([]byte(c.get("/prefill").body), &o))
	return o.Candidates
}

// caughtUp waits until every batch of the engines' events was taken in.
func (c *cluster) caughtUp() {
	c.Helper()
	c.eventually("all events are taken in", func() bool {
		for i, s := range c.candidates() {
			want := c.prefill[i].Stats().Ranks[0].KVBatches
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
			c := start(t, options{prefill: []refengine.Config{publisher(func(c *refengine.Config) { c.KVEventsEncoding = encoding })}, configure: followed})
			c.caughtUp()
			c.hits([]int32{1, 2, 3}) // the first scrape may still be due, and with it the size of a block
			c.eventually("the size of a block is known", func() bool { return c.gw.Prefill().BlockTokens(model) == 128 })
			talk, sum := newTalks(12), 0
			for range 120 {
				predicted, actual := c.hits(talk.next())
				require.Equal(t, actual, predicted)
				sum += actual
				c.caughtUp()
			}
			require.Positive(t, sum)
			require.Zero(t, c.metric(`evenkeel_prefix_misprediction_ratio`))
			s := c.candidates()[0]
			require.EqualValues(t, cached, s.Events.Blocks, "the cache is full")
			require.Positive(t, s.Events.Batches)
			require.True(t, s.Events.Complete)
			require.Equal(t, 1.0, c.metric(fmt.Sprintf("evenkeel_kv_events_precise{candidate=%q}", s.ID)))
			require.Equal(t, float64(s.Events.Batches), c.metric(fmt.Sprintf("evenkeel_kv_events_batches_total{candidate=%q}", s.ID)))
		})
	}
}

// Text is followed, too, where an engine tells its token ids.
func TestEnginesTellTheTokenIDsOfText(t *testing.T) {
	t.Parallel()
	c := start(t, options{prefill: []refengine.Config{publisher(nil)}, configure: func(cfg *config.Config) {
		followed(cfg)
		cfg.Prefill.Index.Tokenize, cfg.Prefill.Index.TokenizeTimeout = prefill.TokenizeEngine, patience
	}})
	c.eventually("the size of a block is known", func() bool { return c.gw.Prefill().BlockTokens(model) == 128 })
	words := strings.Repeat("the same long story ", 200)
	for i, more := range []string{"", "and then ", "and then they lived ", "and then they lived "} {
		c.caughtUp()
		predicted, actual := c.hits(words + strings.Repeat(more, 60))
		require.Equal(t, actual, predicted, "turn %d", i)
		require.Equal(t, i > 0, actual > 0)
	}
	require.Equal(t, 3.0, c.metric(`evenkeel_prefix_tokenize_total{outcome="engine"}`))
	require.Equal(t, 1.0, c.metric(`evenkeel_prefix_tokenize_total{outcome="cached"}`))
}

// A restart empties the cache, and the events say so.
func TestARestartedPublisherIsCold(t *testing.T) {
	t.Parallel()
	c := start(t, options{prefill: []refengine.Config{publisher(nil)}, configure: followed, dirty: true})
	c.eventually("the size of a block is known", func() bool { return c.gw.Prefill().BlockTokens(model) == 128 })
	// Nobody would miss a first batch that was published before there was a subscriber.
	c.eventually("its events are followed", func() bool { return c.candidates()[0].Events.Connected })
	story := newTalks(1).next()
	c.hits(story)
	c.caughtUp()
	predicted, actual := c.hits(story)
	require.Equal(t, actual, predicted)
	require.Positive(t, actual)

	c.eventually("it is told to hold blocks", func() bool { return c.candidates()[0].Events.Blocks > 0 })
	c.prefill[0].Kill()
	c.eventually("the engine is found down, and its events are missed", func() bool {
		return c.get("/readyz").status != http.StatusOK && !c.candidates()[0].Events.Connected
	})
	require.NoError(t, c.prefill[0].Revive())
	c.eventually("the engine is up again", func() bool {
		s := c.candidates()[0]
		return c.get("/readyz").status == http.StatusOK && s.Mode == "precise" && s.Events.Connected
	})
	require.Zero(t, c.candidates()[0].Events.Blocks)
	predicted, actual = c.hits(story)
	require.Equal(t, actual, predicted)
	require.Zero(t, actual)
}

// A subscriber that falls behind loses batches, and is replayed them.
func TestASlowSubscriberIsReplayed(t *testing.T) {
	t.Parallel()
	c := start(t, options{prefill: []refengine.Config{publisher(func(c *refengine.Config) {
		c.KVEventsHWM, c.KVEventsDelay = 1, 10*time.Millisecond
	})}, configure: followed})
	c.eventually("the size of a block is known", func() bool { return c.gw.Prefill().BlockTokens(model) == 128 })
	talk := newTalks(12)
	gaps := func() float64 {
		return c.metric(fmt.Sprintf("evenkeel_kv_events_gaps_total{candidate=%q,result=\"replayed\"}", c.candidates()[0].ID))
	}
	c.eventually("a gap was made good", func() bool {
		c.together(talk, 8) // one after the other may be slower than the subscriber
		c.hits(talk.next()) // a gap shows with the next batch
		return gaps() > 0
	})
	c.eventually("all is taken in, and exact", func() bool {
		predicted, actual := c.hits(talk.next())
		return predicted == actual
	})
}

// Engines that are told of but do not publish are as they were without.
func TestWithoutEventsTheCacheIsKnownFromAnswers(t *testing.T) {
	t.Parallel()
	c := start(t, options{prefill: []refengine.Config{{PrefixCache: cached, PromptTokensDetails: true}}, configure: func(cfg *config.Config) {
		followed(cfg)
		cfg.Engines.Prefill[0].KVEventsPort = 1 // nobody listens
	}})
	c.eventually("the size of a block is known", func() bool { return c.gw.Prefill().BlockTokens(model) == 128 })
	story := newTalks(1).next()
	c.hits(story)
	predicted, actual := c.hits(story)
	require.Positive(t, actual)
	require.Positive(t, predicted)
	s := c.candidates()[0]
	require.Equal(t, "approximate", s.Mode)
	require.False(t, s.Events.Connected)
	require.Zero(t, c.metric(fmt.Sprintf("evenkeel_kv_events_precise{candidate=%q}", s.ID)))
}

// The system chooses the ports of these publishers, and only the engine knows them. A restarted engine has other ones.
func TestWhereRanksPublishIsTheEnginesWord(t *testing.T) {
	t.Parallel()
	two := publisher(func(c *refengine.Config) { c.Version, c.DPMode, c.DPSize = "0.33.0", "internal", 2 })
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
			c := start(t, o)
			engines := &c.prefill
			if o.prefill == nil {
				engines = &c.decode
			}
			status := func() (all []*prefill.EventsStatus) {
				var o prefill.Overview
				require.NoError(t, json.Unmarshal([]byte(c.get("/prefill").body), &o))
				for _, s := range o.Candidates {
					if s.Events != nil {
						all = append(all, s.Events)
					}
				}
				for i := range o.Ranks {
					all = append(all, &o.Ranks[i].Events)
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
			c.eventually("each rank's publisher is followed", atTheirPorts)
			old := (*engines)[0]
			again := old.Config()
			again.Listen, again.KVEvents = strings.TrimPrefix(old.URLs()[0], "http://"), "127.0.0.1:0"
			before, _ := old.KVEvents(0)
			old.Close()
			(*engines)[0] = c.engine(again)
			after, _ := (*engines)[0].KVEvents(0)
			require.NotEqual(t, before, after)
			c.eventually("each rank's publisher is followed at its new port", atTheirPorts)
		})
	}
}
