package namedargs

import (
	"go/build"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestImportsArePure(t *testing.T) { // a text that reaches the network or the clock is no longer a name
	pkg, err := build.ImportDir(".", 0)
	require.NoError(t, err)
	require.Subset(t, []string{"cmp", "fmt", "math", "slices", "strconv", "strings", "evenkeel/internal/spelling"}, pkg.Imports,
		"let the caller do it")
}

type values struct {
	n    int
	x    float64
	on   bool
	word string
}

var words = []string{"a", "b", "c"}

var keys = []Key[values]{
	Or(Whole("n", 1, 9, func(v *values) *int { return &v.n }), "auto", -1, func(v *values) *int { return &v.n }),
	Number("x", 0, 1e6, func(v *values) *float64 { return &v.x }).Meaning("a share"),
	Either("on", "no", "yes", func(v *values) *bool { return &v.on }),
	Words("word", func(v *values) *string { return &v.word }, func(i int) string { return words[i] }, words...),
}

var names = []string{"one", "two", "two:paper"}

func read(text string) (string, values, error) {
	name, set, err := Parse(text, names)
	v := values{n: 2, word: "a"}
	if err == nil {
		err = Apply(name, keys, &v, set...)
	}
	return name, v, err
}

func TestAPolicyIsReadByNamePresetAndSettings(t *testing.T) {
	for _, row := range []struct {
		name, text, of string
		want           values
	}{
		{"a name alone", " one ", "one", values{n: 2, word: "a"}},
		{"settings behind a colon", "one:n=3,x=.5", "one", values{n: 3, x: 0.5, word: "a"}},
		{"or behind a comma", "one,word=c", "one", values{n: 2, word: "c"}},
		{"a preset", "two:paper,on=yes", "two:paper", values{n: 2, on: true, word: "a"}},
		{"settings of what has presets", "two:on=yes", "two", values{n: 2, on: true, word: "a"}},
		{"a word in place of a number", "one:n=auto", "one", values{n: -1, word: "a"}},
	} {
		name, v, err := read(row.text)
		require.NoError(t, err, row.name)
		require.Equal(t, row.of, name, row.name)
		require.Equal(t, row.want, v, row.name)
	}
}

func TestWhatIsWrongIsNamed(t *testing.T) {
	for _, row := range []struct{ name, text, want string }{
		{"an unknown name", "three:n=1", `unknown policy "three"; there are one, two, two:paper`},
		{"an unknown preset", "two:papr", `unknown policy "two:papr" (did you mean "two:paper"?); there are one, two, two:paper`},
		{"no value", "one:n", `policy one: "n" is no setting; write key=value`},
		{"nothing behind the colon", "one:", `policy one: "" is no setting; write key=value`},
		{"twice", "one:n=1,n=2", "policy one: n is set twice"},
		{"an unknown key", "one:m=1", `policy one: unknown key "m"; it takes n, x, on, word`},
		{"a number out of range", "one:n=0", "policy one: n=0: want auto or a whole number from 1 to 9"},
		{"half a number", "one:n=1.5", "policy one: n=1.5: want auto or a whole number from 1 to 9"},
		{"no number", "one:x=NaN", "policy one: x=NaN: want a share"},
		{"neither", "one:on=1", "policy one: on=1: want no or yes"},
		{"another word", "one:word=d", "policy one: word=d: want a, b, c"},
	} {
		_, _, err := read(row.text)
		require.EqualError(t, err, row.want, row.name)
	}
	require.EqualError(t, Apply[values]("one", nil, nil, Setting{"n", "1"}), `policy one: unknown key "n"; it takes none`)
}

func TestTextIsReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		defaults := values{n: 2, word: "a"}
		v := values{
			n: rapid.SampledFrom([]int{-1, 1, 2, 9}).Draw(t, "n"), x: rapid.Float64Range(0, 1e6).Draw(t, "x"),
			on: rapid.Bool().Draw(t, "on"), word: rapid.SampledFrom(words).Draw(t, "word"),
		}
		name := rapid.SampledFrom(names).Draw(t, "name")
		again, got, err := read(Text(name, keys, &v, &defaults))
		require.NoError(t, err)
		require.Equal(t, name, again)
		require.Equal(t, v, got)
		require.Equal(t, name, Text(name, keys, &defaults, &defaults), "defaults are left out")
	})
}

func FuzzParse(f *testing.F) {
	for _, text := range []string{"one", "two:paper,n=3", ":", "one:x=1e9", "two,", "one:=1"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		name, v, err := read(text)
		if err != nil {
			return
		}
		again, got, err := read(Text(name, keys, &v, &values{n: 2, word: "a"}))
		require.NoError(t, err)
		require.Equal(t, name, again)
		require.Equal(t, v, got)
	})
}
