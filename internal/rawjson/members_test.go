package rawjson

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestBlankLeavesTheOtherMembers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		space := rapid.SampledFrom([]string{"", " ", "\n\t"})
		members, kept := []string{}, []string{}
		for range rapid.IntRange(0, 6).Draw(t, "members") {
			key := rapid.SampledFrom([]string{"a", "b", "drop", `dr\u006fp`, "drop "}).Draw(t, "key")
			value := rapid.SampledFrom([]string{"1", `"x, \"drop\":1}"`, `{"drop":[1,2]}`, "[]", "null"}).Draw(t, "value")
			if Key([]byte(key)) != "drop" {
				kept = append(kept, `"`+key+`":`+value)
			}
			members = append(members, space.Draw(t, "space")+`"`+key+`"`+space.Draw(t, "space")+":"+space.Draw(t, "space")+value+space.Draw(t, "space"))
		}
		text := []byte("{" + strings.Join(members, ",") + space.Draw(t, "space") + "}")
		length := len(text)
		Blank(text, func(key string) bool { return key == "drop" })
		require.Len(t, text, length)
		var got []string
		require.True(t, json.Valid(text), "%s", text)
		for key, value := range Members(text) {
			got = append(got, `"`+key+`":`+string(value))
		}
		require.Equal(t, strings.Join(kept, ","), strings.Join(got, ","), "%s", text)
	})
	list := []byte(`["drop"]`)
	Blank(list, func(string) bool { return true })
	require.Equal(t, `["drop"]`, string(list), "which has no members")
}
