package cache

import (
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/prefill/index"
	"evenkeel/prefill/kvevents"
)

var noon = time.Unix(1_000_000, 0)

// blocks are the keys of a prompt that begins like the one of the same seed, of 256 bytes and 64
// tokens a block.
func blocks(seed, n int) Prompt {
	p := Prompt{Bytes: index.BlockBytes * n}
	for i := range n {
		p.Keys = append(p.Keys, index.Scope{Model: "m"}.Root(index.Unit(seed), i+1))
	}
	return p
}

// engine is a cache with one candidate that follows what its probes say.
type engine struct {
	*Cache
	CachedBlocks
	t        *testing.T
	capacity int64
}

func newEngine(t *testing.T, capacity int64) *engine {
	t.Helper()
	c := New(index.Config{})
	return &engine{Cache: c, CachedBlocks: c.CachedBlocks("p0"), t: t, capacity: capacity}
}

// expect books a probe and says how many blocks of its prompt were thought to be there.
func (e *engine) expect(hit *PredictedHit, p Prompt) (held int) {
	matched := e.Match(&p, &Lookup{}, noon)
	held = e.Blocks(matched, &p)
	e.ExpectHit(hit, &p, "m", 64*len(p.Keys), 64*held, matched, e.capacity, noon)
	return held
}

// holds is how many blocks of a prompt the candidate is thought to hold.
func (e *engine) holds(p Prompt) int { return e.Blocks(e.Match(&p, &Lookup{}, noon), &p) }

// A row is how a probe of four blocks ends on an engine of which nothing is known, and how many
// blocks of the same prompt it is thought to hold while the probe runs, right after it, and ten
// minutes later.
func TestWhatAProbeLeavesInACache(t *testing.T) {
	answered := func(prompt, cached int) func(*PredictedHit) {
		return func(hit *PredictedHit) { hit.Answered(Usage{PromptTokens: prompt, CachedTokens: cached}, 0, 0, noon) }
	}
	for name, tt := range map[string]struct {
		end         func(*PredictedHit)
		then, later int
	}{
		"an answer leaves all of it":                           {answered(256, 0), 4, 4},
		"an answer that says nothing of its cache does so too": {answered(256, -1), 4, 4},
		"a prefill that did not run leaves nothing":            {(*PredictedHit).NotRun, 0, 0},
		"one that may have run is believed for a while":        {func(hit *PredictedHit) { hit.OutcomeUnknown(noon) }, 4, 0},
	} {
		t.Run(name, func(t *testing.T) {
			e, p := newEngine(t, 0), blocks(1, 4)
			var hit PredictedHit
			require.Zero(t, e.expect(&hit, p))
			require.Equal(t, 4, e.holds(p), "a probe that runs counts as if it had been answered")
			tt.end(&hit)
			require.Equal(t, tt.then, e.holds(p))
			require.Empty(t, e.pending)
			other := blocks(2, 1)
			e.Match(&other, &Lookup{}, noon.Add(10*time.Minute)) // a look sweeps what is believed no more
			require.Equal(t, tt.later, e.holds(p))
		})
	}
}

// A row is what an engine says it found of a prompt of which it was thought to hold all four blocks
// of 64 tokens, and how many it is thought to hold then, before the prompt itself is in its cache
// again.
func TestAnEngineThatHeldLessIsBelieved(t *testing.T) {
	for name, tt := range map[string]struct {
		cached, held int
		wrong        bool
	}{
		"it found all":                         {256, 4, false},
		"less than a block was missing":        {193, 4, false},
		"one block was missing":                {192, 3, true},
		"half a block more was missing":        {154, 2, true},
		"it found nothing":                     {0, 0, true},
		"it does not say":                      {-1, 4, false},
		"it found more than was thought there": {300, 4, false},
	} {
		t.Run(name, func(t *testing.T) {
			e, p := newEngine(t, 0), blocks(1, 4)
			var hit PredictedHit
			e.expect(&hit, p)
			hit.Answered(Usage{PromptTokens: 256, CachedTokens: 0}, 0, 0, noon)
			_, wrong := e.Correct(&p, 256, 256, tt.cached)
			require.Equal(t, tt.wrong, wrong)
			require.Equal(t, tt.held, e.holds(p))
		})
	}
}

