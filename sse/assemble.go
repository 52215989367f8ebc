package sse

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"

	"evenkeel/internal/rawjson"
)

// ErrNoAnswer says that no event of the stream had a choice or a usage.
var ErrNoAnswer = errors.New("sse: the decode stream ended without any choice or usage; prefill again")

// ErrTooLarge says that an answer has more bytes than the limit of NewAssembler.
var ErrTooLarge = errors.New("the answer is larger than limits.answer_bytes; ask for a stream, or for less")

// Assembler joins the events of a stream into an answer in one piece. The events come from a Filter
// whose Options.Usage is set. The Filter, not the Assembler, decides whether the stream ended well.
type Assembler struct {
	chat         bool
	topMembers   fields // the members of the answer except object, choices and usage
	choices      []*choice
	usage        []byte
	scratch      []byte
	hasAnswer    bool // an event had a choice or a usage
	isTokensForm bool // the answer is one of /inference/v1/generate
	bytesLeft    int  // bytes of events that Add may still take before it returns ErrTooLarge
}

// NewAssembler returns an assembler for one answer whose events have up to limit bytes together; 0:
// no limit.
func NewAssembler(chat bool, limit int) *Assembler {
	if limit <= 0 {
		limit = math.MaxInt
	}
	return &Assembler{chat: chat, bytesLeft: limit}
}

// Add takes the next event: as Filter.Event returns it, or only the JSON in it. Comments and [DONE]
// add nothing.
func (a *Assembler) Add(event []byte) error {
	data := event
	if i := rawjson.Space(event, 0); i < len(event) && event[i] != '{' { // event has the lines of a whole event, not only its JSON
		a.scratch = appendDataLines(a.scratch[:0], event)
		data = a.scratch
	}
	if len(data) == 0 || isDone(data) {
		return nil
	}
	a.bytesLeft -= len(data)
	if a.bytesLeft < 0 {
		return ErrTooLarge
	}
	o := rawjson.ObjectAt(data, rawjson.Space(data, 0))
	for o.NextValue() {
		switch string(o.Key) {
		case "object": // left out: an answer in one piece has another object, which appendJSON writes
		case "choices":
			if !a.addChoices(data, o.Val) {
				o.Pos = -1 // ends the loop, as malformed JSON does
			}
		case "usage":
			if !rawjson.IsNull(o.Value()) {
				a.usage = append(a.usage[:0], o.Value()...)
				a.hasAnswer = true // even without choices: the engine has answered, and the Filter decides whether the answer is whole
			}
		case "id", "request_id", "created", "model", "system_fingerprint", "prompt_token_ids": // each is the same in all events that have it
			a.topMembers.keepFirst(o.Key, o.Value())
		default: // a member that we do not know: lists and objects of several events are joined
			a.topMembers.merge(o.Key, o.Value())
		}
	}
	switch {
	case o.Pos < 0: // the event is no JSON object, or its choices cannot be read
		return fmt.Errorf("sse: assembling the answer: an event of the decode stream of %d bytes is not a JSON object with choices", len(data))
	case a.topMembers.tooMany() || len(a.choices) > maxMembers:
		return errMembers
	}
	return nil
}

// errMembers refuses an answer with more members, choices or tool calls than any engine sends. Each
// event searches among all of them, so without a bound the time could grow with the square of their
// number.
var errMembers = fmt.Errorf("sse: assembling the answer: it has more than %d members of one kind", maxMembers)

// addChoices adds the list of choices at i in b, which may be null; ok is false if the value cannot
// be read.
func (a *Assembler) addChoices(b []byte, i int) (ok bool) {
	if rawjson.IsNull(b[i:]) {
		return true
	}
	list := rawjson.ArrayAt(b, i)
	for list.Next() {
		list.Pos = a.addChoice(b, list.Val) // where the choice ends; -1, if it cannot be read, ends the loop
	}
	return list.Pos > 0 // -1: the list, or a choice in it, cannot be read
}

// addChoice adds the choice of an event that starts at i in b, and returns where the choice ends;
// -1: it cannot be read.
func (a *Assembler) addChoice(b []byte, i int) (end int) {
	// The choice is read twice, because its index may come after other members, and says to which
	// choice of the answer they belong.
	index := 0
	o := rawjson.ObjectAt(b, i)
	for o.NextValue() {
		if n, ok := rawjson.Int(b, o.Val, o.Pos); ok && string(o.Key) == "index" {
			index = n
		}
	}
	tooMany := len(a.choices) > maxMembers
	if o.Pos < 0 || tooMany || !a.choice(index).add(b, i) {
		return -1
	}
	a.hasAnswer = true
	return o.Pos
}

// choice returns the choice with this index, and creates it if no event had it so far.
func (a *Assembler) choice(index int) *choice {
	i, found := slices.BinarySearchFunc(a.choices, index, func(c *choice, index int) int { return c.index - index })
	if !found {
		a.choices = slices.Insert(a.choices, i, &choice{index: index})
	}
	return a.choices[i]
}

// errNotJSON refuses an answer whose events are not JSON. JSON checks this, because Add checks only
// the brackets, commas, colons and quotes of events.
var errNotJSON = errors.New("sse: assembling the answer: an event of the decode stream is not JSON")

// JSON appends the answer to dst. It fails if no event had a choice or a usage, or if an event was
// not JSON.
func (a *Assembler) JSON(dst []byte) ([]byte, error) {
	if !a.hasAnswer {
		return dst, ErrNoAnswer
	}
	from := len(dst)
	if a.isTokensForm {
		dst = a.tokensJSON(dst)
	} else {
		dst = a.appendJSON(dst)
	}
	if !json.Valid(dst[from:]) {
		return dst[:from], errNotJSON
	}
	return dst, nil
}

// appendJSON appends the answer of a chat or of a completion as OpenAI's API sends it without a
// stream.
func (a *Assembler) appendJSON(dst []byte) []byte {
	dst = append(dst, '{')
	if id := a.topMembers.find([]byte("id")); id != nil { // OpenAI sends id and object first
		dst = append(appendKey(dst, "id"), id.val...)
	}
	dst = appendKey(dst, "object")
	if a.chat {
		dst = append(dst, `"chat.completion"`...)
	} else {
		dst = append(dst, `"text_completion"`...)
	}
	for _, f := range a.topMembers {
		if f.key != "id" {
			dst = append(appendKey(dst, f.key), f.val...)
		}
	}
	dst = append(appendKey(dst, "choices"), '[')
	for i, c := range a.choices {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = c.appendJSON(dst, a.chat)
	}
	dst = append(dst, ']')
	if a.usage != nil {
		dst = append(appendKey(dst, "usage"), a.usage...)
	}
	return append(dst, '}')
}
