package mixed

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/trace"
	"evenkeel/dispatcher/step"
	"evenkeel/internal/race"
)

// contenders decide in different ways.
func contenders() []Contender {
	return []Contender{
		{Name: "rr", Spec: "rr"}, {Name: "vllm", Route: VLLM}, {Name: "least", Route: LeastTokens, Delay: 30}, {Name: "rounds", Spec: "evenkeel"},
		{Name: "learned", Spec: "evenkeel", Every: 2, Learn: true},
	}
}

// Whoever chooses the ranks, all that was asked for is answered, and what the proxy thinks of the
// ranks ends where it began.
func TestAccountsEndWhereTheyBegan(t *testing.T) {
	race.Alone(t)
	t.Parallel()
	for number := range 6 {
		l := Draw(9, number)
		for _, p := range contenders() {
			s, err := New(l, p)
			require.NoError(t, err)
			s.requests = s.requests[:200]
			s.to = math.Inf(1) // until nothing is left to do
			_, err = s.Do(t.Context())
			require.NoError(t, err)
			require.Zero(t, s.unended, "%s on %s", p.Name, l)
			status := s.Boards.Status(s.Instant(s.Now))
			require.Zero(t, status.Drift)
			for r, w := range status.Models[0].Workers {
				require.Zero(t, w.Used, "%s on %s", p.Name, l)
				require.Zero(t, w.Backlog, "%s on %s", p.Name, l)
				require.Zero(t, w.KVTokens, "%s on %s", p.Name, l)
				require.Zero(t, s.group.Ranks[r].KV)
			}
		}
	}
}

func TestACacheForgetsTheOldest(t *testing.T) {
	c := cache{}
	c.keep(1, 100, 250)
	c.keep(2, 100, 250)
	c.keep(1, 120, 250)
	c.keep(3, 50, 250)
	require.EqualValues(t, 120, c.holds(1))
	require.Zero(t, c.holds(2))
	require.EqualValues(t, 50, c.holds(3))
	require.EqualValues(t, 170, c.tokens)
}

// Each run has the requests of the trace in their order, from the one with which it begins, however
// often it is begun.
func TestATraceIsReplayedFromWhereItBegins(t *testing.T) {
	texts := &Replayed{Name: "three", From: 2,
		Requests: []trace.Request{{Prompt: 1, Output: 4}, {Prompt: 2, Output: 0}, {Prompt: 3, Output: 6}}}
	l := &Load{Texts: texts, Ranks: 2, Slots: 2, Law: step.Law{Model: step.Model{C0Ms: 10}}, Full: 1}
	for range 2 {
		var prompts []int32
		for _, q := range l.requests(5, 0) {
			prompts = append(prompts, q.prompt)
			require.Positive(t, q.output, "a rank answers with a token at least")
		}
		require.Equal(t, []int32{3, 1, 2, 3, 1}, prompts)
	}
	require.Equal(t, "three from request 2", texts.String())
}

// A load that a deployment serves differs from the drawn one in nothing but the ranks and their
// law.
func TestServedByADeployment(t *testing.T) {
	e, err := laws.Find("Kimi-K2.5,vllm,GB200,16")
	require.NoError(t, err)
	for number := range 8 {
		drawn, served := DrawDense(5, number), Served(5, number, e)
		require.Equal(t, drawn.Texts.String(), served.Texts.String())
		require.Equal(t, drawn.Slots, served.Slots)
		require.Equal(t, 16, served.Ranks)
		require.Equal(t, e.Name(), served.Of)
		require.InDelta(t, laws.Published*(e.Prompt.MostMs+e.Prompt.MeanMs), served.Law.SharedPromptMs, 1e-12)
	}
}

// A closed loop with few requests needs more of them than its slots say, because its steps are
// short. All that leave are replaced.
func TestAClosedLoopOfFewRequestsDoesNotRunOut(t *testing.T) {
	t.Parallel()
	texts := &Replayed{Name: "one", Requests: []trace.Request{{Prompt: 100, Output: 50}}}
	l := &Load{Texts: texts, Ranks: 4, Slots: 64, Budget: 8192, Full: 12. / 256,
		Law: step.Law{Model: step.Model{C0Ms: 1, C1Ms: 1e-4, RequestMs: 0.5, OwnPromptMs: 1e-4, SharedPromptMs: 1e-4}}}
	l.Measure(0)
	require.Equal(t, 12, l.There)
	s, err := New(l, Contender{Name: "rounds", Spec: "evenkeel"})
	require.NoError(t, err)
	o, err := s.Do(t.Context())
	require.NoError(t, err)
	require.Less(t, s.next, len(s.requests), "the loop has no request left to come")
	require.Equal(t, l.There, s.next-left(s), "so many are there at the end")
	require.Positive(t, o.Tokens)
}

// left counts the requests that have left their ranks.
func left(s *Run) int { return s.next - s.bound - s.pooled - len(s.queue) }