// An engine that finds less than was predicted again and again holds less than it was told to; what
// is only being computed by another probe says nothing about that.
func TestACapacityIsSuspected(t *testing.T) {
	e, p := newEngine(t, 1_000_000), blocks(1, 4)
	var first PredictedHit
	e.expect(&first, p)
	answer := func(hit *PredictedHit, cached int) Verdict {
		return hit.Answered(Usage{PromptTokens: 256, CachedTokens: cached}, e.capacity, 0, noon)
	}
	var hung PredictedHit
	require.Equal(t, 4, e.expect(&hung, p))
	require.Equal(t, Verdict{Compared: true, ErrorTokens: 256}, answer(&hung, 0))
	require.Zero(t, e.Accuracy.answers, "the first probe computed it then")
	answer(&first, 0)

	var suspected *SuspicionChange
	n := 0
	for suspected == nil && n < 100 {
		var hit PredictedHit
		require.Equal(t, 4, e.expect(&hit, p))
		v := answer(&hit, 128) // two blocks of four
		require.Equal(t, 128, v.ErrorTokens)
		suspected, n = v.Suspected, n+1
	}
	require.Equal(t, HoldsLess, suspected.Suspicion)
	require.InDelta(t, 0.5, suspected.Over, 1e-9)
	require.EqualValues(t, 1_000_000, suspected.CapacityTokens)
	require.GreaterOrEqual(t, n, int(minAnswers))
	for range 1000 { // it is trusted again once its answers are right
		var hit PredictedHit
		e.expect(&hit, p)
		if v := answer(&hit, 256); v.Suspected != nil {
			require.Empty(t, v.Suspected.Suspicion)
			require.Less(t, v.Suspected.Over, trustShare)
			break
		}
	}
	require.Empty(t, e.Accuracy.Suspect)
	require.Equal(t, Totals{Prompt: e.Totals.Prompt, Predicted: e.Totals.Prompt - 256, Actual: e.Totals.Actual}, e.Totals,
		"all prompts but the first one were predicted whole")
}

// An index promises no more than an engine can hold, and follows what it is told to hold.
func TestACapacityBoundsWhatIsPromised(t *testing.T) {
	e := newEngine(t, 512) // tokens: eight blocks, at four bytes a token
	var hit [3]PredictedHit
	for i := range hit {
		e.expect(&hit[i], blocks(i+1, 4))
		hit[i].Answered(Usage{PromptTokens: 256, CachedTokens: 0}, e.capacity, 0, noon)
	}
	require.Equal(t, []int{0, 4, 4}, []int{e.holds(blocks(1, 4)), e.holds(blocks(2, 4)), e.holds(blocks(3, 4))}, "the oldest prompt had to go")
	require.Equal(t, 8, e.Held())
	p := blocks(3, 4)
	// A sixteenth more or less is not worth a change.
	for _, told := range []struct{ tokens, blocks int }{{2048, 32}, {2176, 32}, {2240, 35}, {2112, 35}, {2048, 32}, {256, 4}} {
		e.EnsureSlot(&p, "m", int64(told.tokens), noon)
		require.Equal(t, told.blocks, e.slots[byBytes].blocks)
	}
	require.Equal(t, 4, e.Held())

	e.EngineRestarted(noon)
	require.Zero(t, e.Held(), "its cache went with the old process")
}

