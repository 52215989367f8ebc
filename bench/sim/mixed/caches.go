package mixed

import "evenkeel/dispatcher/board"

// cache is the chats whose beginning a rank holds, least recently used first.
type cache struct {
	chats  []kept
	tokens int64
}

type kept struct{ chat, tokens int32 }

func (c *cache) holds(chat int32) int32 {
	for i := range c.chats {
		if c.chats[i].chat == chat {
			return c.chats[i].tokens
		}
	}
	return 0
}

// keep notes a chat, and forgets the oldest ones beyond so many tokens.
func (c *cache) keep(chat, tokens int32, room int64) {
	for i := range c.chats {
		if c.chats[i].chat == chat {
			c.tokens -= int64(c.chats[i].tokens)
			c.chats = append(c.chats[:i], c.chats[i+1:]...)
			break
		}
	}
	c.chats = append(c.chats, kept{chat, tokens})
	c.tokens += int64(tokens)
	drop := 0
	for ; drop < len(c.chats) && (c.tokens > room || len(c.chats)-drop > mostChats); drop++ {
		c.tokens -= int64(c.chats[drop].tokens)
	}
	c.chats = append(c.chats[:0], c.chats[drop:]...)
}

// mostChats that a rank is asked for.
const mostChats = 256

// hits are the prefixes of a request that ranks hold, in the tokens that the proxy takes the prompt
// for.
func (s *Run) hits(q *request) (all []board.Hit) {
	if q.shared == 0 {
		return nil
	}
	for r := range s.caches {
		if n := min(q.shared, s.caches[r].holds(q.chat)); n >= block {
			all = append(all, board.Hit{Worker: int32(r), Tokens: int(n / block * block)})
		}
	}
	return all
}

// block is how many tokens a prefix cache keeps together.
const block = 16
