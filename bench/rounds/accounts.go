package main

import "evenkeel/dispatcher/rounds"

// account is what a proxy knows of a rank without asking it: what it sent, and what came back.
type account struct {
	requests int
	decoding int
	kv       int64
	backlog  int64
	pending  []pending // first come first served
}

// pending is a prompt that was sent and has no token yet.
type pending struct {
	job  int32
	left int32 // tokens to compute, as the proxy sees it
}

func (a *account) send(job, prompt, uncached int32) {
	a.requests++
	a.kv += int64(prompt)
	a.backlog += int64(uncached)
	a.pending = append(a.pending, pending{job, uncached})
}

// stepped takes what a rank computes in a step off its backlog: the budget less its decodes.
func (a *account) stepped(budget int32) {
	budget -= int32(a.decoding)
	for i := range a.pending {
		n := max(0, min(budget, a.pending[i].left))
		a.pending[i].left -= n
		a.backlog -= int64(n)
		budget -= n
	}
}

// begun is told of the first token: what is left of the prompt was computed, and its length is known now.
func (a *account) begun(job int32, more int64) {
	for i := range a.pending {
		if p := a.pending[i]; p.job == job {
			a.backlog -= int64(p.left)
			a.pending = append(a.pending[:i], a.pending[i+1:]...)
			break
		}
	}
	a.kv += more
	a.decoding++
}

func (a *account) ended(kv int64) {
	a.requests--
	a.decoding--
	a.kv -= kv
}

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

// hits are the prefixes of a request that ranks hold, in the tokens that the proxy takes the prompt for.
func (s *run) hits(into []rounds.Hit, q *request) []rounds.Hit {
	if q.shared == 0 {
		return into
	}
	for r := range s.caches {
		if n := min(q.shared, s.caches[r].holds(q.chat)); n >= block {
			into = append(into, rounds.Hit{Rank: int32(r), Tokens: n / block * block})
		}
	}
	return into
}

// block is how many tokens a prefix cache keeps together.
const block = 16
