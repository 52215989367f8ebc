package prompt

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/prefill/index"
)

// However long prompts are, what is kept of their token ids has a bound.
func TestTokenizedPromptsAreBoundedInNumberAndBlocks(t *testing.T) {
	for _, row := range []struct {
		name           string
		blocks, prompt int // of each; that are kept
	}{
		{"short ones", 1, maxTokenized},
		{"long ones", maxKeys / 8, 8},
		{"one that is longer than all may be", maxKeys + 1, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			var known tokenizer
			keys := make([]index.Key, row.blocks)
			last := uint64(3 * maxTokenized)
			for n := range last {
				known.remember(tokenized{of: promptDigest{n + 1}, block: 16, keys: keys})
				known.remember(tokenized{of: promptDigest{n + 1}, block: 16, keys: keys}) // two asked at once
			}
			require.Len(t, known.known, row.prompt)
			require.Equal(t, row.prompt, known.recent.Len())
			require.Equal(t, row.prompt*row.blocks, known.keys)
			_, ok := known.lookup(promptDigest{last}, 16)
			require.Equal(t, row.prompt > 0, ok)
		})
	}
}

// A question that engines do not answer holds up one prompt now and then, not
// every second's worth of them, and is logged once.
func TestAnEngineThatTellsNoTokenIDsIsSeldomAsked(t *testing.T) {
	var k tokenizer
	now, failed := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC), errors.New("late")
	refused, ok := k.beginCall(now)
	require.True(t, ok)
	began, _ := k.endCall(refused, now, &engine.StatusError{Status: http.StatusBadRequest})
	require.False(t, began, "that is the prompt's own fault")
	first, ok := k.beginCall(now)
	require.True(t, ok)
	second, ok := k.beginCall(now) // at once with it
	require.True(t, ok)
	began, _ = k.endCall(first, now, failed)
	require.True(t, began)
	began, _ = k.endCall(second, now, failed)
	require.False(t, began, "said once")

	asked := 0
	for range 1000 { // ten a second
		now = now.Add(100 * time.Millisecond)
		if turn, ok := k.beginCall(now); ok {
			_, another := k.beginCall(now)
			require.False(t, another, "one at a time tries again")
			began, _ := k.endCall(turn, now, failed)
			require.False(t, began)
			asked++
		}
	}
	require.Less(t, asked, 10, "of 1000 prompts")
	now = now.Add(time.Minute)
	turn, ok := k.beginCall(now)
	require.True(t, ok)
	_, ended := k.endCall(turn, now, nil)
	require.True(t, ended)
	_, ok = k.beginCall(now)
	require.True(t, ok)
}