// A row is a prompt, and how many tokens it is taken for by a model whose tokens were learned to
// have two bytes.
func TestTheLengthOfAPrompt(t *testing.T) {
	c := New(index.Config{})
	for range 1000 {
		c.LearnRatio(&Prompt{Bytes: 2000}, "m", 1000)
	}
	c.LearnRatio(&Prompt{Bytes: 9000, Media: true}, "m", 1) // says nothing of text
	c.LearnRatio(&Prompt{Bytes: 9000}, "m", 0)              // the engine did not say
	for name, tt := range map[string]struct {
		prompt Prompt
		model  string
		tokens int
	}{
		"it was counted":                       {Prompt{Tokens: 77, Bytes: 600}, "m", 77},
		"its bytes tell":                       {Prompt{Bytes: 600}, "m", 300},
		"nothing was learned of another model": {Prompt{Bytes: 600}, "n", 150},
		"pictures have tokens without bytes":   {Prompt{Bytes: 600, Media: true}, "m", 42},
		"nothing is known of it":               {Prompt{}, "m", 42},
	} {
		require.InDelta(t, tt.tokens, c.PromptTokens(&tt.prompt, tt.model, 42), 3, name)
	}
	c.DropModels(func(model string) bool { return model == "m" })
	require.Equal(t, 150, c.PromptTokens(&Prompt{Bytes: 600}, "m", 42), "the model is gone")
}

// A row is how deep a prompt's class is, of ten blocks of 64 tokens each.
func TestTheClassOfAPromptIsTheDeepestThatItReaches(t *testing.T) {
	for name, tt := range map[string]struct {
		prompt Prompt
		depths []int
		blocks int
	}{
		"the deepest that it reaches":     {blocks(1, 10), []int{128, 512, 2304}, 8},
		"one that it reaches exactly":     {blocks(1, 10), []int{640}, 10},
		"it reaches none: all of it":      {blocks(1, 10), []int{2304}, 10},
		"less than a block is no class":   {blocks(1, 10), []int{26}, 10},
		"blocks of token ids are counted": {Prompt{Keys: make([]index.Key, 10), BlockTokens: 16}, []int{50, 1000}, 3},
	} {
		require.Equal(t, tt.blocks, tt.prompt.ClassDepth(tt.depths), name)
	}
}

// An engine that seems to come back while its events cannot be relied on may not have restarted.
// Its stream then goes on where it was, and must name once more all blocks that were dropped.
func TestEventsNameAgainWhatASupposedRestartHasDropped(t *testing.T) {
	engine, err := refengine.Start(refengine.Config{Role: refengine.Prefill, KVEvents: refengine.KVEvents{Address: "127.0.0.1:0"},
		KV:      refengine.KV{PrefixCache: 100},
		Prompts: refengine.Prompts{Base: time.Microsecond, PerToken: time.Nanosecond}, Steps: refengine.Steps{C0: time.Microsecond}})
	require.NoError(t, err)
	t.Cleanup(engine.Close)
	body := `{"model":"ref","prompt":"` + reftext.MakePrompt(1, 400) + `","max_tokens":1,"min_tokens":1}`
	res, err := http.Post(engine.URLs()[0]+"/v1/completions", "application/json", strings.NewReader(body))
	require.NoError(t, err)
	res.Body.Close()
	require.Equal(t, http.StatusOK, res.StatusCode)

	var mu sync.Mutex
	b := New(index.Config{}).CachedBlocks("p0")
	events, replay := engine.KVEvents(0)
	locked := func(f func()) {
		mu.Lock()
		defer mu.Unlock()
		f()
	}
	var feed Feed
	locked(func() {
		source := EventSource{Place: kvevents.Place{Events: events, Replay: replay}, Model: "ref"}
		feed = b.Follow(&mu, source, 128, 0, time.Now())
	})
	t.Cleanup(feed.Close)
	held := func() (blocks int) {
		locked(func() { blocks = b.Held() })
		return blocks
	}
	require.Eventually(t, func() bool { return feed.Precise(time.Now()) && held() == 3 }, 10*time.Second, 2*time.Millisecond)
	locked(func() {
		now := time.Now()
		b.ExpectEvent(now) // no event follows, so that the events are not precise after a while
		b.EngineRestarted(now.Add(time.Minute))
		require.Zero(t, b.Held())
	})
	require.Eventually(t, func() bool { return held() == 3 }, 10*time.Second, 2*time.Millisecond)
}
