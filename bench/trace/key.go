package trace

// keyBlocks is how many leading blocks make two prompts the same for a
// predictor: 4,096 tokens.
const keyBlocks = 8

// PromptKey is the exact-match key of the request: its Key where it has one,
// else a hash of its first hash ids; 0 for none.
func (r *Request) PromptKey() uint64 {
	if r.Key != 0 || len(r.HashIDs) == 0 {
		return r.Key
	}
	h := uint64(14695981039346656037) // FNV-1a
	for _, id := range r.HashIDs[:min(keyBlocks, len(r.HashIDs))] {
		for shift := 0; shift < 64; shift += 8 {
			h = (h ^ id>>shift&0xff) * 1099511628211
		}
	}
	return max(h, 1)
}
