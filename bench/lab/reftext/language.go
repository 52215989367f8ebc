// Package reftext is the language the reference engines speak and the load
// generator understands: a prompt has a key, and the key alone says every
// token of the answer, its text and where it ends. Two engines that saw the
// same prompt therefore agree on the answer, and whoever holds the request can
// check a stream token by token without asking anybody.
//
// A word of a prompt is one token. Its id depends on the word and on the white
// space and template marks (roles, tools, ...) in front of it, so that the ids
// alone say the key, and a prompt given as ids means the same as its text.
package reftext

import (
	"fmt"
	"strconv"
	"strings"
)

// Ids below FirstAnswerID are words of prompts, those from it on are tokens of
// answers. VocabSize bounds both.
const (
	FirstAnswerID = 1 << 20
	answerWords   = 1 << 15
	VocabSize     = FirstAnswerID + answerWords
)

// NaturalLength is how many tokens the answer to key has when nothing cuts it:
// 8 to 200. It ends with finish reason "stop".
func NaturalLength(key uint64) int { return 8 + int(Mix(key^0x6c656e677468)%193) }

// TokenID is token i of the answer to key.
func TokenID(key uint64, i int) int32 {
	return FirstAnswerID + int32(Mix(key+uint64(i)*0x9e3779b97f4a7c15)%answerWords)
}

// The words of the answers: mostly plain, some of several bytes a rune, some
// that JSON must escape. The number after them makes each unique.
var (
	stems     = [16]string{" w", " w", " w", " w", " t", " t", " t", " k", " k", " é", " ñu", " 日本", " 🚢", "\nл", ` "q`, ` a\b`}
	stemsJSON = escaped(stems)
)

func escaped(words [16]string) (out [16]string) {
	for i, w := range words {
		q := strconv.Quote(w) // Go's and JSON's escapes agree on what the stems hold: \n, \", \\
		out[i] = q[1 : len(q)-1]
	}
	return out
}

// AppendToken appends the text of an answer's token.
func AppendToken(dst []byte, id int32) []byte {
	n := id - FirstAnswerID
	return strconv.AppendInt(append(dst, stems[n&15]...), int64(n), 10)
}

// AppendTokenJSON appends the text as it stands inside a JSON string.
func AppendTokenJSON(dst []byte, id int32) []byte {
	n := id - FirstAnswerID
	return strconv.AppendInt(append(dst, stemsJSON[n&15]...), int64(n), 10)
}

// Text is the first n tokens of the answer to key.
func Text(key uint64, n int) string {
	var dst []byte
	for i := range n {
		dst = AppendToken(dst, TokenID(key, i))
	}
	return string(dst)
}

// ToolArguments is the arguments string of a tool call of n tokens: a JSON
// object whose only member, "text", is the answer's text.
func ToolArguments(key uint64, n int) string {
	dst := []byte(ToolPrefix)
	for i := range n {
		dst = AppendTokenJSON(dst, TokenID(key, i))
	}
	return string(append(dst, ToolSuffix...))
}

// What stands around the text in a tool call's arguments.
const (
	ToolPrefix = `{"text":"`
	ToolSuffix = `"}`
)

// Check compares text with the answer to key from token from on and returns
// how many tokens it holds. Text that differs, or ends inside a token, is an
// error; tokens then counts the whole ones before it.
func Check(key uint64, from int, text string) (tokens int, err error) {
	c := Checker{key: key, token: from}
	if err := c.Feed(text); err != nil {
		return c.token - from, err
	}
	if c.offset > 0 {
		return c.token - from, fmt.Errorf("reftext: text ends inside token %d of answer %016x", c.token, key)
	}
	return c.token - from, nil
}

// Checker compares the pieces of one answer with what it must be. A piece may
// end anywhere, also inside a rune.
type Checker struct {
	key    uint64
	token  int
	offset int // bytes of that token already seen
	word   [40]byte
}

// NewChecker follows the answer to key from its first token.
func NewChecker(key uint64) *Checker { return &Checker{key: key} }

// Tokens counts the tokens whose text was seen whole.
func (c *Checker) Tokens() int { return c.token }

// Partial says that the text so far ends inside a token.
func (c *Checker) Partial() bool { return c.offset > 0 }

// Feed takes the next piece. After an error the checker stays where it was.
func (c *Checker) Feed(text string) error {
	for len(text) > 0 {
		want := AppendToken(c.word[:0], TokenID(c.key, c.token))[c.offset:]
		n := min(len(want), len(text))
		if text[:n] != string(want[:n]) {
			return fmt.Errorf("reftext: token %d of answer %016x: got %q, want %q", c.token, c.key, clip(text), want)
		}
		text = text[n:]
		if n == len(want) {
			c.token, c.offset = c.token+1, 0
		} else {
			c.offset += n
		}
	}
	return nil
}

func clip(s string) string {
	if len(s) > 48 {
		return strings.ToValidUTF8(s[:48], "?") + "..."
	}
	return s
}

// Mix is splitmix64's finaliser: every input bit moves every output bit.
func Mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
