package live

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/verdict"
	"evenkeel/gateway/detect"
)

func TestTheTwinInWords(t *testing.T) {
	said := func(against ...verdict.Against) *verdict.Twin {
		return &verdict.Twin{AgeSeconds: 12.4, WindowSeconds: 240, Policy: "evenkeel", StepMs: 44, TwinStepMs: 43.6, ErrorRatio: 0.008,
			Against: against}
	}
	for name, c := range map[string]struct {
		g    detect.Group
		off  bool
		says []string
		note string
	}{
		"a verdict": {
			detect.Group{Source: "learned", GroupReports: board.GroupReports{
				Twin: said(verdict.Against{Says: "against jsq-kv: 3.1 ms"}, verdict.Against{Says: "against br0: none"}),
			}},
			false,
			[]string{"against jsq-kv: 3.1 ms", "against br0: none"}, "Replayed: the 4.0 min until 12 s ago; error 0.8 % of a step.",
		},
		"only the policy in force is listed": {
			detect.Group{Source: "learned", GroupReports: board.GroupReports{Twin: said()}}, false, []string{},
			"The twin replayed no other policy: dispatch.twin lists only evenkeel, which is in force.",
		},
		"nothing was replayed yet":    {detect.Group{Source: "learned"}, false, []string{}, "The twin has replayed nothing yet."},
		"the step is not learned yet": {detect.Group{}, false, []string{}, "The twin has replayed nothing yet: how long a step takes is not known."},
		"steps do not follow the load": {
			detect.Group{ModelWhy: "step time does not follow the fullest rank: are these one group?"}, false, []string{},
			"The twin has replayed nothing yet, because there is no step model: step time does not follow the fullest rank: are these one group?",
		},
		"its ranks prefill, too": {
			detect.Group{Source: "learned", GroupReports: board.GroupReports{Rounds: &board.RoundStatus{}}}, false, []string{},
			"The twin replays no ranks that prefill and decode.",
		},
		"it is off": {detect.Group{Source: "learned"}, true, []string{}, "The twin is off: dispatch.twin lists no policy."},
	} {
		t.Run(name, func(t *testing.T) {
			c.g.Barrier = true
			m := &detect.Model{Name: "m", Groups: []detect.Group{c.g}}
			require.Equal(t, Twin{c.says, c.note, c.g.Twin}, modelOf(m, !c.off).Groups[0].Twin)
		})
	}
	m := &detect.Model{Name: "m", Groups: []detect.Group{{GroupLoads: board.GroupLoads{Barrier: true}}, {}}}
	require.Equal(t, "The twin replays only models all of whose ranks step in groups.", modelOf(m, true).Groups[0].Twin.Note)
	require.Equal(t, Twin{Says: []string{}}, modelOf(m, true).Groups[1].Twin, "without barrier there is no step to save")
	require.Equal(t, Twin{Says: []string{}}, modelOf(m, false).Groups[1].Twin)
}

func TestGhosts(t *testing.T) {
	g := detect.Group{
		GroupLoads: board.GroupLoads{SteppingRanks: 4, MostTokens: 100_000}, StepModel: detect.StepModel{PerTokenMs: 0.0001},
		GroupReports: board.GroupReports{Twin: &verdict.Twin{Against: []verdict.Against{
			{Policy: "jsq-kv", StepMs: 47, SavedMs: 3, Claimed: true}, {Policy: "brh", StepMs: 44.1, SavedMs: 0.1}, {Policy: "none", Claimed: true}, {Policy: "better", StepMs: 43, SavedMs: -1, Claimed: true},
		}}},
	}
	require.Equal(t, []Counterfactual{{"better", 90_000, -1}, {"jsq-kv", 130_000, 3}}, counterfactuals(&g), "what is not claimed has no line")
	g.StepModel.PerTokenMs = 0
	require.Empty(t, counterfactuals(&g), "what a token costs is not known")
	require.Empty(t, counterfactuals(&detect.Group{}))
}
