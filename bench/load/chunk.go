package load

import "unicode/utf8"

// chunk is what the checks need of one event, or of a whole answer: its first
// choice, its usage, its error. Slices point into the scanned bytes, or, where
// a string had escapes, into scratch; both live until the next scan.
type chunk struct {
	id, object []byte
	choices    int
	index      int    // of the first choice
	text       []byte // delta.content, message.content or text
	finish     []byte // finish_reason; nil while null or absent
	stopReason []byte // only if it is a string
	usage      usage
	hasUsage   bool // not null
	failed     bool // it is an error: a member "error", or object "error"
	message    []byte
	kind       []byte // the error's type
	code       []byte // the error's code, string or number

	scratch     []byte
	firstChoice bool // the scanner is inside it
}

type usage struct{ prompt, completion, total int }

// scan replaces c by what data holds.
func (c *chunk) scan(data []byte) error {
	*c = chunk{index: -1, scratch: c.scratch[:0]}
	s := scanner{b: data}
	s.space()
	if s.peek() != '{' {
		s.fail("not an object")
	}
	s.object(0, func(key []byte) { c.member(&s, key) })
	s.space()
	if s.err == nil && s.i < len(data) {
		s.fail("bytes after the object")
	}
	if s.err == nil && !utf8.Valid(data) {
		s.fail("not UTF-8")
	}
	if s.err != nil {
		return s.err
	}
	return nil
}

func (c *chunk) member(s *scanner, key []byte) {
	switch string(key) {
	case "id":
		c.id = s.text(c)
	case "object":
		c.object = s.text(c)
		c.failed = c.failed || string(c.object) == "error"
	case "message": // of an error in the old shape
		c.message = s.text(c)
	case "type":
		c.kind = s.text(c)
	case "code":
		c.code = s.scalar(c)
	case "choices":
		c.choices = 0
		s.list(1, func(n int) {
			c.choices = n + 1
			c.firstChoice = n == 0
			s.object(1, func(key []byte) { c.choice(s, key) })
		})
	case "usage":
		c.hasUsage = s.peek() == '{'
		s.object(1, func(key []byte) { c.count(s, key) })
	case "error":
		c.failed = c.failed || s.peek() != 'n'
		if s.peek() == '"' {
			c.message = s.text(c)
			return
		}
		s.object(1, func(key []byte) { c.failure(s, key) })
	default:
		s.skip(1)
	}
}

func (c *chunk) choice(s *scanner, key []byte) {
	if !c.firstChoice {
		s.skip(2)
		return
	}
	switch string(key) {
	case "index":
		c.index = s.number()
	case "text":
		c.text = s.text(c)
	case "delta", "message":
		s.object(2, func(key []byte) {
			if string(key) == "content" {
				c.text = s.text(c)
			} else {
				s.skip(3)
			}
		})
	case "finish_reason":
		c.finish = s.text(c)
	case "stop_reason":
		if s.peek() == '"' {
			c.stopReason = s.text(c)
		} else {
			s.skip(2)
		}
	default:
		s.skip(2)
	}
}

func (c *chunk) count(s *scanner, key []byte) {
	switch string(key) {
	case "prompt_tokens":
		c.usage.prompt = s.number()
	case "completion_tokens":
		c.usage.completion = s.number()
	case "total_tokens":
		c.usage.total = s.number()
	default:
		s.skip(2)
	}
}

func (c *chunk) failure(s *scanner, key []byte) {
	switch string(key) {
	case "message":
		c.message = s.text(c)
	case "type":
		c.kind = s.text(c)
	case "code":
		c.code = s.scalar(c)
	default:
		s.skip(2)
	}
}
