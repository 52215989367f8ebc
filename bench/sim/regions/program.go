package regions

import (
	"math"
	"math/rand/v2"

	"evenkeel/bench/lab/reftext"
	"evenkeel/prefill/index"
)

// Lengths in tokens: answers have a heavy tail and are hidden from the policies.
const (
	mostPrompt = 8192
	mostOutput = 2048
	mostTurns  = 12

	// Medians of what a turn says and of its answer. An answer has 240 tokens in the
	// mean, as in published chats.
	said, answered = 80, 160
)

// client runs one program after the other.
type client struct {
	s      *simulation
	region int
	number int // in its region
	rng    *rand.Rand
	user   uint64 // its key, another one under another seed
	tree   *tree
	chat   *chat
	live   int // requests not yet ended
	asleep bool
}

// text is what a prompt begins with: its whole blocks, and its length.
type text struct {
	keys   []index.Key
	tokens int
}

// grow adds tokens that only this id has.
func (t text) grow(id uint64, tokens int) text {
	t.tokens = min(t.tokens+tokens, mostPrompt)
	out := text{tokens: t.tokens, keys: t.keys[:len(t.keys):len(t.keys)]}
	last := uint64(0)
	if n := len(out.keys); n > 0 {
		last = out.keys[n-1].Hash
	}
	for len(out.keys) < out.tokens/blockTokens {
		last = reftext.Mix(last ^ reftext.Mix(id+uint64(len(out.keys))))
		out.keys = append(out.keys, index.Key{Hash: last, Check: reftext.Mix(last)})
	}
	return out
}

// chat is a conversation: each turn's prompt is all that was said before.
type chat struct {
	history text
	turns   int // left
}

// tree is a tree of thoughts: a node's prompt is its parent's and the answer to
// it. All children of a node are asked for at once.
type tree struct {
	key  uint64
	left int
}

// logNormal draws a length with this median.
func logNormal(rng *rand.Rand, median, sigma float64, most int) int {
	return min(most, max(4, int(median*math.Exp(sigma*rng.NormFloat64()))))
}

const (
	appsPerRegion = 4 // with a system prompt each, which their users share
	fewShot       = 320
)

// nextProgram starts the client's next program, or sleeps while the load of its
// region is lower than its number. For that it also leaves a conversation.
func (c *client) nextProgram() {
	w := &c.s.scenario.Regions[c.region].Load
	if c.number >= w.active(c.s.now, c.s.scenario) {
		c.asleep = true
		return
	}
	c.asleep = false
	if w.Kind == treeOfThoughts {
		c.think(w)
		return
	}
	app := c.rng.IntN(appsPerRegion)
	id := uint64(c.region+1)<<32 | uint64(app)
	system := text{}.grow(reftext.Mix(c.s.salt^id), 80+70*app)
	c.chat = &chat{history: system, turns: 1}
	for c.chat.turns < mostTurns && c.rng.Float64() < 1-1/w.Turns {
		c.chat.turns++
	}
	c.sendTurn()
}

// sendTurn sends the next turn.
func (c *client) sendTurn() {
	w := &c.s.scenario.Regions[c.region].Load
	c.chat.turns--
	c.chat.history = c.chat.history.grow(c.rng.Uint64(), logNormal(c.rng, w.Prompt, 1, mostPrompt/4))
	prompt := c.chat.history
	c.chat.history = prompt.grow(c.rng.Uint64(), logNormal(c.rng, w.Output, 0.9, mostOutput))
	c.ask(prompt, c.chat.history, c.user, func(ok bool) {
		if ok && c.chat.turns > 0 && c.number < w.active(c.s.now, c.s.scenario) && c.chat.history.tokens < mostPrompt-mostOutput {
			c.s.after(w.ThinkMs*c.rng.ExpFloat64(), c.sendTurn)
			return
		}
		c.nextProgram()
	})
}

// think asks the questions of one tree.
func (c *client) think(w *Load) {
	question := text{}.grow(reftext.Mix(c.s.salt), fewShot).grow(c.rng.Uint64(), logNormal(c.rng, 90, 0.4, 400))
	c.tree = &tree{key: c.rng.Uint64()}
	c.node(c.tree, question, w, w.Depth, c.rng.Uint64())
}

// node asks one question, and then those below it.
func (c *client) node(t *tree, above text, w *Load, depth int, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 1)) // the order of answers must not change the tree
	t.left++
	prompt := above.grow(rng.Uint64(), 24)
	all := prompt.grow(rng.Uint64(), logNormal(rng, w.Output, 0.5, mostOutput))
	c.ask(prompt, all, t.key, func(ok bool) {
		if ok && depth > 1 {
			for range w.Branches {
				c.node(t, all, w, depth-1, rng.Uint64())
			}
		}
		if t.left--; t.left == 0 {
			c.nextProgram()
		}
	})
}

func (c *client) ask(prompt, all text, key uint64, then func(ok bool)) {
	output := max(1, all.tokens-prompt.tokens)
	c.s.send(&request{client: c, keys: prompt.keys, all: all.keys, tokens: prompt.tokens, output: output, key: key, then: then})
}
