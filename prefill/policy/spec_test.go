package policy

import (
	"go/build"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSpecs(t *testing.T) {
	for _, tt := range []struct{ name, spec, want string }{
		{"a name alone", "finish", "finish"},
		{"a default is left out", "bailian:lambda=0.7", "bailian"},
		{"another value stays", "bailian:lambda=.55", "bailian:lambda=0.55"},
		{"a word", "least-tokens:work=vllm-ascend", "least-tokens:work=vllm-ascend"},
		{"spaces around", " gorgo:qs=2 ", "gorgo:qs=2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, err := (*Library)(nil).Parse(tt.spec)
			require.NoError(t, err)
			require.Equal(t, tt.want, p.String())
		})
	}
}

func TestWrongSpecsSayWhatThereIs(t *testing.T) {
	for spec, want := range map[string]string{
		"fnish":                 `unknown policy "fnish" (did you mean "finish"?); there are round-robin, least-tokens`,
		"finish:x=1":            `policy finish: unknown key "x"; it takes none`,
		"gorgo:w=1":             `policy gorgo: unknown key "w"; it takes qs`,
		"gorgo:1":               `policy gorgo: "1" is no setting; write key=value`,
		"gorgo:qs=1,qs=2":       "policy gorgo: qs is set twice",
		"gorgo:qs=-1":           "policy gorgo: qs=-1: want a number from 0 to 1000000000",
		"bailian:lambda=NaN":    "policy bailian: lambda=NaN: want a number from 0 to 1",
		"least-tokens:work=all": "policy least-tokens: work=all: want tokens or vllm-ascend",
		"lmetric:=1":            "unknown key",
	} {
		_, err := (*Library)(nil).Parse(spec)
		require.ErrorContains(t, err, want)
	}
	l, err := NewLibrary(map[string]Definition{"mine": {Score: "bs"}})
	require.NoError(t, err)
	_, err = l.Parse("yours")
	require.ErrorContains(t, err, "finish, mine")
	_, err = l.Parse("mine:x=1")
	require.ErrorContains(t, err, "no parameters")
}

func TestImportsArePure(t *testing.T) { // a policy that can reach the network or the clock is no longer a policy
	pkg, err := build.ImportDir(".", 0)
	require.NoError(t, err)
	pure := []string{
		"cmp", "errors", "fmt", "maps", "math", "reflect", "slices", "strconv", "strings", "github.com/cespare/xxhash/v2",
		"github.com/expr-lang/expr", "github.com/expr-lang/expr/ast", "github.com/expr-lang/expr/file",
		"github.com/expr-lang/expr/parser", "github.com/expr-lang/expr/vm", "evenkeel/internal/namedargs", "evenkeel/internal/spelling",
	}
	require.Subset(t, pure, pkg.Imports, "let the tier read it and put the value in Engine")
}
