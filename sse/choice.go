package sse

import (
	"slices"
	"strconv"

	"evenkeel/internal/rawjson"
)

// choice collects one choice of an answer from the events of a stream.
type choice struct {
	index        int
	text         []byte // of a completion: the text so far as a JSON string; nil: none came
	message      fields // of a chat: the members of all deltas so far, joined
	tools        calls
	function     fields // the single function_call of older APIs
	logprobs     fields
	hasProbs     bool
	finishReason []byte
	otherMembers fields // stop_reason, token_ids, and members that we do not know
}

// add adds the choice of one event, an object at i in b; ok is false if it cannot be read or has
// too many members.
func (c *choice) add(b []byte, i int) (ok bool) {
	o := rawjson.ObjectAt(b, i)
	for o.NextValue() {
		val := o.Value()
		switch string(o.Key) {
		case "index": // addChoice has read the index already
		case "delta":
			if !rawjson.IsNull(val) && !c.addDelta(b, o.Val) {
				return false
			}
		case "text":
			c.addText(val)
		case "logprobs":
			c.hasProbs = true
			if !rawjson.IsNull(val) && !c.addLogprobs(b, o.Val) {
				return false
			}
		case "finish_reason":
			if !rawjson.IsNull(val) {
				c.finishReason = append(c.finishReason[:0], val...)
			}
		case "token_ids": // each event has only the ids of its new tokens
			c.otherMembers.appendTo(o.Key, val)
		case "prompt_token_ids": // only the first event has the ids of the prompt
			c.otherMembers.keepFirst(o.Key, val)
		default:
			c.otherMembers.merge(o.Key, val)
		}
	}
	return o.Pos > 0 && !c.tooMany()
}

// tooMany says whether any object or list of the choice has more than maxMembers members.
func (c *choice) tooMany() bool {
	return c.message.tooMany() || c.function.tooMany() || c.logprobs.tooMany() || c.otherMembers.tooMany() || len(c.tools) > maxMembers
}

// addText appends a JSON string to the text so far. It ignores a value that is not a string.
func (c *choice) addText(val []byte) {
	switch {
	case val[0] != '"': // such as null
	case c.text == nil:
		c.text = append(c.text, val...)
	default: // joined without the closing quote of the first string and the opening one of the second
		c.text = append(c.text[:len(c.text)-1], val[1:]...)
	}
}

// addDelta adds the delta of a chat's choice, an object at i in b; ok is false if it cannot be
// read.
func (c *choice) addDelta(b []byte, i int) (ok bool) {
	o := rawjson.ObjectAt(b, i)
	for o.NextValue() {
		val := o.Value()
		switch string(o.Key) {
		case "role":
			c.message.keepFirst(o.Key, val)
		case "tool_calls":
			if !rawjson.IsNull(val) && !c.tools.add(b, o.Val) {
				return false
			}
		case "function_call":
			if !rawjson.IsNull(val) && !addFunction(&c.function, b, o.Val) {
				return false
			}
		default: // text that grows: content, refusal, reasoning or reasoning_content
			if val[0] == '"' {
				c.message.appendTo(o.Key, val)
			} else { // null, or the value of a member that we do not know
				c.message.merge(o.Key, val)
			}
		}
	}
	return o.Pos > 0 // after the loop, Pos is the end of the object, or -1 if it is malformed
}

// addLogprobs joins the arrays in the logprobs at i in b to those of earlier events; ok is false if
// they cannot be read. The arrays are content and refusal for chat, and tokens, token_logprobs,
// top_logprobs and text_offset for completions. Of other members the last value stays.
func (c *choice) addLogprobs(b []byte, i int) (ok bool) {
	o := rawjson.ObjectAt(b, i)
	for o.NextValue() {
		if o.Value()[0] == '[' {
			c.logprobs.appendTo(o.Key, o.Value())
		} else {
			c.logprobs.keepLast(o.Key, o.Value())
		}
	}
	return o.Pos > 0
}

// appendJSON appends the choice in the form that an answer without a stream has.
func (c *choice) appendJSON(dst []byte, chat bool) []byte {
	dst = strconv.AppendInt(append(dst, `{"index":`...), int64(c.index), 10)
	if chat {
		dst = c.appendMessage(appendKey(dst, "message"))
	} else {
		dst = appendKey(dst, "text")
		if c.text == nil {
			dst = append(dst, '"', '"')
		}
		dst = append(dst, c.text...) // nothing if it is nil
	}
	switch {
	case len(c.logprobs) > 0:
		dst = append(c.logprobs.appendMembers(append(appendKey(dst, "logprobs"), '{')), '}')
	case c.hasProbs: // all events had null or an empty object
		dst = append(appendKey(dst, "logprobs"), "null"...)
	}
	dst = appendKey(dst, "finish_reason")
	if c.finishReason == nil {
		dst = append(dst, "null"...)
	}
	dst = append(dst, c.finishReason...)
	return append(c.otherMembers.appendMembers(dst), '}')
}

