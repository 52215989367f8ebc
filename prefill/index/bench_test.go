package index

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

// full is an index of 64 candidates with as many blocks as its bound takes, and
// keys that half of them hold.
func full(keys []Key) (*Index, []Slot) {
	x := New(Config{MaxBytes: 64 << 20})
	var slots []Slot
	for i := range 64 {
		slots = append(slots, x.Add(fmt.Sprintf("p%d/0", i), 0))
	}
	for i := range int32(400) {
		x.Insert(slots[i%64], prompt(i+2, 64, 2048))
	}
	for _, s := range slots[:32] {
		x.Insert(s, keys)
	}
	return x, slots
}

func longIDs() []int32 {
	ids := make([]int32, 32768)
	for i := range ids {
		ids[i] = int32(i*7919) & 0x1ffff
	}
	return ids
}

// longChat is a chat of about 128 KiB of rendering in 40 messages of code, an
// escape every ten bytes.
func longChat() (messages json.RawMessage) {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	var chat []message
	for i := range 40 {
		chat = append(chat, message{[]string{"user", "assistant"}[i%2],
			strings.Repeat("\tif err := s.write(text); err != nil {\n\t\treturn fmt.Errorf(\"write: %w\", err)\n\t}\n", 42)})
	}
	raw, _ := json.Marshal(map[string]any{"messages": chat})
	b, err := mooncake.ScanBody(raw, 0)
	if err != nil {
		panic(err)
	}
	messages, _ = b.Get("messages")
	return messages
}

// Hashing and the walk of a 32k-token prompt, 64 candidates: at most 250 µs.
func BenchmarkTokens32k(b *testing.B) {
	var h Hasher
	ids, root := longIDs(), Scope{Model: "m"}.Root(Tokens, 16)
	keys := h.Tokens(nil, root, ids, 16)
	x, _ := full(keys)
	match := make([]int32, 0, 64)
	b.ReportAllocs()
	for b.Loop() {
		keys = h.Tokens(keys[:0], root, ids, 16)
		match = x.Match(match, keys)
	}
	require.EqualValues(b, 2048, match[0])
}

func BenchmarkBytes128k(b *testing.B) {
	var h Hasher
	messages, root := longChat(), Scope{Model: "m"}.Root(Bytes, BlockBytes)
	text := h.Chat(nil, root, messages, nil)
	x, _ := full(text.Keys)
	match, keys := make([]int32, 0, 64), text.Keys
	b.ReportAllocs()
	b.SetBytes(int64(text.Bytes))
	for b.Loop() {
		text = h.Chat(keys[:0], root, messages, nil)
		match = x.Match(match, text.Keys)
	}
	require.EqualValues(b, len(keys), match[0])
}

// What a request does to a full index: each new prompt evicts as much.
func BenchmarkSpeculateAndConfirm(b *testing.B) {
	x, slots := full(prompt(1, 0, 2048))
	prompts := make([][]Key, 512)
	for i := range prompts {
		prompts[i] = prompt(int32(1000+i), 64, 2048)
	}
	i := 0
	b.ReportAllocs()
	for b.Loop() {
		p := x.Speculate(slots[i%64], prompts[i%512])
		x.Confirm(&p)
		i++
	}
}

func TestNothingOnARequestsWayAllocates(t *testing.T) {
	var h Hasher
	ids, messages := longIDs(), longChat()
	tokenRoot, byteRoot := Scope{Model: "m"}.Root(Tokens, 16), Scope{Model: "m"}.Root(Bytes, BlockBytes)
	x := New(Config{MaxBytes: 1 << 20}) // full after a few prompts
	s := x.Add("a", 0)
	keys, match, i := make([]Key, 0, 4096), make([]int32, 0, 64), int32(0)
	once := func() {
		i++
		ids[0] = i
		keys = h.Tokens(keys[:0], tokenRoot, ids, 16)
		match = x.Match(match, keys)
		p := x.Speculate(s, keys)
		x.Correct(s, keys, 3)
		x.Confirm(&p)
		keys = h.Chat(keys[:0], byteRoot, messages, nil).Keys
		match = x.Match(match, keys)
		p = x.Speculate(s, keys)
		x.Drop(&p)
		_ = Scope{Model: "m", Tenant: "t"}.Root(Tokens, 16)
	}
	for range 20 {
		once()
	}
	require.Zero(t, testing.AllocsPerRun(20, once))
	prompt := json.RawMessage(`[1,2,3,40000]`)
	room := make([]int32, 0, 8)
	require.Zero(t, testing.AllocsPerRun(20, func() { room, _ = PromptTokens(room[:0], prompt) }))
	messages = json.RawMessage(`[{"role":"user","content":"a long text"}]`)
	require.Zero(t, testing.AllocsPerRun(20, func() { PromptTokens(nil, messages) }), "which are no token ids")
}
