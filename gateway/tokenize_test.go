package gateway

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/prefill/index"
)

// However long prompts are, what is kept of their token ids has a bound.
func TestTokenizedPromptsAreBoundedInNumberAndBlocks(t *testing.T) {
	for _, row := range []struct {
		name           string
		blocks, prompt int // of each; that are kept
	}{
		{"short ones", 1, mostTokenized},
		{"long ones", mostKeys / 8, 8},
		{"one that is longer than all may be", mostKeys + 1, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			var known tokenizer
			keys := make([]index.Key, row.blocks)
			last := uint64(3 * mostTokenized)
			for n := range last {
				known.note(tokenized{of: promptDigest{n + 1}, block: 16, keys: keys})
				known.note(tokenized{of: promptDigest{n + 1}, block: 16, keys: keys}) // two asked at once
			}
			require.Len(t, known.known, row.prompt)
			require.Equal(t, row.prompt, known.recent.Len())
			require.Equal(t, row.prompt*row.blocks, known.keys)
			_, ok := known.find(promptDigest{last}, 16)
			require.Equal(t, row.prompt > 0, ok)
		})
	}
}
