package load

import (
	"bytes"
	"cmp"
	"fmt"

	"evenkeel/internal/rawjson"
)

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

	data        []byte
	scratch     []byte
	firstChoice bool  // the scan is inside it
	err         error // the first value of another type than it must have
}

type usage struct{ prompt, completion, total int }

// scan replaces c by what data holds. Keys are compared as they stand: one with
// escapes is not ours.
func (c *chunk) scan(data []byte) error {
	*c = chunk{data: data, index: -1, scratch: c.scratch[:0]}
	_, err := rawjson.Scan(data, 0, func(at rawjson.Place) (refused string) { // each member was checked, and is not looked for again
		c.member(data[at.Key+1:at.KeyEnd-1], at.Val)
		return ""
	})
	return cmp.Or(err, c.err)
}

// members hands over the members of the object at i; null is one without members.
// Here and below what reads a value returns where it ends.
func (c *chunk) members(key []byte, i int, member func(key []byte, i int) (end int)) int {
	o := rawjson.ObjectAt(c.data, i)
	if o.Pos < 0 {
		return c.null(key, i, "an object")
	}
	for o.Next() {
		o.Pos = member(o.Key, o.Val)
	}
	return o.Pos
}

func (c *chunk) member(key []byte, i int) (end int) {
	switch string(key) {
	case "id":
		return c.string(key, i, &c.id)
	case "object":
		end = c.string(key, i, &c.object)
		c.failed = c.failed || string(c.object) == "error"
		return end
	case "message": // of an error in the old shape
		return c.string(key, i, &c.message)
	case "type":
		return c.string(key, i, &c.kind)
	case "code":
		return c.scalar(key, i, &c.code)
	case "choices":
		list := rawjson.ArrayAt(c.data, i)
		if list.Pos < 0 {
			return c.null(key, i, "a list")
		}
		for list.Next() {
			c.firstChoice = list.N == 1
			list.Pos = c.members(key, list.Val, c.choice)
		}
		c.choices = list.N
		return list.Pos
	case "usage":
		c.hasUsage = c.data[i] == '{'
		return c.members(key, i, c.count)
	case "error":
		c.failed = c.failed || c.data[i] != 'n'
		if c.data[i] == '"' {
			return c.string(key, i, &c.message)
		}
		return c.members(key, i, c.failure)
	}
	return rawjson.ValueEnd(c.data, i)
}

func (c *chunk) choice(key []byte, i int) (end int) {
	if c.firstChoice {
		switch string(key) {
		case "index":
			return c.number(key, i, &c.index)
		case "text":
			return c.string(key, i, &c.text)
		case "delta", "message":
			return c.members(key, i, c.delta)
		case "finish_reason":
			return c.string(key, i, &c.finish)
		case "stop_reason":
			if c.data[i] == '"' {
				return c.string(key, i, &c.stopReason)
			}
		}
	}
	return rawjson.ValueEnd(c.data, i)
}

func (c *chunk) delta(key []byte, i int) (end int) {
	if string(key) == "content" {
		return c.string(key, i, &c.text)
	}
	return rawjson.ValueEnd(c.data, i)
}

func (c *chunk) count(key []byte, i int) (end int) {
	switch string(key) {
	case "prompt_tokens":
		return c.number(key, i, &c.usage.prompt)
	case "completion_tokens":
		return c.number(key, i, &c.usage.completion)
	case "total_tokens":
		return c.number(key, i, &c.usage.total)
	}
	return rawjson.ValueEnd(c.data, i)
}

func (c *chunk) failure(key []byte, i int) (end int) {
	switch string(key) {
	case "message":
		return c.string(key, i, &c.message)
	case "type":
		return c.string(key, i, &c.kind)
	case "code":
		return c.scalar(key, i, &c.code)
	}
	return rawjson.ValueEnd(c.data, i)
}

// string reads a string, nil if it is null.
func (c *chunk) string(key []byte, i int, to *[]byte) (end int) {
	if c.data[i] != '"' {
		*to = nil
		return c.null(key, i, "a string")
	}
	end = rawjson.StringEnd(c.data, i)
	*to = c.data[i+1 : end-1]
	if bytes.IndexByte(*to, '\\') >= 0 {
		from := len(c.scratch)
		c.scratch = rawjson.AppendUnescaped(c.scratch, *to)
		*to = c.scratch[from:len(c.scratch):len(c.scratch)]
	}
	return end
}

// scalar reads a string, a number or null.
func (c *chunk) scalar(key []byte, i int, to *[]byte) (end int) {
	if v := c.data[i]; v == '-' || v >= '0' && v <= '9' {
		end = rawjson.ValueEnd(c.data, i)
		*to = c.data[i:end]
		return end
	}
	return c.string(key, i, to)
}

// number reads a count: a whole number that is not negative.
func (c *chunk) number(key []byte, i int, to *int) (end int) {
	end = rawjson.ValueEnd(c.data, i)
	var ok bool
	if *to, ok = rawjson.Int(c.data, i, end); !ok {
		c.wrong(key, "a count")
	}
	return end
}

// null reads a value that may only be null.
func (c *chunk) null(key []byte, i int, want string) (end int) {
	if c.data[i] != 'n' {
		c.wrong(key, want)
	}
	return rawjson.ValueEnd(c.data, i)
}

func (c *chunk) wrong(key []byte, want string) {
	if c.err == nil {
		c.err = fmt.Errorf("%q is not %s", key, want)
	}
}
