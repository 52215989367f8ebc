package reftext

import "strconv"

// MakePrompt is a prompt of the given number of tokens, another one for every
// seed. It needs no escaping in JSON.
func MakePrompt(seed uint64, tokens int) string {
	return string(AppendPrompt(make([]byte, 0, 18+4*tokens), seed, tokens))
}

// AppendPrompt appends the words of MakePrompt, so that prompts with a common
// beginning can be put together from pieces; a space separates them from what
// dst holds. About 4 bytes a token.
func AppendPrompt(dst []byte, seed uint64, tokens int) []byte {
	if tokens <= 0 {
		return dst
	}
	if len(dst) > 0 {
		dst = append(dst, ' ')
	}
	dst = strconv.AppendUint(append(dst, 'p'), seed, 36) // unique for the seed
	const letters = "abcdefghijklmnopqrstuvwxyz012345"   // 32: five bits a letter
	var bits uint64
	for i := 1; i < tokens; i++ {
		if i&3 == 1 {
			bits = Mix(seed + uint64(i)*0x9e3779b97f4a7c15)
		}
		dst = append(dst, ' ', letters[bits&31], letters[bits>>5&31], letters[bits>>10&31])
		bits >>= 15
	}
	return dst
}
