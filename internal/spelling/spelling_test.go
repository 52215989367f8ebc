package spelling

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestHint(t *testing.T) {
	keys := []string{"url", "slots", "ranks", "kv_tokens", "group", "barrier"}
	policies := []string{"br0", "brh", "evenkeel", "jsq", "pjsq", "jsq-kv", "pjsq-kv"}
	for _, c := range []struct {
		name, word string
		among      []string
		want       string
	}{
		{"a letter is missing", "slot", keys, ` (did you mean "slots"?)`},
		{"a letter is wrong", "kv-tokens", keys, ` (did you mean "kv_tokens"?)`},
		{"a letter is too many", "ranksx", keys, ` (did you mean "ranks"?)`},
		{"two letters have changed places", "gruop", keys, ` (did you mean "group"?)`},
		{"only the beginning is there", "even", policies, ` (did you mean "evenkeel"?)`},
		{"several are as close", "br9", policies, ` (did you mean "br0" or "brh"?)`},
		{"the closest counts", "pjsqkv", policies, ` (did you mean "pjsq-kv"?)`},
		{"the letters are of the other case", "JSQ-KV", policies, ` (did you mean "jsq-kv"?)`},
		{"no name is close", "fastest", policies, ""},
		{"of a short word, nothing is left", "xy", keys, ""},
		{"two of four letters are another word", "none", []string{"code", "pareto"}, ""},
		{"a letter is the beginning of too much", "b", policies, ""},
		{"nothing is written", "", keys, ""},
		{"there are no names", "slots", nil, ""},
	} {
		t.Run(c.name, func(t *testing.T) { require.Equal(t, c.want, Hint(c.word, c.among)) })
	}
}

func TestDistance(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		word := rapid.StringN(0, 12, -1)
		a, b := word.Draw(t, "a"), word.Draw(t, "b")
		require.Zero(t, distance(a, a))
		require.Equal(t, distance("x"+a, "y"+b), distance("y"+b, "x"+a), "it is the same the other way round")
		require.LessOrEqual(t, distance("x"+a, "y"+a), 1)
		require.LessOrEqual(t, distance("x"+a, "y"+b), max(len([]rune(a)), len([]rune(b)))+1)
	})
}
