package words

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func TestWords(t *testing.T) {
	require.Equal(t, []string{"0 ranks", "1 rank", "1,200 ranks"}, []string{Count(0, "rank"), Count(1, "rank"), Count(1200, "rank")})
	require.Equal(t, []string{"are", "is"}, []string{Are(0), Are(1)})
	require.Equal(t, []string{"", "Rank a"}, []string{Capital(""), Capital("rank a")})
}

func TestATextIsCutToItsBound(t *testing.T) {
	require.Equal(t, "short", Clip("short"))
	require.Len(t, Clip(strings.Repeat("x", 9999)), MaxText)
	require.True(t, utf8.ValidString(Clip(strings.Repeat("x", MaxText-1)+"é")), "cut within a letter")
}

func TestWhatIsAName(t *testing.T) {
	for _, name := range []string{"m", "org/Model-7B:lora 1", "模型", "modèle", strings.Repeat("x", MaxName)} {
		require.True(t, IsName(name), "%q", name)
	}
	for _, name := range []string{
		"", "m\n", "m\x00", "m\x1b[2J", "m\x7f", "m\u009b2J", "m\u202e", "m\u2028", "m\xff", "m\ufffd", strings.Repeat("x", MaxName+1),
	} {
		require.False(t, IsName(name), "%q", name)
	}
}
