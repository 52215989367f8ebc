package prefill

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"evenkeel/prefill/cache"
	"evenkeel/prefill/index"
)

// told is a scheduler of one candidate whose capacity is said to be so many blocks,
// before an engine whose cache has 300.
type told struct {
	scheduler *Scheduler
	logs      *observer.ObservedLogs
	engine    *index.Index
	at        index.Slot
	rng       *rand.Rand
	talks     [24][]int32
}

const heldBlocks = 300

func startTold(t *testing.T, blocks int) *told {
	core, logs := observer.New(zap.InfoLevel)
	candidates := up("p0/0")
	candidates[0].CapacityTokens = int64(16 * blocks)
	s := &told{
		scheduler: newScheduler(t, candidates, func(c *Config) { c.Log, c.KVThreshold = zap.New(core), 1 }),
		logs:      logs, engine: index.New(index.Config{}), rng: rand.New(rand.NewPCG(1, 2)),
	}
	s.at = s.engine.Add("p0/0", heldBlocks)
	return s
}

// turn sends the next turn of some conversation.
func (s *told) turn(t *testing.T) {
	i := s.rng.IntN(len(s.talks))
	if len(s.talks[i]) > 500 {
		s.talks[i] = nil
	}
	for range 20 + s.rng.IntN(60) {
		s.talks[i] = append(s.talks[i], s.rng.Int32N(50_000))
	}
	var h index.Hasher
	keys := h.Tokens(nil, index.Scope{Model: testModel}.Root(index.Tokens, 16), s.talks[i], 16)
	n := len(s.talks[i])
	l := acquire(t, s.scheduler, Request{ID: "r", PromptTokens: n, Counted: true, Prompt: Prompt{Keys: keys, BlockTokens: 16}})
	cached := index.UsableHit(16*int(s.engine.Match(nil, keys)[s.at.N]), n, 16)
	probe := s.engine.Speculate(s.at, keys)
	s.engine.Confirm(&probe)
	l.Answered(Usage{PromptTokens: n, CachedTokens: cached}, time.Time{})
	l.Release()
}

func TestAWrongCapacityIsNoticed(t *testing.T) {
	for _, tt := range []struct {
		name   string
		blocks int
		want   cache.Suspicion
		logged string
	}{
		{"as told", heldBlocks, "", ""},
		{"a tenth off", heldBlocks + heldBlocks/10, "", ""},
		{"the engine holds a quarter of it", 4 * heldBlocks, cache.HoldsLess, "holds less than"},
		{"the engine holds four times as much", heldBlocks / 4, cache.HoldsMore, "holds more than"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := startTold(t, tt.blocks)
			for range 600 {
				s.turn(t)
			}
			status := s.scheduler.Status()[0]
			require.Equal(t, tt.want, status.CapacitySuspect, "%+v", status.accuracy)
			if tt.want == "" {
				require.Zero(t, s.logs.Len())
				require.Less(t, status.Mispredicted, 0.1)
				return
			}
			require.Equal(t, 1, s.logs.Len(), "once")
			require.Contains(t, s.logs.All()[0].Message, tt.logged)
			right := up("p0/0")
			right[0].CapacityTokens = 16 * heldBlocks
			s.scheduler.SetCandidates(right)
			for range 600 {
				s.turn(t)
			}
			require.Empty(t, s.scheduler.Status()[0].CapacitySuspect, "put right: %+v", s.scheduler.Status()[0].accuracy)
			require.Equal(t, 2, s.logs.Len())
		})
	}
}

func TestAPrefixThatIsBeingComputedSaysNothingAboutTheCapacity(t *testing.T) {
	scheduler := newScheduler(t, up("p0/0"))
	for i := range 200 {
		story := text(string(rune('a'+i%26))+"bcd", 4096+i)
		first := acquire(t, scheduler, prompt("1", story))
		second := acquire(t, scheduler, prompt("2", story))
		second.Answered(Usage{PromptTokens: 1024, CachedTokens: 0}, time.Time{}) // the first one is not done either
		first.Answered(Usage{PromptTokens: 1024, CachedTokens: first.HitTokens}, time.Time{})
		first.Release()
		second.Release()
		scheduler.ForgetPrefixes("")
	}
	require.Empty(t, scheduler.Status()[0].CapacitySuspect)
}
