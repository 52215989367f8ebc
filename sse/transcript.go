package sse

import "evenkeel/internal/rawjson"

// Transcript records what one engine has answered, so that another engine can continue the answer. The filter adds to it with each
// event that reaches the client.
type Transcript struct {
	KeepText   bool // true: Text is recorded; false: it stays empty
	KeepPrompt bool // true: PromptIDs is recorded; false: it stays empty

	Content  bool   // an event had content: text, reasoning or a tool call
	MoreThan bool   // there was content other than plain text: reasoning or a tool call
	Unread   bool   // an event could not be read, so the transcript may lack a part of the answer
	Guessed  bool   // the engine did not count all tokens: Completed is partly estimated from chunks
	Grows    Growth // whether events of /generate have all tokens so far (cumulative) or only new ones (delta)

	Head      Head
	IDs       []int32 // the ids of the generated tokens, in order
	Shown     int     // number of IDs that came up to the last event with text; the client has seen the text of these tokens
	Text      []byte  // the text of the answer so far, escaped as inside a JSON string
	PromptIDs []byte  // the JSON list of the prompt's token ids, as the engine sent it
	Runes     int     // runes of the text of the answer so far
	Prompt    int     // tokens of the prompt as the decode engine counted them; 0: it sent no count
	Completed int     // tokens of the answer as the engine counted them

	// Spans is the JSON list weight_versions of an engine that was told to end its answer: which weights made the tokens, maybe also later
	// ones than those of the transcript. Empty: the engine has not told this, which it does only at the end.
	Spans []byte

	Last      []byte // the last event of a stream of /generate; empty: the endpoint is another one, or no event came
	textBytes int    // bytes of the text in Last, as a JSON string
}

// Growth says whether each event of a stream of /generate has the whole answer so far or only the new part.
type Growth uint8

// The growths. A stream's first event with tokens is the same for both, so it does not show which one applies.
const (
	GrowthUnknown Growth = iota
	Cumulative           // each event has the whole answer so far
	Delta                // each event has only the new part: the engine runs with --incremental-streaming-output
)

// Head holds the members that all events of an answer share, each as JSON; nil: the engine sent no such member.
type Head struct {
	ID, Created, Model, Fingerprint []byte
	Mode                            []byte // the output_mode of /inference/v1/generate
}

// Reset empties the transcript for another answer and reuses its memory.
func (t *Transcript) Reset(keepText bool) {
	*t = Transcript{KeepText: keepText, IDs: t.IDs[:0], Text: t.Text[:0], Last: t.Last[:0], Spans: t.Spans[:0]}
}

// Exact says whether the id of every token is known.
func (t *Transcript) Exact() bool { return !t.Unread && len(t.IDs) == t.Completed }

// Cut drops the ids of the tokens after Shown. The client has not seen their text, so the next engine generates these tokens again.
func (t *Transcript) Cut() {
	t.IDs = t.IDs[:t.Shown]
	t.Completed = t.Shown
}

// maxHead bounds the members of a head together, in bytes. They are copied into each event of the engine that continues an answer, so a
// large head would make all of these events large.
const maxHead = 4 << 10

// readHead copies the head of an event into one piece of memory. A head that is too long is left out, so the answer cannot be continued.
func readHead(b []byte) (h Head) {
	o := rawjson.ObjectAt(b, rawjson.Space(b, 0))
	for o.NextValue() {
		switch string(o.Key) {
		case "id":
			h.ID = o.Value()
		case "request_id": // the id of an event of /inference/v1/generate
			if h.ID == nil {
				h.ID = o.Value()
			}
		case "output_mode":
			h.Mode = o.Value()
		case "created":
			h.Created = o.Value()
		case "model":
			h.Model = o.Value()
		case "system_fingerprint":
			h.Fingerprint = o.Value()
		}
	}
	size := len(h.ID) + len(h.Created) + len(h.Model) + len(h.Fingerprint) + len(h.Mode)
	if size > maxHead {
		return Head{}
	}
	buf := make([]byte, 0, size)
	for _, v := range []*[]byte{&h.ID, &h.Created, &h.Model, &h.Fingerprint, &h.Mode} {
		if from := len(buf); *v != nil { // a member that the event lacks stays nil
			buf = append(buf, *v...)
			*v = buf[from:len(buf):len(buf)]
		}
	}
	return h
}

