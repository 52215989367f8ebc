package config

import (
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/require"

	"evenkeel/prefill/index"
	"evenkeel/prefill/steer"
)

var itemNumber = regexp.MustCompile(`\[\d+\]`)

// testdata/every_key_before.yaml has each key that there was before some became constants. Each of those is named once, and no
// other is.
func TestEveryKeyThatIsGoneIsNamedOnce(t *testing.T) {
	const file = "testdata/every_key_before.yaml"
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var all map[string]any
	require.NoError(t, yaml.Unmarshal(text, &all))
	before, now := map[string]bool{}, map[string]bool{}
	collect(before, "", all)
	for _, key := range keysBelow(reflect.TypeFor[Config](), "$") {
		now[itemNumber.ReplaceAllString(trimRoot(key), "")] = true
	}
	var want []string
	for key := range before {
		if !now[key] && key != "profiles.ascend" && !strings.HasPrefix(key, "discovery.dns.") && !strings.HasPrefix(key, "discovery.kubernetes.") {
			want = append(want, key)
		}
	}
	var got []string
	lines := strings.Split(string(text), "\n")
	c, err := Parse(file, text)
	for range 2 { // keys that the file may not have are told before those that other keys replace
		for _, e := range errorsOf(err) { // of these there is no value to go on with
			require.Regexp(t, `^(geo\.(tau|cost\.[a-z0-9_]+)|dispatch\.shadow)$`, e.Path)
			require.Contains(t, e.Msg, "this key is gone")
			got = append(got, e.Path)
			lines[e.Line-1] = ""
		}
		c, err = Parse(file, []byte(strings.Join(lines, "\n")))
	}
	require.NoError(t, err)
	want = slices.DeleteFunc(want, func(key string) bool { return key == "geo.cost" })
	for _, d := range c.Doubts() {
		got = append(got, d.Path)
		require.Contains(t, gone, "$."+d.Path)
		require.Contains(t, d.Msg, "always "+gone["$."+d.Path]+":")
		key := d.Path[strings.LastIndex(d.Path, ".")+1:]
		require.True(t, strings.HasPrefix(strings.Split(string(text), "\n")[d.Line-1][d.Column-1:], key+":"), "%s: line %d, column %d", d.Path, d.Line, d.Column)
	}
	require.ElementsMatch(t, want, got)
	require.Len(t, got, len(gone)+len(removed)+9)
}

// What a user is told of a key that is gone is the value that the program has.
func TestValuesOfKeysThatAreGone(t *testing.T) {
	d := Default()
	for key, is := range map[string]any{
		"advice.calm": d.Advice.Calm, "advice.window": d.Advice.Window, "bind.confirm": d.Bind.Confirm, "bind.grace": d.Bind.Grace,
		"limits.client_backlog_bytes": d.Limits.ClientBacklog, "limits.client_lag": d.Limits.ClientLag,
		"prefill.hotspot.class_tokens": steer.ClassTokens, "prefill.index.block_bytes": index.BlockBytes,
	} {
		says := reflect.New(reflect.TypeOf(is))
		require.NoError(t, yaml.Unmarshal([]byte(gone["$."+key]), says.Interface()), key)
		require.Equal(t, is, says.Elem().Interface(), key)
	}
}

// A key that is gone does not count, whatever its value, and what stands beside it does.
func TestAKeyThatIsGoneChangesNothing(t *testing.T) {
	for _, text := range []string{
		"prefill: {scrape: {misses: -1, timeout: 1s}}", "prefill: &p {scrape: {timeout: 1s, misses: 1}}",
		"prefill:\n  scrape:\n    timeout: 1s\n    misses: [no, number]\n",
	} {
		c, err := Parse("f.yaml", []byte(text+"\nengines: {prefill: [{url: \"http://p:1\"}], decode: [{url: \"http://d:1\"}]}\n"))
		require.NoError(t, err, text)
		doubts := c.Doubts()
		require.Len(t, doubts, 1, text)
		require.Equal(t, "prefill.scrape.misses", doubts[0].Path)
		c.source = source{}
		want, err := Parse("f.yaml", []byte("prefill: {scrape: {timeout: 1s}}\nengines: {prefill: [{url: \"http://p:1\"}], decode: [{url: \"http://d:1\"}]}\n"))
		require.NoError(t, err)
		want.source = source{}
		require.Equal(t, want, c, text)
	}
	c, err := Parse("f.yaml", []byte("prefill: {scrape: {misses: 1}}"))
	require.NoError(t, err, "a part of which nothing is left is as one without keys")
	require.Equal(t, Default().Prefill.Scrape, c.Prefill.Scrape)
	_, err = Parse("f.yaml", []byte("prefill: {scrape: {misses: 1, misses: 1, mises: 1}}"))
	require.ErrorContains(t, err, "prefill.scrape.mises: no such key", "and what is wrong beside it is still told")
}