// appendMessage appends the message of a chat's choice, in the order in which engines write it.
func (c *choice) appendMessage(dst []byte) []byte {
	dst = append(dst, `{"role":`...)
	if role := c.message.find([]byte("role")); role != nil && !rawjson.IsNull(role.val) {
		dst = append(dst, role.val...)
	} else {
		dst = append(dst, `"assistant"`...)
	}
	dst = appendKey(dst, "content")
	content := c.message.find([]byte("content"))
	switch {
	case content != nil && len(content.val) > len(`""`) && !rawjson.IsNull(content.val): // a content that is not empty
		dst = append(dst, content.val...)
	case c.hasNonContent(): // an empty content beside a tool call, a refusal or reasoning becomes null
		dst = append(dst, "null"...)
	default:
		dst = append(dst, '"', '"')
	}
	for _, f := range c.message {
		if f.key != "role" && f.key != "content" {
			dst = append(appendKey(dst, f.key), f.val...)
		}
	}
	if len(c.function) > 0 {
		dst = append(c.function.appendMembers(append(appendKey(dst, "function_call"), '{')), '}')
	}
	if len(c.tools) > 0 {
		dst = c.tools.appendJSON(appendKey(dst, "tool_calls"))
	}
	return append(dst, '}')
}

// hasNonContent says whether the message has anything besides content, so that an empty content
// becomes null: a tool call, a refusal or reasoning.
func (c *choice) hasNonContent() bool {
	return len(c.tools) > 0 || len(c.function) > 0 || slices.ContainsFunc(c.message, func(f field) bool {
		isOther := f.key != "role" && f.key != "content"
		return isOther && len(f.val) > len(`""`) && !rawjson.IsNull(f.val)
	})
}

// calls are the tool calls of a message, sorted by their index in the deltas.
type calls []*call

// call collects one tool call from the deltas of a stream.
type call struct {
	index        int
	function     fields
	otherMembers fields // id, type, and members that we do not know
}

// add adds the tool calls of a delta, a list at i in b; ok is false if it cannot be read.
func (cs *calls) add(b []byte, i int) (ok bool) {
	list := rawjson.ArrayAt(b, i)
	for list.Next() {
		list.Pos = cs.addOne(b, list.Val, list.N-1)
	}
	return list.Pos > 0
}

// addOne adds the delta of one tool call, at i in b, and returns where it ends; -1: it cannot be
// read. index is its position in the list, which is used if the delta has no index of its own.
func (cs *calls) addOne(b []byte, i, index int) (end int) {
	// The delta is read twice, because its index may come after other members, and says to which tool
	// call they belong.
	o := rawjson.ObjectAt(b, i)
	for o.NextValue() {
		if n, ok := rawjson.Int(b, o.Val, o.Pos); ok && string(o.Key) == "index" {
			index = n
		}
	}
	end = o.Pos
	if end < 0 || len(*cs) > maxMembers {
		return -1
	}
	c := cs.call(index)
	for o = rawjson.ObjectAt(b, i); o.NextValue(); {
		val := o.Value()
		switch string(o.Key) {
		case "index": // tool calls have an index only in a stream
		case "function":
			if !rawjson.IsNull(val) && !addFunction(&c.function, b, o.Val) {
				return -1
			}
		case "id", "type": // they come with the first delta of the call, and a later value does not replace them
			c.otherMembers.keepFirst(o.Key, val)
		default: // a member that we do not know: the newest value is taken to be the valid one
			c.otherMembers.keepLast(o.Key, val)
		}
	}
	if c.otherMembers.tooMany() || c.function.tooMany() {
		return -1
	}
	return end
}

// call returns the tool call with this index, and creates it if no delta had it so far.
func (cs *calls) call(index int) *call {
	i, found := slices.BinarySearchFunc(*cs, index, func(c *call, index int) int { return c.index - index })
	if !found {
		*cs = slices.Insert(*cs, i, &call{index: index})
	}
	return (*cs)[i]
}

// addFunction adds the function at i in b to fn: it keeps the first name and joins the arguments.
// Of other members the last value stays. ok is false if the function cannot be read.
func addFunction(fn *fields, b []byte, i int) (ok bool) {
	o := rawjson.ObjectAt(b, i)
	for o.NextValue() {
		val := o.Value()
		switch {
		case string(o.Key) == "name":
			fn.keepFirst(o.Key, val)
		case string(o.Key) == "arguments" && val[0] == '"':
			fn.appendTo(o.Key, val)
		default:
			fn.keepLast(o.Key, val)
		}
	}
	return o.Pos > 0 // after the loop, Pos is the end of the object, or -1 if it is malformed
}

// appendJSON appends the tool calls as the list tool_calls of a message, without the index that
// they have in a stream.
func (cs calls) appendJSON(dst []byte) []byte {
	dst = append(dst, '[')
	for i, c := range cs {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = c.otherMembers.appendMembers(append(dst, '{'))
		if c.otherMembers.find([]byte("type")) == nil { // a complete tool call has a type and arguments, even if no delta had them
			dst = append(appendKey(dst, "type"), `"function"`...)
		}
		dst = c.function.appendMembers(append(appendKey(dst, "function"), '{'))
		if c.function.find([]byte("arguments")) == nil {
			dst = append(appendKey(dst, "arguments"), '"', '"')
		}
		dst = append(dst, '}', '}')
	}
	return append(dst, ']')
}
