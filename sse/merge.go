package sse

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"evenkeel/internal/rawjson"
)

// Part is one answer of a fan-out: a client's request that evenkeel split into several engine
// requests.
type Part struct {
	JSON        []byte // the answer in one piece: a chat.completion or text_completion
	PromptIndex int    // index of the prompt in the client's request that this answer is for
}

// MergeAnswers joins the answers of a fan-out. The choices are in the order of the parts and
// numbered anew. Other members come from the first part that has them. The usage is the sum, in
// which each distinct prompt counts once.
func MergeAnswers(parts []Part) ([]byte, error) {
	if len(parts) == 0 {
		return nil, errors.New("sse: merging the answers of a fan-out: there are none")
	}
	m := merger{single: len(parts) == 1}
	for i, p := range parts {
		if err := m.add(p); err != nil {
			return nil, fmt.Errorf("sse: merging the answers of a fan-out: part %d: %w", i, err)
		}
	}
	return m.json()
}

// merger builds one answer from the answers of a fan-out, which add takes one after the other.
type merger struct {
	single     bool // there is only one answer, so members that describe one answer may stay
	topMembers fields
	choices    []byte // the elements of the list choices, as JSON with commas between them
	count      int    // number of choices so far, and so the index of the next one
	usage      usageSum
}

// add takes in the next answer. Its choices get new indices, and its usage is added to the sum. Of
// its other members, only those that no earlier answer had are used.
func (m *merger) add(p Part) error {
	b := p.JSON
	hasChoices := false
	o := rawjson.ObjectAt(b, rawjson.Space(b, 0))
	for o.NextValue() {
		switch string(o.Key) {
		case "choices":
			hasChoices = m.addChoices(b, o.Val)
		case "usage":
			if err := m.usage.add(o.Value(), p.PromptIndex); err != nil {
				return err
			}
		case "metrics": // metrics describe one answer; vLLM 0.33 leaves them out if a request has several
			if m.single {
				m.topMembers.keepFirst(o.Key, o.Value())
			}
		default:
			m.topMembers.keepFirst(o.Key, o.Value())
		}
	}
	if o.Pos < 0 || !hasChoices {
		return fmt.Errorf("not an answer with choices, of %d bytes", len(b))
	}
	return nil
}

// addChoices adds the list of choices at i in b; ok is false if it is not a list of objects.
func (m *merger) addChoices(b []byte, i int) (ok bool) {
	list := rawjson.ArrayAt(b, i)
	for list.Next() {
		if m.count > 0 {
			m.choices = append(m.choices, ',')
		}
		list.Pos = m.addChoice(b, list.Val) // the loop goes on there; -1 ends it
		m.count++
	}
	return list.Pos > 0 // -1: the list, or a choice in it, could not be read
}

// addChoice copies the choice at i in b with its new index, and returns where it ends; -1: it is
// not an object that can be read.
func (m *merger) addChoice(b []byte, i int) (end int) {
	m.choices = strconv.AppendInt(append(m.choices, `{"index":`...), int64(m.count), 10)
	o := rawjson.ObjectAt(b, i)
	for o.NextValue() {
		keyAndValue := b[o.Quote:o.Pos]
		if string(o.Key) != "index" {
			m.choices = append(append(m.choices, ','), keyAndValue...)
		}
	}
	m.choices = append(m.choices, '}')
	return o.Pos // after the last member: the end of the object, or -1
}

// json returns the merged answer. It has a usage if at least one of the answers had one.
func (m *merger) json() ([]byte, error) {
	dst := appendKey(m.topMembers.appendMembers([]byte{'{'}), "choices")
	dst = append(append(append(dst, '['), m.choices...), ']')
	if m.usage.found {
		usage, err := json.Marshal(&m.usage)
		if err != nil {
			return nil, fmt.Errorf("sse: merging the answers of a fan-out: %w", err)
		}
		dst = append(append(dst, `,"usage":`...), usage...)
	}
	return append(dst, '}'), nil
}

var errUsage = errors.New("its usage is no object of counts")

// usageSum adds up the usage of answers. The details are summed by name.
type usageSum struct {
	Prompt     int            `json:"prompt_tokens"`
	Total      int            `json:"total_tokens"`
	Completion int            `json:"completion_tokens"`
	PromptBy   map[string]int `json:"prompt_tokens_details,omitempty"`
	ComplBy    map[string]int `json:"completion_tokens_details,omitempty"`

	found   bool // at least one answer had a usage
	prompts map[int]bool
}

// add adds the usage val of one answer. prompt is the index of its prompt, whose tokens count only
// with the first answer to it.
func (s *usageSum) add(val []byte, prompt int) error {
	if rawjson.IsNull(val) { // the engine sent no usage
		return nil
	}
	var one struct {
		Prompt     int             `json:"prompt_tokens"`
		Completion int             `json:"completion_tokens"`
		PromptBy   json.RawMessage `json:"prompt_tokens_details"`
		ComplBy    json.RawMessage `json:"completion_tokens_details"`
	}
	if err := json.Unmarshal(val, &one); err != nil {
		return errUsage // the decoder's own error is not shown, because it quotes numbers of the answer
	}
	s.found = true
	s.Completion += one.Completion
	addCounts(&s.ComplBy, one.ComplBy)
	if !s.prompts[prompt] { // no earlier answer was to this prompt
		if s.prompts == nil {
			s.prompts = map[int]bool{}
		}
		s.prompts[prompt] = true
		s.Prompt += one.Prompt
		addCounts(&s.PromptBy, one.PromptBy)
	}
	s.Total = s.Prompt + s.Completion
	return nil
}

// addCounts adds each count in details to sum. It ignores a member that is not a number.
func addCounts(sum *map[string]int, details []byte) {
	o := rawjson.ObjectAt(details, 0)
	for o.NextValue() {
		n, ok := rawjson.Int(details, o.Val, o.Pos)
		if !ok {
			continue
		}
		if *sum == nil {
			*sum = map[string]int{}
		}
		(*sum)[string(o.Key)] += n
	}
}
