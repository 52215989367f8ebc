package policy

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAUsersPolicy(t *testing.T) {
	near, busy := at("near", 4000, 0, queued(0, 2)), at("busy", 4000, 3200, queued(900, 1))
	for _, tt := range []struct {
		name string
		d    Definition
		want string
	}{
		{"the lowest score wins", Definition{Score: "p_tokens * (bs + 1)"}, "busy"},
		{"or the highest", Definition{Score: "p_tokens * (bs + 1)", Objective: "max"}, "near"},
		{"who does not pass the filter is left out", Definition{Filter: "bs >= 2", Score: "bs"}, "near"},
		{"a filter that nobody passes is skipped", Definition{Filter: "bs > 9", Score: "bs"}, "busy"},
		{"ties go to the hits", Definition{Score: "1"}, "busy"},
		{"unless told otherwise", Definition{Score: "1", TieBreak: []string{"p_tokens", "-bs"}}, "busy"},
		{"the larger first", Definition{Score: "1.0", TieBreak: []string{"-bs"}}, "near"},
		{"conditions and functions", Definition{Score: "hit_ratio > 0.5 ? min(p_tokens, 1) : max(bs, 100)"}, "busy"},
		{"all arithmetic", Definition{Score: "abs(-bs) + ceil(0.2) - floor(1.7) * round(0.4) / 2 ** 2 + (not (bs == 1 && n != 2 or bs <= 0) ? 0 : 9)"}, "busy"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l, err := NewLibrary(map[string]Definition{"mine": tt.d})
			require.NoError(t, err)
			p, err := l.Parse("mine")
			require.NoError(t, err)
			all := []Engine{near, busy}
			Aggregate(all)
			choice := p.Choose(&Query{ID: "r"}, all)
			require.Equal(t, tt.want, all[choice.Index].ID)
			require.Zero(t, choice.Bad)
		})
	}
}

func TestAWrongDefinitionIsRefusedWithItsPlace(t *testing.T) {
	for _, tt := range []struct {
		name string
		d    Definition
		want string
	}{
		{"a name that is no indicator", Definition{Score: "foo+1"}, "policy mine: score: unknown name foo (1:1)"},
		{"in the second line", Definition{Score: "bs +\n  fo"}, "policy mine: score: unknown name fo (2:3)"},
		{"a typo", Definition{Score: "bs +"}, "policy mine: score: unexpected token EOF (1:4)"},
		{"a loop", Definition{Score: "count(1..9, true)"}, "policy mine: score: .. is not for expressions here"},
		{"a predicate", Definition{Score: "count([bs], true)"}, "policy mine: score: "},
		{"a range", Definition{Score: "1..9"}, "policy mine: score: .. is not for expressions here"},
		{"a text", Definition{Score: `"x"`}, "policy mine: score: this is not for expressions here"},
		{"a function of the library", Definition{Score: "bs + now()"}, "policy mine: score: now is not for expressions here"},
		{"a call of something else", Definition{Score: "bs()"}, "policy mine: score: this call is not for expressions here"},
		{"a variable", Definition{Score: "let x = 1; x"}, "policy mine: score: this is not for expressions here"},
		{"a score that is no number", Definition{Score: "bs > 1"}, "policy mine: score: expected float64, but got bool"},
		{"a filter that is no condition", Definition{Score: "bs", Filter: "bs"}, "policy mine: filter: expected bool, but got float64"},
		{"no score", Definition{}, "policy mine: score: it has none"},
		{"an objective", Definition{Score: "bs", Objective: "mean"}, `policy mine: objective: "mean" is none; write min or max`},
		{"a tie-break", Definition{Score: "bs", TieBreak: []string{"bs", "-hits"}}, `policy mine: tie_break[1]: no indicator is named "hits"; there are active_blocks`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := NewLibrary(map[string]Definition{"mine": tt.d})
			require.ErrorContains(t, err, tt.want)
			var where *DefinitionError
			require.True(t, errors.As(err, &where))
		})
	}
}

func TestAnExpressionIsBounded(t *testing.T) {
	long := "bs"
	for range 40 {
		long += " + bs"
	}
	_, err := NewLibrary(map[string]Definition{"mine": {Score: long}})
	require.ErrorContains(t, err, "node")
}

func TestANameThatIsTakenIsRefused(t *testing.T) {
	for _, name := range []string{"finish", "a:b", ""} {
		_, err := NewLibrary(map[string]Definition{name: {Score: "bs"}})
		require.ErrorContains(t, err, "use another name")
	}
}

func FuzzDefinition(f *testing.F) {
	for _, s := range []string{"p_tokens * (bs + 1)", "bs > 1 ? 1 : 2", "min(bs, 1)", "1..9", "bs ** -1", "let x = 1; x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		l, err := NewLibrary(map[string]Definition{"mine": {Score: text, Filter: text}})
		if err != nil {
			if l, err = NewLibrary(map[string]Definition{"mine": {Score: text}}); err != nil {
				return
			}
		}
		p, err := l.Parse("mine")
		require.NoError(t, err)
		all := fleet(3)
		choice := p.Choose(&Query{ID: "r"}, all)
		require.Less(t, choice.Index, 3)
		require.GreaterOrEqual(t, choice.Index, 0)
	})
}
