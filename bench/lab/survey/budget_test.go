package survey

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/sim/mixed"
	"evenkeel/internal/race"
)

// What a survey says another budget would bring, the same load brings at least when it is served
// with that budget. It may bring more: the survey takes a law of the same model on another GPU for
// these engines.
func TestASurveyForetellsWhatABudgetIsWorth(t *testing.T) {
	race.Alone(t)
	e, err := laws.Find("DeepSeek-V3,vllm,H200,16")
	require.NoError(t, err)
	told, gains := 0, 0
	for number := 0; told < 7; number++ {
		l := mixed.Served(seedOfMixed, number, e)
		if l.Chats > 0 || l.Stays > 60_000 {
			continue
		}
		l.Budget = 16384
		s, now := watchMixed(t, l, mixed.Own(e.Engine), 15*time.Minute)
		f := Judge(t.Context(), []*Series{s}, Given{Budget: int(l.Budget), Slots: l.Slots}, func(int, int) {})[0]
		if f.Budget == nil {
			require.True(t, f.Nearest == nil || f.Nearest.Error > Far, "%s: %+v", l, f.Nearest)
			continue
		}
		told++
		if f.Budget.Best == 0 {
			t.Logf("load %s: %s", l, f.Budget.words(l.Ranks, f.Nearest.Name))
			continue
		}
		l.Budget = int32(f.Budget.Best)
		alone, err := mixed.Serve(t.Context(), l, mixed.Own(e.Engine))
		require.NoError(t, err)
		really := alone.Tokens / now.Tokens
		t.Logf("load %s: %s; really %.3f, TTFT %.2f, TPOT %.2f", l, f.Budget.words(l.Ranks, f.Nearest.Name), really, alone.TTFT/now.TTFT, alone.TPOT95/now.TPOT95)
		require.LessOrEqual(t, f.Budget.Alone.Tokens, really+0.03, "a flag is not told to bring more than it does")
		if really > 1+little {
			gains++
		}
	}
	require.Positive(t, gains, "some load gains by a flag, or this shows little")
}
