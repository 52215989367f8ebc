package trace

// PromptKey is the exact-match key of the request: its Key where it has one, else a
// hash of its length and of all its hash ids; 0 for none. Two prompts are the same
// here where the server would find them the same, which hashes all their bytes.
func (r *Request) PromptKey() uint64 {
	if r.Key != 0 || len(r.HashIDs) == 0 {
		return r.Key
	}
	h := uint64(14695981039346656037) // FNV-1a
	add := func(x uint64) {
		for shift := 0; shift < 64; shift += 8 {
			h = (h ^ x>>shift&0xff) * 1099511628211
		}
	}
	add(uint64(r.Prompt))
	for _, id := range r.HashIDs {
		add(id)
	}
	return max(h, 1)
}