// runes counts the runes of s, which is escaped as inside a JSON string. The two escapes of a surrogate pair count as one rune.
func runes(s []byte) (n int) {
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c&0xC0 == 0x80: // in UTF-8, a later byte of a rune, whose first byte was counted
		case c != '\\':
			n++
		case i+5 < len(s) && s[i+1] == 'u': // an escape of six bytes
			firstOfPair := (s[i+2]|0x20) == 'd' && s[i+3] >= '8' && (s[i+3] <= '9' || (s[i+3]|0x20) <= 'b') // \uD800 to \uDBFF
			if !firstOfPair {
				n++
			}
			i += len(`u0000`)
		default: // an escape of two bytes
			n++
			i++
		}
	}
	return n
}

// Continuation describes the part of an answer that earlier engines have sent. With it, the filter edits the events of the engine that
// continues the answer, so that the client sees one answer: there is no second role, the head is the first engine's, the usage
// counts all engines, and text offsets count from the start of the whole text.
type Continuation struct {
	Head   Head
	Prompt int // tokens of the client's own prompt; 0: not known, this engine's count less Tokens is used
	Tokens int // tokens that earlier engines generated
	Runes  int // runes of the text that earlier engines generated

	Spans []byte // the list weight_versions of earlier engines at /inference/v1/generate; empty: they have not told it

	Last  []byte // the last event so far of /generate; nil: the endpoint is another one
	Grows Growth
}

// addEarlier adds the tokens of earlier engines to the usage of this engine, and removes them from its prompt, which included them.
func (c *Continuation) addEarlier(u Usage) Usage {
	u.Prompt -= c.Tokens
	if c.Prompt > 0 { // an earlier engine has counted the client's own prompt
		u.Prompt = c.Prompt
	}
	u.Completion += c.Tokens
	u.Total = u.Prompt + u.Completion
	return u
}

// Ending appends a stream that consists only of the end of an answer: the finish_reason if it is not empty, the usage and [DONE].
// A caller feeds it to a filter as if an engine had sent it, to end an answer that no engine needs to continue. h is the head of the
// answer's events, chat says whether they are those of a chat.
func Ending(dst []byte, chat bool, h Head, finish string, u Usage) []byte {
	if finish != "" {
		dst = h.openEvent(dst, chat)
		if chat {
			dst = append(dst, `{"index":0,"delta":{}`...)
		} else {
			dst = append(dst, `{"index":0,"text":""`...)
		}
		dst = rawjson.AppendString(append(dst, `,"logprobs":null,"finish_reason":`...), finish)
		dst = append(dst, `,"stop_reason":null}]}`+"\n\n"...)
	}
	dst = append(h.openEvent(dst, chat), `],"usage":`...) // the bracket closes the list of choices, which stays empty
	var otherCounts map[string]int                        // of prompt tokens, besides the cached ones: there are none
	return append(append(u.appendJSON(dst, otherCounts), "}\n\n"...), Done...)
}

// openEvent appends the beginning of an event, up to where the first choice stands. The list of choices and the event stay open.
func (h *Head) openEvent(dst []byte, chat bool) []byte {
	object := `"text_completion"`
	if chat {
		object = `"chat.completion.chunk"`
	}
	dst = append(dst, "data: {"...)
	for _, m := range []struct {
		key string
		val []byte
	}{{"id", h.ID}, {"object", []byte(object)}, {"created", h.Created}, {"model", h.Model}, {"system_fingerprint", h.Fingerprint}} {
		if m.val != nil {
			dst = append(appendKey(dst, m.key), m.val...)
		}
	}
	return append(appendKey(dst, "choices"), '[')
}
